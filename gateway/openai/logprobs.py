"""Log probabilities in the shapes of the two APIs."""

import codecs
from collections.abc import Sequence

from octavo.gateway.openai.answer_types import (
    ChatLogprobs,
    ChatTokenLogprob,
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobs,
    TopLogprob,
)
from octavo.gateway.text.delta import TokenLogprob
from octavo.gateway.text.tokenizer import Tokenizer

LEAST_LOGPROB = -9999.0  # JSON has no infinity


def chat_logprobs(logprobs: Sequence[TokenLogprob], tokenizer: Tokenizer, *, names_ids: bool = False) -> ChatLogprobs:
    """Return the log probabilities of tokens. With `names_ids` a token's name is "token_id:ID"."""

    def entry(token_id: int, logprob: float) -> TopLogprob:
        text = id_name(token_id) if names_ids else tokenizer.token_text(token_id)
        return TopLogprob(text, _clamp(logprob), list(tokenizer.token_bytes(token_id)))

    content = []
    for token in logprobs:
        own = entry(token.token_id, token.logprob)
        content.append(ChatTokenLogprob(own.token, own.logprob, own.bytes, [entry(*top) for top in token.top]))
    return ChatLogprobs(content)


def prompt_logprobs(logprobs: Sequence[TokenLogprob | None], tokenizer: Tokenizer) -> PromptLogprobs:
    """Return the log probabilities of a prompt in vLLM's shape. A token among the likeliest stands once."""

    def entries(token: TokenLogprob) -> dict[str, PromptLogprob]:
        own = PromptLogprob(_clamp(token.logprob), token.rank, tokenizer.token_text(token.token_id))
        ranked = enumerate(token.top, start=1)
        tops = {str(i): PromptLogprob(_clamp(value), rank, tokenizer.token_text(i)) for rank, (i, value) in ranked}
        return {str(token.token_id): own} | {name: top for name, top in tops.items() if name != str(token.token_id)}

    return [None if token is None else entries(token) for token in logprobs]


def id_name(token_id: int) -> str:
    return f"token_id:{token_id}"


class CompletionLogprobsWriter:
    """Writes the log probabilities of one choice in pieces; `text_offset` goes on from piece to piece."""

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool, names_ids: bool = False) -> None:
        """With `names_ids` a token's name is "token_id:ID"."""
        self._tokenizer, self._names_ids = tokenizer, names_ids
        self._unseen = tokenizer.special_token_ids if skip_special_tokens else frozenset[int]()
        self._decoder = _utf8_decoder()
        self._offset = 0  # in characters of the choice's text

    def write_prompt(
        self, text: str, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob | None]
    ) -> CompletionLogprobs:
        """Return the lists of a prompt that is echoed as `text`. A token's offset counts only characters of `text`.

        A tokenizer may add special tokens or a space before the first word: these have no characters in `text`.
        """
        lists, decoder = CompletionLogprobs([], [], [], []), _utf8_decoder()
        for token_id, logprob in zip(token_ids, logprobs, strict=True):
            self._append(lists, token_id, logprob)
            piece = decoder.decode(self._tokenizer.token_bytes(token_id))
            if token_id in self._tokenizer.special_token_ids and not text.startswith(piece, self._offset):
                continue
            if piece.startswith(" ") and not text.startswith(" ", self._offset):
                piece = piece[1:]
            self._offset = min(self._offset + len(piece), len(text))
        self._offset = len(text)
        return lists

    def write(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob | None]) -> CompletionLogprobs:
        """Return the lists of generated tokens."""
        lists = CompletionLogprobs([], [], [], [])
        for token_id, logprob in zip(token_ids, logprobs, strict=True):
            self._append(lists, token_id, logprob)
            if token_id not in self._unseen:
                self._offset += len(self._decoder.decode(self._tokenizer.token_bytes(token_id)))
        return lists

    def _append(self, lists: CompletionLogprobs, token_id: int, logprob: TokenLogprob | None) -> None:
        lists.tokens.append(self._name(token_id))
        lists.text_offset.append(self._offset)
        lists.token_logprobs.append(_clamp(logprob.logprob) if logprob else None)
        lists.top_logprobs.append(self._top(logprob) if logprob else None)

    def _top(self, logprob: TokenLogprob) -> dict[str, float]:
        """Return the most likely tokens and the token itself, by name."""
        tops = {self._name(token_id): _clamp(value) for token_id, value in logprob.top}
        return tops | {self._name(logprob.token_id): _clamp(logprob.logprob)}

    def _name(self, token_id: int) -> str:
        """Return the token's text, or OpenAI's spelling "bytes:\\xe2\\x96" if the token is a part of a character."""
        if self._names_ids:
            return id_name(token_id)
        spelled = self._tokenizer.token_bytes(token_id)
        try:
            return spelled.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelled)


def joined(first: CompletionLogprobs, then: CompletionLogprobs) -> CompletionLogprobs:
    return CompletionLogprobs(
        first.tokens + then.tokens,
        first.token_logprobs + then.token_logprobs,
        first.top_logprobs + then.top_logprobs,
        first.text_offset + then.text_offset,
    )


def _utf8_decoder() -> codecs.IncrementalDecoder:
    return codecs.getincrementaldecoder("utf-8")("replace")


def _clamp(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB)
