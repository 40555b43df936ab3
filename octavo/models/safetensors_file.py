"""Whether a safetensors file is whole, by its length and its header alone: this is quick, and reads no tensor."""

from pathlib import Path

import msgspec

LENGTH_BYTES = 8  # of the header's length, before it
LARGEST_HEADER_BYTES = 100_000_000  # the most that the format allows


class _Tensor(msgspec.Struct):
    data_offsets: tuple[int, int] = (0, 0)  # `__metadata__`, a note of other programs, has none


def damage(path: Path) -> str:
    """Return what is wrong with a file and what to do, or "" if it seems whole. Raises OSError."""
    size = path.stat().st_size
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(LENGTH_BYTES), "little")
        if size < LENGTH_BYTES or header_bytes > min(size - LENGTH_BYTES, LARGEST_HEADER_BYTES):
            return f"is damaged or incomplete: it has {size:,} bytes, less than its header. Download it again"
        header = file.read(header_bytes)
    try:
        tensors = msgspec.json.decode(header, type=dict[str, _Tensor])
    except (msgspec.MsgspecError, RecursionError):
        return "is damaged: its header is not that of a safetensors file. Download it again"
    end = LENGTH_BYTES + header_bytes + max((tensor.data_offsets[1] for tensor in tensors.values()), default=0)
    if size != end:
        return f"is damaged or incomplete: it has {size:,} bytes where its header tells of {end:,}. Download it again"
    return ""
