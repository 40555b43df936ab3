"""The chunks of a stream as server-sent events."""

from collections.abc import Callable
from typing import Any

DONE = b"data: [DONE]\n\n"
PLACE = "{text}"


class ChunkWriter:
    """Encodes the chunks of one stream: the part that all chunks share is encoded once."""

    def __init__(self, head: dict[str, Any], *, usage: bool, encode: Callable[[Any], bytes]) -> None:
        self._encode = encode
        self._head = b"data: " + encode(head)[:-1] + b',"choices":['
        self._tail = b'],"usage":null}\n\n' if usage else b"]}\n\n"

    def choice(self, choice: Any, usage: Any = None, **more: Any) -> bytes:
        """Return the event for a chunk with one choice, the choice's usage so far if it is given, and `more` fields."""
        tail = self._tail if usage is None else b'],"usage":' + self._encode(usage) + b"}\n\n"
        if more:
            tail = tail.removesuffix(b"}\n\n") + b"," + self._encode(more)[1:] + b"\n\n"
        return self._head + self._encode(choice) + tail

    def text(self, choice_of: Callable[[str], Any]) -> Callable[[str], bytes]:
        """Return a function from a text to the event for `choice_of(text)`. Only the text may differ between events."""
        encode, (before, _, after) = self._encode, self.choice(choice_of(PLACE)).rpartition(self._encode(PLACE))
        return lambda text: before + encode(text) + after

    def usage(self, usage: Any) -> bytes:
        """Return the event for the chunk with the usage and no choices."""
        return self._head + b'],"usage":' + self._encode(usage) + b"}\n\n"
