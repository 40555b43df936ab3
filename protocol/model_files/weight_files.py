"""Which files of a directory hold a checkpoint: safetensors, or else the files that torch writes (.bin)."""

from pathlib import Path
from typing import NamedTuple

import msgspec

from octavo.protocol.model_files.bounded import LARGEST_LIST_BYTES, read_bounded

INDEX_FILE, SINGLE_FILE = "model.safetensors.index.json", "model.safetensors"
BIN_INDEX_FILE, BIN_FILE = "pytorch_model.bin.index.json", "pytorch_model.bin"
SUFFIXES = {INDEX_FILE: ".safetensors", BIN_INDEX_FILE: ".bin"}
LONGEST_NAME = 255  # bytes, of a file on Linux


class WeightFiles(NamedTuple):
    """The files that hold the weights, and the file that names them."""

    names: list[str]
    said_by: str
    file_of: dict[str, str]  # by the tensor's name; empty if there is no index


class _Index(msgspec.Struct):
    weight_map: dict[str, str]  # file, by the tensor's name


def weight_files(directory: Path) -> WeightFiles:
    """Return the files that hold a directory's weights: safetensors, if both forms are there. Files may be missing.

    Raises ValueError for an index that is damaged, or names anything but weight files of the directory.
    """
    for index_file, single_file in ((INDEX_FILE, SINGLE_FILE), (BIN_INDEX_FILE, BIN_FILE)):
        if (directory / index_file).is_file():
            file_of = _read_index(directory / index_file)
            return WeightFiles(sorted(set(file_of.values())), index_file, file_of)
        if (directory / single_file).is_file():
            return WeightFiles([single_file], single_file, {})
    return WeightFiles([SINGLE_FILE], SINGLE_FILE, {})


def _read_index(index: Path) -> dict[str, str]:
    """Return the file of each tensor in an index.

    Raises ValueError as `weight_files`: a stranger may have written the checkpoint, which must not reach files outside
    its directory.
    """
    try:
        content = read_bounded(index, LARGEST_LIST_BYTES)
        file_of = msgspec.json.decode(content, type=_Index).weight_map
    except (msgspec.MsgspecError, ValueError, RecursionError, OSError) as error:
        raise ValueError(f"{index} is not an index of weights: {error}") from None
    for name in sorted(set(file_of.values())):
        if name != Path(name).name or name == ".." or "\0" in name or len(name.encode()) > LONGEST_NAME:
            raise ValueError(f"{index} names {name[:80]!r}, which is not a file of its directory")
        if not name.endswith(SUFFIXES[index.name]):
            raise ValueError(f"{index} names {name[:80]!r}, which is not a {SUFFIXES[index.name]} file")
    return file_of
