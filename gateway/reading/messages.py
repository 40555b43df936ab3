"""The messages between a gateway and the processes that read its long bodies. The length comes before each message."""

from typing import BinaryIO

import msgspec

from octavo.protocol.messages import Ready

LENGTH_BYTES = 4


class JobMessage(msgspec.Struct, tag=True, array_like=True, frozen=True):
    job_id: int


class Piece(JobMessage, frozen=True):
    """The next bytes of a body."""

    content: bytes


class Read(JobMessage, frozen=True):
    """The body is complete: read it."""

    door: str  # the door's name
    model_names: tuple[str, ...]
    ready: Ready


class Cancel(JobMessage, frozen=True):
    """The client has left: the body is not needed."""


class Tokens(JobMessage, frozen=True):
    """The next prompt of a body."""

    token_ids: bytes  # int32
    text: str | None


class Done(JobMessage, frozen=True):
    """The body without its prompts, as JSON. All of the prompts were sent before."""

    body: bytes


class Wrong(JobMessage, frozen=True):
    """The fields of a RequestError."""

    message: str
    param: str | None
    status: int
    code: str | None


Order = Piece | Read | Cancel
Reply = Tokens | Done | Wrong

decode_order = msgspec.msgpack.Decoder(Order).decode
decode_reply = msgspec.msgpack.Decoder(Reply).decode
_encode = msgspec.msgpack.Encoder().encode


def framed(message: Order | Reply) -> bytes:
    content = _encode(message)
    return len(content).to_bytes(LENGTH_BYTES, "big") + content


def read_order(stream: BinaryIO) -> Order | None:
    """Return the next order, or None at the end of `stream`."""
    length = stream.read(LENGTH_BYTES)
    content = stream.read(int.from_bytes(length, "big"))
    return decode_order(content) if content else None
