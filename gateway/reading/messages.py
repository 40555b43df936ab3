"""What a gateway and the process that reads its long bodies say to each other, each message behind its length."""

from typing import BinaryIO

import msgspec

from octavo.protocol.messages import Ready

LENGTH_BYTES = 4


class Message(msgspec.Struct, tag=True, array_like=True, frozen=True):
    job_id: int


class Piece(Message, frozen=True):
    """The next bytes of a body."""

    content: bytes


class Read(Message, frozen=True):
    """All of the body is there: read it."""

    door: str  # its name
    model_names: tuple[str, ...]
    ready: Ready


class Cancel(Message, frozen=True):
    """Nobody waits for it any more."""


class Tokens(Message, frozen=True):
    """The next prompt of a body."""

    token_ids: bytes  # int32
    text: str | None


class Done(Message, frozen=True):
    """The body without its prompts, as JSON; all of them were sent before."""

    body: bytes


class Wrong(Message, frozen=True):
    """The fields of a RequestError."""

    message: str
    param: str | None
    status: int
    code: str | None


Order = Piece | Read | Cancel
Answer = Tokens | Done | Wrong

decode_order = msgspec.msgpack.Decoder(Order).decode
decode_answer = msgspec.msgpack.Decoder(Answer).decode
_encode = msgspec.msgpack.Encoder().encode


def framed(message: Order | Answer) -> bytes:
    content = _encode(message)
    return len(content).to_bytes(LENGTH_BYTES, "big") + content


def read_order(stream: BinaryIO) -> Order | None:
    """Return the next order, or None at the end of `stream`."""
    length = stream.read(LENGTH_BYTES)
    content = stream.read(int.from_bytes(length, "big"))
    return decode_order(content) if content else None
