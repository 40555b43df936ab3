"""What a choice gives as every dialect renders it: the parts of an answer, and the tokens behind them."""

from collections.abc import Callable
from typing import Protocol

import msgspec

from octavo.gateway.text.delta import Delta, Whole


class Content(msgspec.Struct, frozen=True, gc=False):
    """More of the text of an answer."""

    text: str


# What an answer is made of, in order. A dialect has one place in its answer for each kind.
Part = Content


class Splitter(Protocol):
    """Divides the text of one choice into parts. It may hold text back until the last delta."""

    def split(self, delta: Delta) -> tuple[Part, ...]: ...


class PlainText:
    """All the text is content."""

    def split(self, delta: Delta) -> tuple[Part, ...]:
        return (Content(delta.text),) if delta.text else ()


NewSplitter = Callable[[], Splitter]


class Event(msgspec.Struct, frozen=True):
    """What is new of one choice. `delta` has its tokens, log probabilities and end, `parts` what its text says."""

    choice: int
    parts: tuple[Part, ...]
    delta: Delta


class Answer:
    """All that the events of one choice come to."""

    def __init__(self) -> None:
        self.whole = Whole()
        self._texts: list[str] = []

    def add(self, event: Event) -> None:
        self.whole.add(event.delta)
        self._texts.append(content(event.parts))

    @property
    def content(self) -> str:
        return "".join(self._texts)


def content(parts: tuple[Part, ...]) -> str:
    """Return the text of the parts that are content."""
    return parts[0].text if len(parts) == 1 else "".join(part.text for part in parts)
