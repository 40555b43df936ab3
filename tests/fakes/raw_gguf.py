"""GGUF files byte by byte, which say what no writer would."""

import struct
from collections.abc import Sequence

STRING, ARRAY, UINT8, UINT32 = 8, 9, 0, 4


def text(value: str, length: int | None = None) -> bytes:
    """A string, which may announce another length than it has."""
    return struct.pack("<Q", len(value.encode()) if length is None else length) + value.encode()


def key(name: str, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def array(kind: int, length: int, elements: bytes = b"") -> bytes:
    return struct.pack("<IQ", kind, length) + elements


def tensor(name: str, shape: Sequence[int], kind: int = 0, offset: int = 0) -> bytes:
    """What a header says of a tensor; the first number of `shape` is the innermost."""
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def gguf_bytes(
    keys: Sequence[bytes] = (),
    tensors: Sequence[bytes] = (),
    *,
    num_keys: int | None = None,
    num_tensors: int | None = None,
    version: int = 3,
) -> bytes:
    counts = (len(tensors) if num_tensors is None else num_tensors, len(keys) if num_keys is None else num_keys)
    return b"GGUF" + struct.pack("<IQQ", version, *counts) + b"".join(keys) + b"".join(tensors)


ARCHITECTURE = key("general.architecture", STRING, text("llama"))
