"""The parts of an answer, which every dialect renders, and what makes them of a choice's text."""

from collections.abc import Iterable, Sequence
from typing import Protocol

import msgspec

from octavo.gateway.text.delta import Delta


class Content(msgspec.Struct, frozen=True, gc=False):
    """More of the text of an answer."""

    text: str


class Reasoning(msgspec.Struct, frozen=True, gc=False):
    """More of what the model thinks before it answers."""

    text: str


class ToolCall(msgspec.Struct, frozen=True, gc=False):
    """More of a call. The first part of each call has its id and name; `arguments` is the next piece of JSON text.

    Calls of one choice are numbered from 0 on. A call begins after the one before it is complete.
    """

    index: int
    arguments: str
    id: str | None = None
    name: str | None = None


# An answer is a sequence of parts. A dialect has one place in its answer for each kind of part.
Part = Content | Reasoning | ToolCall


class Splitter(Protocol):
    """Divides the text of one choice into parts. A splitter may hold text back until the last delta."""

    @property
    def num_reasoning_tokens(self) -> int: ...

    def split(self, delta: Delta) -> tuple[Part, ...]: ...


class PlainText:
    """All the text is content."""

    @property
    def num_reasoning_tokens(self) -> int:
        return 0

    def split(self, delta: Delta) -> tuple[Part, ...]:
        return (Content(delta.text),) if delta.text else ()


class Parser(Protocol):
    """Finds calls in text. The parts do not depend on how the text is cut into pieces, but for where they are cut."""

    def feed(self, text: str) -> list[Part]: ...

    def end(self) -> list[Part]:
        """Return what is held, as content. Call it once, after all text."""
        ...


def joined(parts: Iterable[Part]) -> list[Part]:
    """Return `parts` with neighbours of the same kind, or of the same call, as one. Parts without text are left out."""
    found: list[Part] = []
    for part in parts:
        match (found[-1] if found else None, part):
            case (_, Content("") | Reasoning("")):
                pass
            case (Content(before), Content(text)):
                found[-1] = Content(before + text)
            case (Reasoning(before), Reasoning(text)):
                found[-1] = Reasoning(before + text)
            case (ToolCall(index, before, call_id, name), ToolCall(same, text, None, None)) if index == same:
                found[-1] = ToolCall(index, before + text, call_id, name)
            case _:
                found.append(part)
    return found


def content(parts: Sequence[Part]) -> str:
    """Return the text of the parts that are content."""
    return "".join(part.text for part in parts if isinstance(part, Content))
