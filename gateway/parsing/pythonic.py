"""Finds calls that are written as Python, [f(a=1), g()], as Llama 4 and others do."""

import ast
import json
import re
from collections.abc import Callable, Collection

from octavo.gateway.parsing.markers import Markers
from octavo.gateway.parsing.parts import Content, Part, ToolCall, joined

SPACE = " \t\r\n"
START = re.compile(r"\[\s*([A-Za-z_][A-Za-z0-9_.-]*)\(")
START_PREFIX = re.compile(r"\[\s*([A-Za-z_][A-Za-z0-9_.-]*)?")
MARKERS = ("<|python_start|>", "<|python_end|>")
MAX_CALL_CHARACTERS = 1 << 20
MAX_NAME_CHARACTERS = 256


class PythonicCalls:
    """A parser for one choice. Calls stand at the beginning of an answer, or behind a marker."""

    def __init__(self, names: Collection[str], new_id: Callable[[], str]) -> None:
        self._names, self._new_id = names, new_id
        self._markers = Markers(MARKERS)
        self._text = ""  # not read
        self._raw = ""  # of the present call, and what stands before it
        self._end = _CallEnd()
        self._state: Callable[[], bool] = self._begin
        self._parts: list[Part] = []
        self._num_calls = 0
        self._is_after_call = False

    def feed(self, text: str) -> list[Part]:
        self._text += text
        while self._state():
            pass
        parts, self._parts = joined(self._parts), []
        return parts

    def end(self) -> list[Part]:
        held = self._raw + self._text
        return [Content(held)] if held.strip(SPACE) or not self._is_after_call else []

    def _begin(self) -> bool:
        """Decide whether the text begins with a list of calls."""
        text = self._text.lstrip(SPACE)
        if not text or self._markers.num_held(text) == len(text):
            return False
        if marker := self._markers.match(text):
            self._text = text[marker.end() :]
            return True
        start = START.match(text)
        if start is None and START_PREFIX.fullmatch(text) and len(text) < MAX_NAME_CHARACTERS:
            return False
        self._state = self._content
        if start and start[1] in self._names:
            self._raw, self._text, self._state = "[", text[1:], self._call_start
        return True

    def _call_start(self) -> bool:
        """Read what stands before a call, or the end of the list."""
        text = self._text.lstrip(SPACE + ("," if self._is_after_call else ""))
        self._raw, self._text = self._raw + self._text[: len(self._text) - len(text)], text
        if not text:
            return False
        if text[0].isidentifier():
            self._end, self._state = _CallEnd(), self._call_piece
        else:
            self._text, self._state = text[1:] if text[0] == "]" else text, self._content
            self._raw = "" if self._is_after_call else self._raw
        return True

    def _call_piece(self) -> bool:
        end = self._end.find(self._text)
        self._raw, self._text = self._raw + self._text[:end], "" if end is None else self._text[end:]
        if end is None and len(self._raw) < MAX_CALL_CHARACTERS:
            return False
        call = _call(self._raw.lstrip("[," + SPACE))
        if call is None:
            self._state = self._content
            return True
        name, arguments = call
        self._parts.append(ToolCall(self._num_calls, arguments, self._new_id(), name))
        self._num_calls += 1
        self._raw, self._is_after_call, self._state = "", True, self._call_start
        return True

    def _content(self) -> bool:
        self._text, self._raw = self._raw + self._text, ""
        if self._is_after_call:
            self._text = self._text.lstrip(SPACE)
        found = self._markers.find(self._text)
        kept = found.start() if found else len(self._text) - self._markers.num_held(self._text)
        if kept:
            self._parts.append(Content(self._text[:kept]))
            self._is_after_call = False
        self._text = self._text[found.end() if found else kept :]
        if found and found[0] == MARKERS[0]:
            self._state = self._begin
        return found is not None


class _CallEnd:
    """Finds the end of one call in text that comes in pieces."""

    def __init__(self) -> None:
        self._depth, self._quote, self._is_escaped = 0, "", False

    def find(self, text: str) -> int | None:
        """Return how many characters of `text` belong to the call, or None if it does not end in `text`."""
        for at, character in enumerate(text):
            if self._quote:
                if self._is_escaped:
                    self._is_escaped = False
                elif character == "\\":
                    self._is_escaped = True
                elif character == self._quote:
                    self._quote = ""
            elif character in "\"'":
                self._quote = character
            elif character in "([{":
                self._depth += 1
            elif character in ")]}":
                self._depth -= 1
                if self._depth <= 0:
                    return at + 1
        return None


def _call(text: str) -> tuple[str, str] | None:
    """Return the name and the arguments, as JSON, of a call with literal keyword arguments; None for other text."""
    try:
        parsed = ast.parse(text.strip(), mode="eval").body
        if not isinstance(parsed, ast.Call) or parsed.args:
            return None
        arguments = {keyword.arg: ast.literal_eval(_with_json_names(keyword.value)) for keyword in parsed.keywords}
        if None in arguments:
            return None
        name = ast.unparse(parsed.func)
        return name, json.dumps(arguments, ensure_ascii=False)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None


class _JsonNames(ast.NodeTransformer):
    """true, false and null, which models write for True, False and None."""

    def visit_Name(self, node: ast.Name) -> ast.AST:
        values = {"true": True, "false": False, "null": None}
        return ast.Constant(values[node.id]) if node.id in values else node


def _with_json_names(node: ast.expr) -> ast.AST:
    changed: ast.AST = _JsonNames().visit(node)
    return changed
