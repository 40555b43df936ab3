"""What the Python API returns, and how it grows from what the engine gives piece by piece."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from octavo.gateway.text.delta import Delta, TokenLogprob, Whole
from octavo.gateway.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Logprob:
    """Log probability of a token in one place, its rank there (1 is the likeliest), and its text."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


# Of one place: its own token first, then the likeliest ones asked for, by token id.
Alternatives = dict[int, Logprob]


@dataclass(slots=True)
class CompletionOutput:
    """One answer to a prompt.

    `token_ids` ends with the token that ended the answer, whose text is not in `text` unless asked for. `logprobs`
    has an entry a token, None if none were asked for, as `cumulative_logprob` is, their sum over the answer's own
    tokens. `finish_reason` is "stop" or "length", None while it goes on; `stop_reason` is the stop string or stop
    token id that ended it, None if that was the model's own end or the length.
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

    `prompt` is its text, for a chat what the template made of the messages, None if it was given as token ids.
    `num_cached_tokens` counts the prompt's tokens that were found in the prefix cache. `prompt_logprobs` has an entry
    a prompt token, the first one None, if they were asked for. `finished` says that every answer has ended.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    num_cached_tokens: int | None = None
    prompt_logprobs: list[Alternatives | None] | None = None
    finished: bool = True


class Collected:
    """What has come of one answer so far. What an output takes is made of each delta once, and shared by outputs."""

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
    """Return what there is of all the answers to a prompt."""
    return RequestOutput(
        request_id,
        prompt,
        prompt_token_ids,
        [answer.output() for answer in answers],
        answers[0].num_cached_tokens,
        answers[0].prompt_logprobs,
        all(answer.finish_reason is not None for answer in answers),
    )


def _alternatives(token: TokenLogprob, tokenizer: Tokenizer) -> Alternatives:
    own = (token.token_id, token.logprob, token.rank)
    top = ((token_id, logprob, rank) for rank, (token_id, logprob) in enumerate(token.top, 1))
    found: Alternatives = {}
    for token_id, logprob, rank in itertools.chain([own], top):
        found.setdefault(token_id, Logprob(logprob, rank, tokenizer.token_text(token_id)))
    return found
