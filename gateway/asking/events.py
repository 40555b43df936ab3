"""The events of a choice, which every dialect renders: the parts of an answer, with their tokens."""

from itertools import chain

import msgspec

from octavo.gateway.parsing.parts import Content, Part, Reasoning, ToolCall
from octavo.gateway.text.delta import Delta, Whole


class Event(msgspec.Struct, frozen=True):
    """New output of one choice. `delta` has tokens and log probabilities; `parts` has the text, divided.

    `finish_reason` is that of the last delta, or "tool_calls" if the choice ended, uncut, with calls.
    """

    choice: int
    parts: tuple[Part, ...]
    delta: Delta
    finish_reason: str | None = None


class WholeCall(msgspec.Struct):
    """A tool call with all of its arguments."""

    id: str
    name: str
    arguments: str


class Answer:
    """The whole answer of one choice, collected from its events."""

    def __init__(self) -> None:
        self.whole = Whole()
        self.finish_reason: str | None = None
        self._parts: list[tuple[Part, ...]] = []

    def add(self, event: Event) -> None:
        self.whole.add(event.delta)
        self._parts.append(event.parts)
        self.finish_reason = event.finish_reason

    @property
    def content(self) -> str:
        return "".join(part.text for part in chain(*self._parts) if isinstance(part, Content))

    @property
    def reasoning(self) -> str:
        return "".join(part.text for part in chain(*self._parts) if isinstance(part, Reasoning))

    @property
    def tool_calls(self) -> list[WholeCall]:
        pieces: dict[int, list[ToolCall]] = {}
        for part in chain(*self._parts):
            if isinstance(part, ToolCall):
                pieces.setdefault(part.index, []).append(part)
        return [
            WholeCall(first.id or "", first.name or "", "".join(part.arguments for part in (first, *more)))
            for first, *more in pieces.values()
        ]
