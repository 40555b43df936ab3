"""Finds calls whose arguments are JSON: the syntaxes of Hermes and Qwen, Llama 3, Mistral and DeepSeek."""

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass

from octavo.gateway.parsing.call_object import NAME, Broken, CallObject
from octavo.gateway.parsing.json_text import ValueEnd
from octavo.gateway.parsing.markers import Markers
from octavo.gateway.parsing.parts import Content, Part, ToolCall, joined

SPACE = " \t\r\n"
MAX_HEADER_CHARACTERS = 1024


@dataclass(frozen=True, slots=True)
class Syntax:
    """How calls are written.

    A call is an object with name and arguments, or, with `header`, a text that has the name as its first group and
    ends where the arguments begin. Between `[` and `]` there are several objects.
    """

    opens: tuple[str, ...] = ()  # each of these begins a call, or several
    closes: tuple[str, ...] = ()  # what stands between and after calls, and has no meaning
    header: re.Pattern[str] | None = None
    takes_objects: bool = True
    begins_with_json: bool = False  # an answer that begins with a call needs no marker


class Calls:
    """A parser for one choice. Text that is no call after all is content, with its marker."""

    def __init__(self, syntax: Syntax, names: Collection[str], new_id: Callable[[], str]) -> None:
        """`names` are those of the tools: without a marker only they make a call."""
        self._syntax, self._names, self._new_id = syntax, names, new_id
        self._markers = Markers([*syntax.opens, *syntax.closes])
        self._text = ""  # not read
        self._state: Callable[[], bool] = self._begin if syntax.begins_with_json else self._outside
        self._parts: list[Part] = []
        self._num_calls = 0
        self._is_after_call = False  # whitespace before the next content is left out
        self._is_list = False
        self._raw = ""  # of the present call, as long as it may turn out to be content
        self._is_marked = False
        self._object: CallObject | None = None
        self._arguments_end = ValueEnd()

    def feed(self, text: str) -> list[Part]:
        self._text += text
        while self._state():
            pass
        parts, self._parts = joined(self._parts), []
        return parts

    def end(self) -> list[Part]:
        if self._state not in (self._object_piece, self._arguments_piece) or self._raw:
            held = self._raw + self._text
            if held.strip(SPACE) or not self._is_after_call:
                self._parts.append(Content(held))
        parts, self._parts = joined(self._parts), []
        return parts

    # Each state reads from the text, and returns False if it needs more of it.

    def _begin(self) -> bool:
        """Decide whether the answer begins with a call that has no marker."""
        text = self._text.lstrip(SPACE)
        if not text:
            return False
        self._state = self._outside
        if text[0] in "{[":
            self._raw, self._text, self._is_marked = self._text[: -len(text)], text, False
            self._state = self._opened
        return True

    def _outside(self) -> bool:
        if self._is_after_call:
            self._text = self._text.lstrip(SPACE)
        found = self._markers.find(self._text)
        if found is None:
            held = self._markers.num_held(self._text)
            kept = len(self._text) - held
            kept = len(self._text[:kept].rstrip(SPACE))  # whitespace before a call is left out
            self._say(self._text[:kept])
            self._text = self._text[kept:]
            return False
        self._say(self._text[: found.start()].rstrip(SPACE))
        self._text = self._text[found.end() :]
        if found[0] in self._syntax.opens:
            self._raw, self._is_marked, self._state = found[0], True, self._opened
        return True

    def _opened(self) -> bool:
        """Decide what follows a marker: objects, a list of them, a header, or another marker."""
        text = self._text.lstrip(SPACE)
        if not text or self._markers.num_held(text) == len(text):
            return False
        if self._markers.match(text):
            self._raw, self._state = "", self._outside
        elif text[0] in "{[" and self._syntax.takes_objects:
            self._is_list = text[0] == "["
            if self._is_list:
                self._drop_to(text[1:])
            self._state = self._next_object
        elif self._syntax.header:
            self._state = self._header
        else:
            self._give_up()
        return True

    def _next_object(self) -> bool:
        """Read what stands before an object of a list, or after one."""
        if self._is_after_call:
            self._text = self._text.lstrip(SPACE + ",;")
        text = self._text.lstrip(SPACE)
        if not text:
            return False
        if text[0] == "{":
            self._drop_to(text)
            self._object = CallObject(None if self._is_marked else self._names)
            self._state = self._object_piece
        elif self._is_after_call:
            self._text, self._state = text[1:] if self._is_list and text[0] == "]" else text, self._outside
        else:
            self._give_up()
        return True

    def _object_piece(self) -> bool:
        assert self._object is not None
        read, piece, self._text = self._object, self._text, ""
        was_known, is_broken = read.name is not None, False
        self._raw += "" if was_known else piece
        try:
            read.feed(piece)
        except Broken:
            is_broken = True
        if read.name is None:
            if is_broken:
                self._text = read.unread
                self._raw = self._raw[: len(self._raw) - len(self._text)]
                self._give_up()
            return is_broken
        if not was_known:
            self._call(read.name)
        self._add(read.take_arguments())
        if not (read.is_done or is_broken):
            return False
        self._text, self._is_after_call = read.unread, True
        self._state = self._outside if is_broken else self._next_object
        return True

    def _header(self) -> bool:
        assert self._syntax.header is not None
        start = self._text.find("{", 0, MAX_HEADER_CHARACTERS)
        if start < 0 and len(self._text) < MAX_HEADER_CHARACTERS:
            return False
        header = self._syntax.header.fullmatch(self._text[:start]) if start >= 0 else None
        if header is None or not NAME.fullmatch(header[1]):
            self._give_up()
            return True
        self._text = self._text[start:]
        self._call(header[1])
        self._arguments_end, self._state = ValueEnd(), self._arguments_piece
        return True

    def _arguments_piece(self) -> bool:
        end = self._arguments_end.find(self._text)
        piece = self._text if end is None else self._text[:end]
        self._add(piece)
        self._text = self._text[len(piece) :]
        if end is None:
            return False
        self._is_after_call, self._state = True, self._behind_arguments
        return True

    def _behind_arguments(self) -> bool:
        """Leave out what closes a call, such as a fence of code."""
        self._text = self._text.lstrip(SPACE + "`")
        if not self._text:
            return False
        self._state = self._outside
        return True

    def _drop_to(self, rest: str) -> None:
        """Read on until `rest`, which is the end of the text."""
        num_read = len(self._text) - len(rest)
        self._raw, self._text = self._raw + self._text[:num_read], rest

    def _say(self, text: str) -> None:
        if text:
            self._parts.append(Content(text))
            self._is_after_call = False

    def _call(self, name: str) -> None:
        self._parts.append(ToolCall(self._num_calls, "", self._new_id(), name))
        self._num_calls += 1
        self._raw = ""

    def _add(self, arguments: str) -> None:
        if arguments:
            self._parts.append(ToolCall(self._num_calls - 1, arguments))

    def _give_up(self) -> None:
        """What was read of the present call is content."""
        self._parts.append(Content(self._raw))
        self._raw, self._is_after_call, self._state = "", False, self._outside
