"""Reads server-sent events (https://html.spec.whatwg.org/multipage/server-sent-events.html)."""

import re
from collections.abc import Iterable, Iterator

# A carriage return at the end of a chunk may be the first half of a line end.
END_OF_LINE = re.compile(rb"\r\n|\n|\r(?=[^\n])")


def event_payloads(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the data of each event in `chunks`, which may be cut anywhere. An unfinished last event is dropped."""
    parts: list[bytes] = []
    for line in _lines(chunks):
        if line:
            field, _, value = line.partition(b":")  # a comment is a line without a field
            if field == b"data":
                parts.append(value.removeprefix(b" "))
        elif parts:
            yield b"\n".join(parts)
            parts.clear()


def _lines(chunks: Iterable[bytes]) -> Iterator[bytes]:
    rest = b""
    for chunk in chunks:
        *lines, rest = END_OF_LINE.split(rest + chunk)
        yield from lines
    if rest.endswith(b"\r"):
        yield rest[:-1]
