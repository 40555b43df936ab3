"""What the Python API returns, and how it grows from what the engine gives piece by piece."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from gateway.delta import Delta, TokenLogprob
from gateway.tokenizer import Tokenizer


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
    """What has come of one answer so far."""

    def __init__(self, index: int, tokenizer: Tokenizer) -> None:
        self.index, self._tokenizer = index, tokenizer
        self._texts: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprob] | None = None
        self._stop_reason: str | int | None = None
        self.finish_reason: str | None = None
        self.prompt_logprobs: list[TokenLogprob | None] | None = None
        self.num_cached_tokens: int | None = None

    def add(self, delta: Delta) -> None:
        self._texts.append(delta.text)
        self._token_ids += delta.token_ids
        if delta.logprobs is not None:
            self._logprobs = (self._logprobs or []) + delta.logprobs
        self.prompt_logprobs = self.prompt_logprobs or delta.prompt_logprobs
        self.finish_reason, self._stop_reason = delta.finish_reason, delta.stop_reason
        self.num_cached_tokens = delta.num_cached_tokens

    def output(self) -> CompletionOutput:
        logprobs = self._logprobs
        return CompletionOutput(
            self.index,
            "".join(self._texts),
            list(self._token_ids),
            None if logprobs is None else [_alternatives(token, self._tokenizer) for token in logprobs],
            None if logprobs is None else sum(token.logprob for token in logprobs),
            self.finish_reason,
            self._stop_reason,
        )


def request_output(
    request_id: str, prompt: str | None, prompt_token_ids: list[int], answers: Sequence[Collected], tokenizer: Tokenizer
) -> RequestOutput:
    """Return what there is of all the answers to a prompt."""
    prompt_logprobs = answers[0].prompt_logprobs
    return RequestOutput(
        request_id,
        prompt,
        prompt_token_ids,
        [answer.output() for answer in answers],
        answers[0].num_cached_tokens,
        None
        if prompt_logprobs is None
        else [None if token is None else _alternatives(token, tokenizer) for token in prompt_logprobs],
        all(answer.finish_reason is not None for answer in answers),
    )


def _alternatives(token: TokenLogprob, tokenizer: Tokenizer) -> Alternatives:
    own = (token.token_id, token.logprob, token.rank)
    top = ((token_id, logprob, rank) for rank, (token_id, logprob) in enumerate(token.top, 1))
    found: Alternatives = {}
    for token_id, logprob, rank in itertools.chain([own], top):
        found.setdefault(token_id, Logprob(logprob, rank, tokenizer.token_text(token_id)))
    return found
