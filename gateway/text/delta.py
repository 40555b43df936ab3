"""The output of a generation: pieces of it, and the whole."""

from array import array
from dataclasses import dataclass, field

import msgspec

from octavo.protocol.messages import Logprobs, unpack_ids


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log probability of one token, its rank (1 is the most likely) and the most likely tokens, best first."""

    token_id: int
    logprob: float
    rank: int
    top: list[tuple[int, float]] = field(default_factory=list)


class Delta(msgspec.Struct):
    """New output: text that later tokens cannot change, and the tokens whose whole text is out.

    Every Delta has text, `prompt_logprobs` or a `finish_reason` ("stop", "length", "abort" or "error"). Only the last
    Delta has a `finish_reason`. Tokens without text come with the next text. `stop_reason` is the stop string or the
    user's stop token id that ended the generation. `prompt_logprobs` (one entry per prompt token, the first None) comes
    once, with the first Delta, if the request wants it. Usage is the sum of `len(token_ids)`.
    """

    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    num_cached_tokens: int = 0  # of the prompt
    error: str | None = None
    embedding: bytes = b""  # float32; with the end of a request to embed


def merged(first: Delta, then: Delta) -> Delta:
    """Return two Deltas of one generation, in this order, as one."""
    logprobs = None if first.logprobs is None is then.logprobs else [*(first.logprobs or ()), *(then.logprobs or ())]
    return msgspec.structs.replace(
        then,
        text=first.text + then.text,
        token_ids=first.token_ids + then.token_ids,
        logprobs=logprobs,
        prompt_logprobs=first.prompt_logprobs or then.prompt_logprobs,
    )


class Whole:
    """The output of one generation so far, with the fields of a Delta. `add` extends it by a Delta."""

    def __init__(self) -> None:
        self._texts: list[str] = []
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprob] | None = None
        self.prompt_logprobs: list[TokenLogprob | None] | None = None
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None
        self.num_cached_tokens = 0
        self.embedding = b""

    @property
    def text(self) -> str:
        if len(self._texts) > 1:
            self._texts = ["".join(self._texts)]
        return self._texts[0] if self._texts else ""

    def add(self, delta: Delta) -> None:
        """Add the output in `delta`. Only the last Delta has the finish and the number of cached tokens."""
        if delta.text:
            self._texts.append(delta.text)
        self.token_ids += delta.token_ids
        if delta.logprobs is not None:
            self.logprobs = self.logprobs or []
            self.logprobs += delta.logprobs
        if delta.prompt_logprobs is not None:
            self.prompt_logprobs = delta.prompt_logprobs
        self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason
        self.num_cached_tokens = delta.num_cached_tokens
        self.embedding = delta.embedding


def token_logprobs(token_ids: "list[int] | array[int]", packed: Logprobs) -> list[TokenLogprob]:
    """Return one TokenLogprob for each of `token_ids`."""
    width = packed.num_alternatives
    logprobs, ranks = _unpack_floats(packed.token_logprobs), unpack_ids(packed.token_ranks)
    top = list(zip(unpack_ids(packed.top_token_ids), _unpack_floats(packed.top_logprobs), strict=True))
    return [
        TokenLogprob(token_id, logprob, rank, top[index * width : (index + 1) * width])
        for index, (token_id, logprob, rank) in enumerate(zip(token_ids, logprobs, ranks, strict=True))
    ]


def _unpack_floats(packed: bytes) -> "array[float]":
    floats = array("f")
    floats.frombytes(packed)
    return floats
