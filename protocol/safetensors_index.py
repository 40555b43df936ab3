"""Which files of a directory hold a checkpoint that is stored in several, as the index beside them says."""

from pathlib import Path

import msgspec

from protocol.model_json import LARGEST_LIST_BYTES, read_bounded

INDEX_FILE = "model.safetensors.index.json"
LONGEST_NAME = 255  # bytes, of a file on Linux


class _Index(msgspec.Struct):
    weight_map: dict[str, str]  # a tensor's file


def indexed_files(index: Path) -> list[str]:
    """Return the names of the files that an index lists, each once and in order.

    Raises ValueError if it is damaged, or names what is no file of its directory: a checkpoint, which a stranger may
    have written, is not to reach for the rest of the disk.
    """
    try:
        names = sorted(
            set(msgspec.json.decode(read_bounded(index, LARGEST_LIST_BYTES), type=_Index).weight_map.values())
        )
    except (msgspec.MsgspecError, ValueError, RecursionError, OSError) as error:
        raise ValueError(f"{index} is not an index of safetensors: {error}") from None
    for name in names:
        if name != Path(name).name or name == ".." or "\0" in name or len(name.encode()) > LONGEST_NAME:
            raise ValueError(f"{index} names {name[:80]!r}, which is no file of its directory")
    return names
