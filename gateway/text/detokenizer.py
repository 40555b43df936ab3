"""Tokens to text as they come: only text that later tokens cannot change is let out."""

import tokenizers

UNFINISHED = "\ufffd"  # what an incomplete character decodes to
MAX_UNDECIDED_TOKENS = 8  # a character has at most four bytes, so this many tokens never complete one
MAX_WINDOW_TOKENS = 8


class Detokenizer:
    """Decodes one sequence, a token at a time; the joined pieces are what decoding all its tokens gives.

    The algorithm is that of tokenizers' DecodeStream: decode a short window that starts where a character was
    complete, and let out what is longer than before. This one can also be flushed, says how many tokens wait, and
    bounds the window when tokens never complete a character.

    `texts` is given where a token that begins with a new character has the same text whatever was before it: then what
    single tokens were found to be is kept there, for all sequences, and looked up.
    """

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer,
        skipped_token_ids: frozenset[int] = frozenset(),
        texts: dict[int, str] | None = None,
    ) -> None:
        self._tokenizer, self._skipped = tokenizer, skipped_token_ids
        self._is_context_free = texts is not None
        self._texts = {} if texts is None else texts
        self._window: list[int] = []
        self._prefix = ""  # the window's text that is out
        self._boundary = 0  # where in the window the last piece starts
        self._num_undecided = 0  # the window's last tokens, whose text is not all out
        self._num_skipped = 0  # skipped tokens among or behind those

    @property
    def num_pending_tokens(self) -> int:
        """How many of the last tokens wait: they become known in order, so a skipped one may wait too."""
        return self._num_undecided + self._num_skipped

    def token_name(self, token_id: int) -> str | None:
        """Return the name of a token in the vocabulary; a special token's is its text."""
        return self._tokenizer.id_to_token(token_id)

    def step(self, token_id: int) -> str:
        """Return the text that `token_id` completes; it may be empty, also because the token has none."""
        if not self._num_undecided and token_id not in self._skipped:
            text = self._texts.get(token_id)
            if text is not None:
                return text
        # A token that does not exist must not stay in the window: alone there, it would make the next one the first.
        if token_id in self._skipped or self._tokenizer.id_to_token(token_id) is None:
            self._num_skipped += self._num_undecided > 0
            return ""
        self._window.append(token_id)
        self._num_undecided += 1
        text = self._decode()
        if text.endswith(UNFINISHED):
            return self._cut(text) if self._num_undecided >= MAX_UNDECIDED_TOKENS else ""
        piece = self._new(text)
        self._num_undecided = self._num_skipped = 0
        self._move_window(text)
        return piece

    def _move_window(self, text: str) -> None:
        """Begin the next piece behind the window's `text`, all of which is out."""
        if self._is_context_free:
            if len(self._window) == 1:
                self._texts[self._window[0]] = text
            self._window, self._prefix = [], ""
            return
        self._prefix = text
        if len(self._window) > MAX_WINDOW_TOKENS:
            self._window = self._window[self._boundary :]
            self._prefix = self._decode()
        self._boundary = len(self._window)

    def flush(self) -> str:
        """Return what is left at the end; an incomplete character is U+FFFD."""
        piece = self._new(self._decode()) if self._num_undecided else ""
        self._num_undecided = self._num_skipped = 0
        return piece

    def _cut(self, text: str) -> str:
        """Let out all but the last character, the only one that can still become another, and shorten the window."""
        piece = self._new(text).removesuffix(UNFINISHED)
        self._num_undecided, self._num_skipped = 1, 0
        self._window = self._window[-MAX_UNDECIDED_TOKENS:]
        self._prefix = self._decode().removesuffix(UNFINISHED)
        self._boundary = 0
        return piece

    def _new(self, text: str) -> str:
        if text.startswith(self._prefix):
            return text[len(self._prefix) :]
        # Byte tokens that are not valid together turn into U+FFFD one and all, also those that were out before.
        return self._tokenizer.decode(self._window[-self._num_undecided :], skip_special_tokens=False)

    def _decode(self) -> str:
        return self._tokenizer.decode(self._window, skip_special_tokens=False)
