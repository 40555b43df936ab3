"""Which files of a directory hold a checkpoint: safetensors, or else the files that torch writes (.bin)."""

from pathlib import Path
from typing import NamedTuple

import msgspec

from protocol.model_files.bounded import LARGEST_LIST_BYTES, read_bounded

INDEX_FILE, SINGLE_FILE = "model.safetensors.index.json", "model.safetensors"
BIN_INDEX_FILE, BIN_FILE = "pytorch_model.bin.index.json", "pytorch_model.bin"
SUFFIXES = {INDEX_FILE: ".safetensors", BIN_INDEX_FILE: ".bin"}
LONGEST_NAME = 255  # bytes, of a file on Linux


class WeightFiles(NamedTuple):
    """The files that hold the weights, and the file of the directory that says so."""

    names: list[str]
    said_by: str
    file_of: dict[str, str]  # by the name of a tensor; empty without an index


class _Index(msgspec.Struct):
    weight_map: dict[str, str]  # a tensor's file


def weight_files(directory: Path) -> WeightFiles:
    """Return the files that hold a directory's weights, which may be missing; safetensors where both forms are there.

    Raises ValueError for an index that is damaged, or names other files.
    """
    for index_file, single_file in ((INDEX_FILE, SINGLE_FILE), (BIN_INDEX_FILE, BIN_FILE)):
        if (directory / index_file).is_file():
            file_of = _read_index(directory / index_file)
            return WeightFiles(sorted(set(file_of.values())), index_file, file_of)
        if (directory / single_file).is_file():
            return WeightFiles([single_file], single_file, {})
    return WeightFiles([SINGLE_FILE], SINGLE_FILE, {})


def _read_index(index: Path) -> dict[str, str]:
    """Return each tensor's file, as an index lists them.

    Raises ValueError if it is damaged, or names what is no file of weights of its directory: a checkpoint, which a
    stranger may have written, is not to reach for the rest of the disk.
    """
    try:
        content = read_bounded(index, LARGEST_LIST_BYTES)
        file_of = msgspec.json.decode(content, type=_Index).weight_map
    except (msgspec.MsgspecError, ValueError, RecursionError, OSError) as error:
        raise ValueError(f"{index} is not an index of weights: {error}") from None
    for name in sorted(set(file_of.values())):
        if name != Path(name).name or name == ".." or "\0" in name or len(name.encode()) > LONGEST_NAME:
            raise ValueError(f"{index} names {name[:80]!r}, which is no file of its directory")
        if not name.endswith(SUFFIXES[index.name]):
            raise ValueError(f"{index} names {name[:80]!r}, which is no {SUFFIXES[index.name]} file")
    return file_of
