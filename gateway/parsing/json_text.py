"""Finds where JSON values end, in text that comes in pieces."""

SCALAR_ENDS = frozenset(" \t\r\n,:;]}")


class ValueEnd:
    """Finds the end of one JSON value, whose first character is the first that is given.

    Strings and brackets count; whether the rest is valid JSON does not matter.
    """

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = self._is_escaped = False
        self._is_scalar: bool | None = None  # None: nothing was given yet

    def find(self, text: str) -> int | None:
        """Return how many characters of `text` belong to the value, or None if it does not end in `text`."""
        if self._is_scalar is None and text:
            self._is_scalar = text[0] not in '{["'
        if self._is_scalar:
            return next((at for at, character in enumerate(text) if character in SCALAR_ENDS), None)
        for at, character in enumerate(text):
            if self._take(character):
                return at + 1
        return None

    def _take(self, character: str) -> bool:
        """Return whether the value ends with `character`."""
        if self._in_string:
            if self._is_escaped:
                self._is_escaped = False
            elif character == "\\":
                self._is_escaped = True
            elif character == '"':
                self._in_string = False
                return self._depth == 0
        elif character == '"':
            self._in_string = True
        elif character in "{[":
            self._depth += 1
        elif character in "}]":
            self._depth -= 1
            return self._depth == 0
        return False
