"""Reads one call that is written as a JSON object, such as {"name": "f", "arguments": {"a": 1}}, piece by piece."""

import json
import re
from collections.abc import Collection
from typing import Any

from octavo.gateway.parsing.json_text import ValueEnd

NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,256}")
NAME_KEYS = ("name", "function")
ARGUMENTS_KEYS = ("arguments", "parameters")
SPACE = " \t\r\n"
MAX_WAITING_CHARACTERS = 1 << 20  # of what comes before the name is known


class Broken(ValueError):  # noqa: N818  (a property of the text)
    """The text is no call."""


class CallObject:
    """`feed` text until `is_done`; then `unread` is the text behind the object.

    After each `feed`, also one that raises Broken, `name` is the name as soon as it is known, and `take_arguments`
    gives the new piece of the arguments.
    """

    def __init__(self, names: Collection[str] | None = None) -> None:
        """`names`: others make no call; None: each name makes one."""
        self.name: str | None = None
        self.unread = ""
        self.is_done = False
        self._names = names
        self._key: str | None = None
        self._value = ""  # of the present key, so far, unless it is passed on
        self._passes_on = False
        self._end: ValueEnd | None = None  # while a value is being read
        self._is_open = False  # the first brace was read
        self._arguments = ""  # not taken
        self._has_arguments = False

    def feed(self, text: str) -> None:
        """Read more. Raises Broken if the text is no call."""
        self.unread += text
        while not self.is_done and self._step():
            pass
        if self.name is None and len(self._value) > MAX_WAITING_CHARACTERS:
            raise Broken

    def take_arguments(self) -> str:
        taken, self._arguments = self._arguments, ""
        return taken

    def _step(self) -> bool:
        """Read a key, a value or a sign. Return whether to go on: False if more text is needed."""
        if self._end is not None:
            return self._read_value(self._end)
        self.unread = self.unread.lstrip(SPACE)
        if not self.unread:
            return False
        if self._key is not None:
            if self.unread[0] == ":":
                self.unread = self.unread[1:]
                return True
            self._end = ValueEnd()
            return True
        return self._read_sign()

    def _read_sign(self) -> bool:
        sign = self.unread[0]
        if not self._is_open:
            if sign != "{":
                raise Broken
            self._is_open, self.unread = True, self.unread[1:]
        elif sign == ",":
            self.unread = self.unread[1:]
        elif sign == "}":
            self._close()
        elif sign == '"':
            return self._read_key()
        else:
            raise Broken
        return True

    def _read_key(self) -> bool:
        end = ValueEnd().find(self.unread)
        if end is None:
            if len(self.unread) > MAX_WAITING_CHARACTERS:
                raise Broken
            return False
        self._key, self.unread = str(_decoded(self.unread[:end])), self.unread[end:]
        return True

    def _read_value(self, value_end: ValueEnd) -> bool:
        end = value_end.find(self.unread)
        piece = self.unread if end is None else self.unread[:end]
        self.unread = self.unread[len(piece) :]
        if not self._value and not self._passes_on and self.name is not None and piece.startswith("{"):
            self._passes_on = self._key in ARGUMENTS_KEYS and not self._has_arguments
        if self._passes_on:
            self._arguments, self._has_arguments = self._arguments + piece, True
        else:
            self._value += piece
        if end is None:
            return False
        if not self._passes_on:
            self._take_value()
        self._key, self._value, self._end, self._passes_on = None, "", None, False
        return True

    def _take_value(self) -> None:
        if self._key in NAME_KEYS and self.name is None:
            name = _decoded(self._value)
            if not isinstance(name, str) or not NAME.fullmatch(name):
                raise Broken
            if self._names is not None and name not in self._names:
                raise Broken
            self.name = name
        elif self._key in ARGUMENTS_KEYS and not self._has_arguments:
            self._arguments, self._has_arguments = arguments_text(self._value), True

    def _close(self) -> None:
        if self.name is None:
            raise Broken
        if not self._has_arguments:
            self._arguments = "{}"
        self.unread, self.is_done = self.unread[1:], True


def arguments_text(value: str) -> str:
    """Return arguments as the text of a JSON object: they may be JSON inside a JSON string, or null."""
    if value.startswith("{"):
        return value
    decoded = _decoded(value)
    if decoded is None or decoded == "":
        return "{}"
    return decoded if isinstance(decoded, str) else value


def _decoded(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise Broken from None
