"""Server-sent events, however the bytes are cut."""

import pytest

from octavo.terminal.event_stream import event_payloads

STREAM = (
    'data: {"a": 1}\r\n\r\n: ping\n\ndata:two\ndata: lines\r\rid: 7\n\ndata: \u2028 🫠\x0b.\n\ndata: [DONE]\n\n'
).encode()
PAYLOADS = ['{"a": 1}', "two\nlines", "\u2028 🫠\x0b.", "[DONE]"]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_events_are_the_same_however_the_bytes_are_cut(size: int) -> None:
    chunks = [STREAM[start : start + size] for start in range(0, len(STREAM), size)]
    assert [payload.decode() for payload in event_payloads(chunks)] == PAYLOADS


def test_an_event_that_the_end_cut_is_none() -> None:
    assert list(event_payloads([b"data: whole\n\ndata: ha"])) == [b"whole"]
    assert list(event_payloads([b"data: whole\n\r"])) == [b"whole"]
