"""The events of a choice, which every dialect renders: the parts of an answer, with their tokens."""

from collections.abc import Callable
from typing import Protocol

import msgspec

from octavo.gateway.text.delta import Delta, Whole


class Content(msgspec.Struct, frozen=True, gc=False):
    """More of the text of an answer."""

    text: str


# An answer is a sequence of parts. A dialect has one place in its answer for each kind of part.
Part = Content


class Splitter(Protocol):
    """Divides the text of one choice into parts. A splitter may hold text back until the last delta."""

    def split(self, delta: Delta) -> tuple[Part, ...]: ...


class PlainText:
    """All the text is content."""

    def split(self, delta: Delta) -> tuple[Part, ...]:
        return (Content(delta.text),) if delta.text else ()


NewSplitter = Callable[[], Splitter]


class Event(msgspec.Struct, frozen=True):
    """New output of one choice. `delta` has tokens, log probabilities and the finish; `parts` has the text, divided."""

    choice: int
    parts: tuple[Part, ...]
    delta: Delta


class Answer:
    """The whole answer of one choice, collected from its events."""

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
