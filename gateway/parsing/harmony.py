"""Reads harmony, the format of GPT-OSS: messages on the channels analysis, commentary and final."""

import re
from collections.abc import Callable

from octavo.gateway.parsing.call_object import NAME
from octavo.gateway.parsing.markers import Markers
from octavo.gateway.parsing.parts import Content, Part, Reasoning, ToolCall, joined

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>")
MARKERS = (START, CHANNEL, MESSAGE, "<|constrain|>", *ENDS)
OF_CHANNEL = re.compile(r"<\|channel\|>\s*([A-Za-z]+)")
RECIPIENT = re.compile(r"\bto=([^\s<]+)")


class Harmony:
    """A parser for one choice: its text begins behind `<|start|>assistant`, which is the end of the prompt.

    A message on the channel analysis is reasoning, one to a function is a call, and every other one is content.
    """

    def __init__(self, new_id: Callable[[], str], *, calls: bool) -> None:
        """`calls` False: the request has no tools, and messages to functions are content."""
        self._new_id, self._calls = new_id, calls
        self._in_body, self._in_header = Markers((START, CHANNEL, *ENDS)), Markers((MESSAGE, *ENDS))
        self._headings = Markers((*MARKERS, " to=", "to="))
        self._text = ""  # not read
        self._state: Callable[[], bool] = self._begin
        self._wrap: Callable[[str], Part] = Content
        self._parts: list[Part] = []
        self._num_calls = 0
        self._num_fed = 0
        self.switches: list[int] = []  # where in the whole text thinking begins and ends

    def feed(self, text: str) -> list[Part]:
        self._text += text
        self._num_fed += len(text)
        while self._state():
            pass
        parts, self._parts = joined(self._parts), []
        return parts

    def end(self) -> list[Part]:
        """Return what is held. A header that is not complete has no text."""
        return joined([self._wrap(self._text)]) if self._state == self._body else []

    def _begin(self) -> bool:
        """An answer that does not begin with a header is content."""
        if not self._text.strip() or self._headings.num_held(self._text) == len(self._text):
            return False
        self._state = self._header if self._headings.match(self._text) else self._body
        return True

    def _header(self) -> bool:
        found = self._in_header.find(self._text)
        if found is None:
            return False
        header, self._text = self._text[: found.start()], self._text[found.end() :]
        if found[0] == MESSAGE:
            self._open(header)
            self._state = self._body
        return True

    def _open(self, header: str) -> None:
        channel, recipient = OF_CHANNEL.search(header), RECIPIENT.search(header)
        name = recipient[1].removeprefix("functions.") if recipient else ""
        if self._calls and recipient and recipient[1].startswith("functions.") and NAME.fullmatch(name):
            index, self._num_calls = self._num_calls, self._num_calls + 1
            self._parts.append(ToolCall(index, "", self._new_id(), name))
            self._wrap = lambda text: ToolCall(index, text)
        elif channel and channel[1] == "analysis":
            self._wrap = Reasoning
            self.switches.append(self._num_fed - len(self._text))
        else:
            self._wrap = Content

    def _body(self) -> bool:
        found = self._in_body.find(self._text)
        kept = found.start() if found else len(self._text) - self._in_body.num_held(self._text)
        if kept:
            self._parts.append(self._wrap(self._text[:kept]))
        if found is None:
            self._text = self._text[kept:]
            return False
        self._text = self._text[found.start() if found[0] in (START, CHANNEL) else found.end() :]
        if self._wrap is Reasoning:
            self.switches.append(self._num_fed - len(self._text))
        self._state, self._wrap = self._header, Content
        return True
