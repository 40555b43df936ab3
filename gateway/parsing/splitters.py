"""Makes the parts of a choice: thinking comes first, and calls are looked for in what follows it."""

from collections.abc import Callable, Sequence
from itertools import accumulate

from octavo.gateway.parsing.harmony import Harmony
from octavo.gateway.parsing.parts import Content, Parser, Part, Reasoning, ToolCall, joined
from octavo.gateway.parsing.thinking import Thinking
from octavo.gateway.text.delta import Delta

LengthOfToken = Callable[[int], int]  # from a token's id to the number of its characters


class TextSplitter:
    """For models whose answers are text with tags. One of `thinking` and `calls` may be missing."""

    def __init__(
        self, thinking: Thinking | None, calls: Parser | None, length_of: LengthOfToken, *, is_parallel: bool = True
    ) -> None:
        """`is_parallel` False: calls after the first one are left out."""
        self._thinking, self._calls, self._is_parallel = thinking, calls, is_parallel
        self._tokens = _ReasoningTokens(length_of)

    @property
    def num_reasoning_tokens(self) -> int:
        return self._tokens.count

    def split(self, delta: Delta) -> tuple[Part, ...]:
        thoughts, text = self._thinking.feed(delta.text) if self._thinking else ("", delta.text)
        parts = self._parts(thoughts, text)
        if self._thinking:
            self._tokens.add(delta, self._thinking.switches, is_decided=self._thinking.is_decided)
        if delta.finish_reason is not None:
            if self._thinking:
                parts += self._parts(*self._thinking.end())
            parts += self._calls.end() if self._calls else []
        return tuple(joined(parts if self._is_parallel else _first_call_only(parts)))

    def _parts(self, thoughts: str, text: str) -> list[Part]:
        answer: Sequence[Part] = (self._calls.feed(text) if self._calls else [Content(text)]) if text else []
        return [Reasoning(thoughts), *answer]


class HarmonySplitter:
    """For models that answer in harmony, which has both in one format."""

    def __init__(self, harmony: Harmony, length_of: LengthOfToken, *, is_parallel: bool = True) -> None:
        self._harmony, self._is_parallel = harmony, is_parallel
        self._tokens = _ReasoningTokens(length_of)

    @property
    def num_reasoning_tokens(self) -> int:
        return self._tokens.count

    def split(self, delta: Delta) -> tuple[Part, ...]:
        parts = self._harmony.feed(delta.text)
        self._tokens.add(delta, self._harmony.switches, is_decided=True)
        if delta.finish_reason is not None:
            parts += self._harmony.end()
        return tuple(joined(parts if self._is_parallel else _first_call_only(parts)))


class _ReasoningTokens:
    """Counts the tokens that begin in the thinking, however the tokens come."""

    def __init__(self, length_of: LengthOfToken) -> None:
        self._length_of = length_of
        self._num_characters = 0
        self._undecided: list[int] = []  # where tokens begin of which it is not known
        self.count = 0

    def add(self, delta: Delta, switches: Sequence[int], *, is_decided: bool) -> None:
        """`switches`: where in the text so far thinking began and ended."""
        lengths = map(self._length_of, delta.token_ids[:-1])
        starts = accumulate(lengths, initial=self._num_characters) if delta.token_ids else ()
        self._num_characters += len(delta.text)
        self._undecided += [min(start, self._num_characters) for start in starts]
        if is_decided:
            self.count += sum(sum(switch <= start for switch in switches) % 2 for start in self._undecided)
            self._undecided = []


def _first_call_only(parts: Sequence[Part]) -> list[Part]:
    return [part for part in parts if not (isinstance(part, ToolCall) and part.index > 0)]
