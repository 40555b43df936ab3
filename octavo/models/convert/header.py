"""A GGUF file's header, read by ggml's docs/gguf.md, with every size compared with the file before anything is read.

A stranger may have made the file. So the work is bounded whatever the file announces: by its length, by the longest
header, and by the most array elements that a vocabulary has.
"""

import itertools
import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from octavo.errors import ModelError
from octavo.models.file_kinds import what_instead

MAGIC = b"GGUF"
VERSIONS = (2, 3)
LARGEST_HEADER_BYTES = 100_000_000
MOST_ELEMENTS = 4_000_000  # of all arrays: three times what the largest vocabularies have
MOST_ENTRIES = 100_000  # keys, and tensors
LONGEST_NAME = 65_535  # bytes, of a key or a tensor
MOST_DIMENSIONS = 4
DEFAULT_ALIGNMENT = 32

STRING, ARRAY, FLOAT32 = 8, 9, 6
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", FLOAT32: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
LEAST_KEY_BYTES, LEAST_TENSOR_BYTES = 8 + 4 + 1, 8 + 4 + 4 + 8


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where a tensor lies. `shape` is in the order of checkpoints, outputs first; the file has the opposite order."""

    name: str
    type: str  # as ggml calls it: Q4_K
    shape: tuple[int, ...]
    offset_bytes: int  # from the start of the file
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Header:
    """Everything before the data. Strings are still bytes: a caller decodes the strings that it needs."""

    values: dict[str, Any]
    tensors: dict[str, StoredTensor]


def read_header(path: Path) -> Header:
    """Return a GGUF file's header. Raises ModelError, which says what is wrong and what to do."""
    try:
        if instead := what_instead(path):
            raise ModelError(f"{path} {instead}.")
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _HeaderReader(path, data).read()
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}.") from error


class _HeaderReader:
    """A position in a mapped file. It never goes beyond the end."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path = path
        self._data = data
        self._position = 0
        self._end = min(len(data), LARGEST_HEADER_BYTES)
        self._num_elements = 0

    def read(self) -> Header:
        if self._bytes(len(MAGIC)) != MAGIC:
            self._refuse("it does not begin as one")
        self._check_version(self._u32())
        num_tensors, num_keys = self._u64(), self._u64()
        self._check_count(num_keys, LEAST_KEY_BYTES, "keys")
        self._check_count(num_tensors, LEAST_TENSOR_BYTES, "tensors")
        values: dict[str, Any] = {}
        for _ in range(num_keys):
            name = self._new_name(values)
            values[name] = self._value(self._u32())
        alignment = values.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or not 0 < alignment <= LARGEST_HEADER_BYTES or alignment & (alignment - 1):
            self._refuse(f"its general.alignment is {alignment!r}, which is no power of two")
        return Header(values, self._tensors(num_tensors, alignment))

    def _tensors(self, num_tensors: int, alignment: int) -> dict[str, StoredTensor]:
        announced: dict[str, tuple[tuple[int, ...], int, int]] = {}
        for _ in range(num_tensors):
            name = self._new_name(announced)
            num_dimensions = self._u32()
            if num_dimensions > MOST_DIMENSIONS:
                self._refuse(f"its tensor {name} has {num_dimensions} dimensions")
            shape = tuple(reversed([self._u64() for _ in range(num_dimensions)]))
            announced[name] = shape, self._u32(), self._u64()
        start = -(-self._position // alignment) * alignment
        tensors = {name: self._tensor(name, *said, start, alignment) for name, said in announced.items()}
        self._check_apart(tensors)
        return tensors

    def _tensor(
        self, name: str, shape: tuple[int, ...], type_number: int, offset_bytes: int, start: int, alignment: int
    ) -> StoredTensor:
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

        if type_number not in set(GGMLQuantizationType):
            self._refuse(f"its tensor {name} has the type {type_number}, which nobody knows")
        kind = GGMLQuantizationType(type_number)
        block_elements, block_bytes = GGML_QUANT_SIZES[kind]
        if 0 in shape or (shape and shape[-1] % block_elements):
            self._refuse(f"its tensor {name} has the shape {list(shape)}, which {kind.name} cannot have")
        num_bytes = math.prod(shape) // block_elements * block_bytes
        if offset_bytes % alignment or start + offset_bytes + num_bytes > len(self._data):
            self._refuse_end(f": its tensor {name} is to end at byte {start + offset_bytes + num_bytes}")
        return StoredTensor(name, kind.name, shape, start + offset_bytes, num_bytes)

    def _check_apart(self, tensors: dict[str, StoredTensor]) -> None:
        in_order = sorted(tensors.values(), key=lambda tensor: tensor.offset_bytes)
        for first, second in itertools.pairwise(in_order):
            if first.offset_bytes + first.num_bytes > second.offset_bytes:
                self._refuse(f"its tensors {first.name} and {second.name} overlap")

    def _value(self, type_number: int) -> Any:
        if type_number == STRING:
            return self._bytes(self._u64())
        if type_number != ARRAY:
            return self._scalar(type_number)
        element_type, num_elements = self._u32(), self._u64()
        if element_type == ARRAY:
            self._refuse("it has arrays of arrays, which no key has")
        letter = "Q" if element_type == STRING else self._letter(element_type)  # a string begins with its length
        num_bytes = num_elements * struct.calcsize(f"<{letter}")
        if num_bytes > self._end - self._position:
            self._refuse_end()
        self._num_elements += num_elements
        if self._num_elements > MOST_ELEMENTS:
            self._refuse(f"its arrays have more than {MOST_ELEMENTS:,} elements")
        if element_type == STRING:
            return [self._bytes(self._u64()) for _ in range(num_elements)]
        return list(struct.unpack(f"<{num_elements}{letter}", self._bytes(num_bytes)))

    def _scalar(self, type_number: int) -> Any:
        letter = self._letter(type_number)
        [value] = struct.unpack(f"<{letter}", self._bytes(struct.calcsize(f"<{letter}")))
        return _shortest_float(value) if type_number == FLOAT32 else value

    def _letter(self, type_number: int) -> str:
        if type_number not in SCALARS:
            self._refuse(f"it has a value of type {type_number}, which nobody knows")
        return SCALARS[type_number]

    def _new_name(self, names: dict[str, Any]) -> str:
        name = self._bytes(self._u64(), LONGEST_NAME).decode(errors="replace")
        if name in names:
            self._refuse(f"it has {name[:80]!r} twice")
        return name

    def _u32(self) -> int:
        return int.from_bytes(self._bytes(4), "little")

    def _u64(self) -> int:
        return int.from_bytes(self._bytes(8), "little")

    def _bytes(self, num_bytes: int, most: int = LARGEST_HEADER_BYTES) -> bytes:
        if num_bytes > min(most, self._end - self._position):
            self._refuse_end()
        start = self._position
        self._position = start + num_bytes
        return self._data[start : self._position]

    def _check_version(self, version: int) -> None:
        if version == 1:
            raise ModelError(
                f"{self._path} is of version 1 of the GGUF format, which is not read. Take a newer file of the model."
            )
        if version & 0xFFFF == 0 and version:
            raise ModelError(f"{self._path} is a GGUF file for machines of the other byte order.")
        if version not in VERSIONS:
            raise ModelError(
                f"{self._path} is of version {version} of the GGUF format; versions 2 and 3 are read. Take another file"
                " of the model."
            )

    def _check_count(self, count: int, least_bytes: int, what: str) -> None:
        if count * least_bytes > self._end - self._position:
            self._refuse_end(f": there is no room for {count} {what}")
        if count > MOST_ENTRIES:
            self._refuse(f"it announces {count} {what}, and {MOST_ENTRIES:,} are the most")

    def _refuse_end(self, detail: str = "") -> NoReturn:
        self._refuse(f"its {len(self._data)} bytes end before what its header announces, or are damaged{detail}")

    def _refuse(self, cause: str) -> NoReturn:
        raise ModelError(f"{self._path} is not a whole GGUF file: {cause}. Download it again.")


def _shortest_float(value: float) -> float:
    """Return the number that a widened float32 stood for: 9.999999747378752e-06 is 1e-05."""
    import numpy as np

    return float(str(np.float32(value)))
