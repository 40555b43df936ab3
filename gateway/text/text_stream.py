"""Turns the tokens of one sequence into Deltas: detokenizes, cuts at stop strings, keeps tokens with their text."""

from collections import deque
from typing import NamedTuple

from octavo.gateway.text.delta import Delta, TokenLogprob, token_logprobs
from octavo.gateway.text.detokenizer import Detokenizer
from octavo.gateway.text.stop_strings import StopStrings
from octavo.protocol.messages import Output, unpack_ids
from octavo.protocol.sampling import Sampling


class HeldToken(NamedTuple):
    token_id: int
    logprob: TokenLogprob | None
    text_end: int  # where the token's text ends in the whole text


class TextStream:
    """Pure: `push` each Output of a request in order, and pass the returned Deltas on.

    A stop token has no text in the Delta unless `include_stop` is set.
    """

    def __init__(
        self,
        detokenizer: Detokenizer,
        sampling: Sampling,
        prompt_token_ids: list[int],
        stop: tuple[str, ...] = (),
        include_stop: bool = False,
    ) -> None:
        self._detokenizer, self._sampling, self._prompt_token_ids = detokenizer, sampling, prompt_token_ids
        self._stops = StopStrings(stop) if stop else None
        self._stop_strings, self._include_stop = stop, include_stop
        self._only_text = not stop and sampling.num_logprobs is None
        self._undecoded: list[tuple[int, TokenLogprob | None]] = []  # tokens whose text is not complete
        self._held: deque[HeldToken] = deque()  # tokens whose text is not completely released
        self._text = ""  # complete, but not released
        self._text_end = 0  # the number of complete characters of the whole text
        self._num_tokens = 0
        self._num_cached_tokens = 0

    def push(self, output: Output) -> Delta | None:
        """Return the Delta that `output` releases, or None. Do not push after a Delta with a `finish_reason`."""
        self._num_cached_tokens = self._num_cached_tokens or output.num_cached_tokens
        token_ids = unpack_ids(output.token_ids)
        if len(token_ids) == 1 and self._is_plain(output):
            return self._push_plain(token_ids[0], output)
        logprobs = token_logprobs(token_ids, output.logprobs) if output.logprobs else [None] * len(token_ids)
        silent = len(token_ids) - 1 if output.finish_reason == "stop" and not self._include_stop else -1
        for index, (token_id, logprob) in enumerate(zip(token_ids, logprobs, strict=True)):
            piece = "" if index == silent else self._detokenizer.step(token_id)
            if (found := self._take(token_id, logprob, piece)) is not None:
                return self._stopped(*found, output)
        if output.finish_reason is None:
            return self._release(output)
        if (found := self._add(self._detokenizer.flush(), 0)) is not None:
            return self._stopped(*found, output)
        return self._finished(output)

    def _is_plain(self, output: Output) -> bool:
        """Whether `output` has only text and no earlier text waits: then it needs no further check."""
        is_text = output.finish_reason is None and output.prompt_logprobs is None
        return self._only_text and is_text and not self._held and not self._undecoded

    def _push_plain(self, token_id: int, output: Output) -> Delta | None:
        piece = self._detokenizer.step(token_id)
        if not piece:
            self._take(token_id, None, piece)
            return self._release(output)
        self._num_tokens += 1
        self._text_end += len(piece)
        return Delta(piece, [token_id], num_cached_tokens=self._num_cached_tokens)

    def _take(self, token_id: int, logprob: TokenLogprob | None, piece: str) -> tuple[str, int] | None:
        """Take a token and the text that it completes; return the result of `_add`."""
        self._num_tokens += 1
        self._undecoded.append((token_id, logprob))
        return self._add(piece, self._detokenizer.num_pending_tokens)

    def _add(self, piece: str, num_pending_tokens: int) -> tuple[str, int] | None:
        """Take complete text; return (stop string, its end in the unreleased text) if the text completes one."""
        start = len(self._text)
        self._text += piece
        self._text_end += len(piece)
        for _ in range(len(self._undecoded) - num_pending_tokens):
            self._held.append(HeldToken(*self._undecoded.pop(0), self._text_end))
        if not piece or self._stops is None:
            return None
        # As in vLLM, a stop string counts from the first token after min_tokens on.
        found = self._stops.feed(piece, armed=self._num_tokens > self._sampling.min_tokens)
        return found and (found[0], start + found[1])

    def _release(self, output: Output) -> Delta | None:
        num_held = self._stops.num_held if self._stops else 0
        text = self._text[: len(self._text) - num_held]
        if not text and output.prompt_logprobs is None:
            return None
        self._text = self._text[len(text) :]
        return self._delta(text, output, self._text_end - num_held)

    def _finished(self, output: Output) -> Delta:
        delta = self._delta(self._text, output, self._text_end)
        delta.finish_reason, delta.error, delta.embedding = output.finish_reason, output.error, output.embedding
        if output.finish_reason == "stop" and delta.token_ids:
            delta.stop_reason = self._reason(delta.token_ids[-1])
        return delta

    def _stopped(self, stop: str, end: int, output: Output) -> Delta:
        """End at a stop string; tokens after the one that completed the string do not count."""
        self._held.extend(HeldToken(*token, self._text_end) for token in self._undecoded)
        text = self._text[: end if self._include_stop else end - len(stop)]
        delta = self._delta(text, output, self._text_end)
        delta.finish_reason, delta.stop_reason = "stop", stop
        return delta

    def _delta(self, text: str, output: Output, released_end: int) -> Delta:
        """Return `text` with the tokens whose text ends at `released_end` or before."""
        token_ids: list[int] = []
        logprobs: list[TokenLogprob] = []
        while self._held and self._held[0].text_end <= released_end:
            token_id, logprob, _ = self._held.popleft()
            token_ids.append(token_id)
            if logprob is not None:
                logprobs.append(logprob)
        return Delta(
            text=text,
            token_ids=token_ids,
            logprobs=logprobs if self._sampling.num_logprobs is not None else None,
            prompt_logprobs=self._prompt_logprobs(output),
            num_cached_tokens=self._num_cached_tokens,
        )

    def _prompt_logprobs(self, output: Output) -> list[TokenLogprob | None] | None:
        if output.prompt_logprobs is None:
            return None
        return [None, *token_logprobs(self._prompt_token_ids[1:], output.prompt_logprobs)]

    def _reason(self, token_id: int) -> str | int | None:
        """Return the user's stop: the token id, or the stop string with the same name as the token.

        The model's own end tokens are not a stop reason.
        """
        if token_id in self._sampling.eos_token_ids or token_id not in self._sampling.stop_token_ids:
            return None
        name = self._detokenizer.token_name(token_id)
        return name if name in self._stop_strings else token_id
