"""The outputs of the Python API, and how they grow from the engine's Deltas."""

import itertools
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from octavo.gateway.text.delta import Delta, TokenLogprob, Whole
from octavo.gateway.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Logprob:
    """Log probability of a token at one position, its rank there (1 is the most likely), and its text."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


# For one position, by token id: the position's own token first, then as many of the most likely as were asked for.
Alternatives = dict[int, Logprob]


@dataclass(slots=True)
class CompletionOutput:
    """One answer to a prompt.

    `token_ids` ends with the token that ended the answer; `text` has the text of that token only on request.
    `logprobs` has an entry per token, and `cumulative_logprob` is the sum over the answer's tokens; both are None
    unless asked for. `finish_reason` is "stop" or "length", and None while the answer goes on. `stop_reason` is the
    stop string or stop token id that ended the answer, and None for the model's own end or the length.
    """

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[Alternatives] | None = None
    cumulative_logprob: float | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestOutput:
    """The answers to one prompt.

    `prompt` is the prompt's text (of a chat: the rendered messages), or None if it was given as token ids.
    `num_cached_tokens` counts the prompt's tokens that were found in the prefix cache. `prompt_logprobs`, if asked
    for, has an entry per prompt token, the first one None. `finished`: every answer has ended.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    num_cached_tokens: int | None = None
    prompt_logprobs: list[Alternatives | None] | None = None
    finished: bool = True


@dataclass(slots=True)
class EmbeddingOutput:
    """The vector of a prompt."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        return len(self.embedding)


@dataclass(slots=True)
class EmbeddingRequestOutput:
    """The vector of one prompt, in `outputs`. `num_cached_tokens` of the prompt were found in the prefix cache."""

    request_id: str
    outputs: EmbeddingOutput
    prompt_token_ids: list[int]
    num_cached_tokens: int = 0
    finished: bool = True


def embedding_output(request_id: str, prompt_token_ids: list[int], whole: Whole) -> EmbeddingRequestOutput:
    """Return the output of a prompt that was embedded."""
    embedding = array("f")
    embedding.frombytes(whole.embedding)
    return EmbeddingRequestOutput(
        request_id=request_id,
        outputs=EmbeddingOutput(embedding.tolist()),
        prompt_token_ids=prompt_token_ids,
        num_cached_tokens=whole.num_cached_tokens,
    )


class Collected:
    """One answer so far. Each Delta is converted once, and all outputs share the result."""

    def __init__(self, index: int, tokenizer: Tokenizer) -> None:
        self.index, self._tokenizer = index, tokenizer
        self._whole = Whole()
        self._logprobs: list[Alternatives] | None = None
        self._cumulative_logprob = 0.0
        self.prompt_logprobs: list[Alternatives | None] | None = None

    @property
    def finish_reason(self) -> str | None:
        return self._whole.finish_reason

    @property
    def num_cached_tokens(self) -> int:
        return self._whole.num_cached_tokens

    def add(self, delta: Delta) -> None:
        self._whole.add(delta)
        if delta.logprobs is not None:
            self._logprobs = self._logprobs or []
            self._logprobs += [_alternatives(token, self._tokenizer) for token in delta.logprobs]
            self._cumulative_logprob += sum(token.logprob for token in delta.logprobs)
        if delta.prompt_logprobs is not None:
            self.prompt_logprobs = [
                None if token is None else _alternatives(token, self._tokenizer) for token in delta.prompt_logprobs
            ]

    def output(self) -> CompletionOutput:
        whole, logprobs = self._whole, self._logprobs
        return CompletionOutput(
            self.index,
            whole.text,
            list(whole.token_ids),
            None if logprobs is None else list(logprobs),
            None if logprobs is None else self._cumulative_logprob,
            whole.finish_reason,
            whole.stop_reason,
        )


def request_output(
    request_id: str, prompt: str | None, prompt_token_ids: list[int], answers: Sequence[Collected]
) -> RequestOutput:
    """Return the answers to a prompt so far."""
    return RequestOutput(
        request_id=request_id,
        prompt=prompt,
        prompt_token_ids=prompt_token_ids,
        outputs=[answer.output() for answer in answers],
        num_cached_tokens=answers[0].num_cached_tokens,
        prompt_logprobs=answers[0].prompt_logprobs,
        finished=all(answer.finish_reason is not None for answer in answers),
    )


def _alternatives(token: TokenLogprob, tokenizer: Tokenizer) -> Alternatives:
    own = (token.token_id, token.logprob, token.rank)
    top = ((token_id, logprob, rank) for rank, (token_id, logprob) in enumerate(token.top, 1))
    found: Alternatives = {}
    for token_id, logprob, rank in itertools.chain([own], top):
        found.setdefault(token_id, Logprob(logprob, rank, tokenizer.token_text(token_id)))
    return found
