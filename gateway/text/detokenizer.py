"""Turns tokens into text as they come. Text is released once later tokens cannot change it."""

import tokenizers

UNFINISHED = "\ufffd"  # the decoded form of an incomplete character
MAX_UNDECIDED_TOKENS = 8  # a character has at most four bytes, so this many tokens never complete one
MAX_WINDOW_TOKENS = 8


class Detokenizer:
    """Decodes one sequence, a token at a time. The pieces together equal the text of all tokens decoded at once.

    The algorithm is that of tokenizers' DecodeStream: decode a short window that starts where a character was
    complete, and release the text that is new. This class can also be flushed, tells how many tokens wait, and bounds
    the window when tokens never complete a character.

    `texts` is a cache of the texts of single tokens, shared by all sequences. It is given for tokenizers in which the
    text of a token that begins with a new character does not depend on the tokens before it.
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
        self._prefix = ""  # the released part of the window's text
        self._boundary = 0  # where in the window the last piece starts
        self._num_undecided = 0  # how many of the window's last tokens have text that is not released
        self._num_skipped = 0  # skipped tokens among or after the undecided ones

    @property
    def num_pending_tokens(self) -> int:
        """How many of the last tokens wait. Tokens are released in order, so a skipped token may wait too."""
        return self._num_undecided + self._num_skipped

    def token_name(self, token_id: int) -> str | None:
        """Return the name of a token in the vocabulary; the name of a special token is its text."""
        return self._tokenizer.id_to_token(token_id)

    def step(self, token_id: int) -> str:
        """Return the text that `token_id` completes; it may be empty."""
        if not self._num_undecided and token_id not in self._skipped:
            text = self._texts.get(token_id)
            if text is not None:
                return text
        # A token that does not exist must not stay in the window: the next token would decode as the first of a text.
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
        """Begin the next piece after the window's `text`, which is released completely."""
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
        """Return the text that is left at the end; an incomplete character is U+FFFD."""
        piece = self._new(self._decode()) if self._num_undecided else ""
        self._num_undecided = self._num_skipped = 0
        return piece

    def _cut(self, text: str) -> str:
        """Release all except the last character, which alone can still change, and shorten the window."""
        piece = self._new(text).removesuffix(UNFINISHED)
        self._num_undecided, self._num_skipped = 1, 0
        self._window = self._window[-MAX_UNDECIDED_TOKENS:]
        self._prefix = self._decode().removesuffix(UNFINISHED)
        self._boundary = 0
        return piece

    def _new(self, text: str) -> str:
        if text.startswith(self._prefix):
            return text[len(self._prefix) :]
        # If byte tokens are not valid together, each of them becomes U+FFFD, also the released ones.
        return self._tokenizer.decode(self._window[-self._num_undecided :], skip_special_tokens=False)

    def _decode(self) -> str:
        return self._tokenizer.decode(self._window, skip_special_tokens=False)
