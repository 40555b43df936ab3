"""A directory's weights, in safetensors or torch's own files, as a source, whichever tool wrote them."""

import math
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from threading import Lock
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from octavo.executor.checkpoints.torch_file import TorchFile
from octavo.executor.quantization import Quantization
from octavo.executor.quantization.fp8 import read_fp8
from octavo.executor.quantization.packed import PACKED_PARTS, read_packed
from octavo.executor.shards import Shard
from octavo.kernels.groupwise import GroupwiseWeight
from octavo.protocol.model_files.weight_files import weight_files

# old checkpoints store it, but it is computed
SKIPPED = ("rotary_emb.inv_freq",)
FP8 = "F8_E4M3"
# the types that can be read, and the type that each is held in
DTYPE_OF_TYPE = {"F64": torch.float32, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
READABLE_TYPES = tuple(DTYPE_OF_TYPE)
FP8_SCALES = (".weight_scale", ".weight_scale_inv")  # what stands beside a .weight of 8-bit floats
COMPARED_ROWS = 1024  # at once: an embedding is large, so memory holds only a part of it
# scales for activations and caches of 8-bit floats, which stay as they are here
UNUSED_SCALES = (".input_scale", ".output_scale", ".k_scale", ".v_scale")


class Checkpoint:
    """The files of weights of a directory, open until the `with` block ends.

    A weight that is packed into several tensors has the name of the plain weight.
    """

    def __init__(self, directory: Path, quantization: Quantization | None = None) -> None:
        self._directory = directory
        self._quantization = quantization
        self._handles: dict[str, Any] = {}
        self._lock = Lock()  # a handle must not be closed while another thread reads
        with ExitStack() as files:
            paths, file_of = checkpoint_files(directory), weight_files(directory).file_of
            for path in paths:
                handle = files.enter_context(_open(path))
                # if several files have a tensor, the file that the index names counts
                meant = [name for name in handle.keys() if file_of.get(name, path.name) == path.name]  # noqa: SIM118
                self._handles |= dict.fromkeys(meant, handle)
            self._files = files.pop_all()

    def __enter__(self) -> "Checkpoint":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with self._lock:
            self._files.close()

    def names(self) -> set[str]:
        """Return the names of the stored weights; all parts of a quantized weight have one name."""
        present = {name for name in self._handles if not name.endswith(SKIPPED)}
        return present if self._quantization is None else {w for name in present for w in self._weight_of(name)}

    def is_packed(self, name: str) -> bool:
        """Return whether `name` is a weight that `read_groupwise` returns."""
        return name.endswith(".weight") and self._packed_parts(name.removesuffix(".weight")) is not None

    def is_empty_bias(self, name: str) -> bool:
        """Return whether `name` is a bias of zeros, which GPTQ's tools add to layers without a bias."""
        stem, _, leaf = name.rpartition(".")
        if leaf != "bias" or f"{stem}.qweight" not in self._handles:
            return False
        return not bool(self._handles[name].get_tensor(name).any())

    def check(self, needed: set[str], unneeded: set[str]) -> None:
        present = self.names()
        problems = []
        if missing := needed - present:
            problems.append(f"lacks {listed(missing)}")
        if left_over := {name for name in present - needed - unneeded if not self.is_empty_bias(name)}:
            problems.append(f"has, of no use to the model, {listed(left_over)}")
        if problems:
            raise ValueError(
                f"the checkpoint {self._directory} {' and '.join(problems)}. It is incomplete, or not what its"
                " config.json says: download it again"
            )

    def has(self, name: str) -> bool:
        """Return whether a weight is stored, packed or not."""
        return name in self._handles or self.is_packed(name)

    def equal(self, name: str, other: str) -> bool:
        """Return whether two stored weights have the same values; a packed weight equals no other."""
        if self.is_packed(name) or self.is_packed(other):
            return False
        one, two = self._handles[name].get_slice(name), self._handles[other].get_slice(other)
        if (shape := one.get_shape()) != two.get_shape():
            return False
        starts = range(0, shape[0], COMPARED_ROWS)
        return all(
            torch.equal(one[start : start + COMPARED_ROWS].float(), two[start : start + COMPARED_ROWS].float())
            for start in starts
        )

    def read(self, name: str, shard: Shard, part: Tensor) -> None:
        tensor = self._handles[name].get_slice(name)
        shape = list(part.shape)
        shape[shard.dim] = shard.size
        if list(tensor.get_shape()) != shape:
            raise ValueError(
                f"{name} has shape {tensor.get_shape()}, but config.json asks for {shape}: they are not of one model."
                " Download it again"
            )
        if tensor.get_dtype() == FP8 and self._quantization is not None:
            part.copy_(self._read_fp8(name, shard))
        elif tensor.get_dtype() in READABLE_TYPES:
            part.copy_(tensor[(slice(None),) * shard.dim + (slice(*shard.bounds),)])
        else:
            raise ValueError(f"{name} has type {tensor.get_dtype()}; supported: {', '.join(READABLE_TYPES)}")

    def read_whole(self, name: str) -> Tensor:
        """Return a tensor that is not packed, as it is stored; 8-bit floats are multiplied by their scales, float32.

        Several threads may call it at once. Raises ValueError, naming the tensor, if its scales do not fit it.
        """
        with self._lock:
            handle = self._handles[name]
            if self._is_fp8(name):
                return self._read_fp8(name, Shard(handle.get_slice(name).get_shape()[0]))
            stored: Tensor = handle.get_tensor(name)
            return stored

    def read_groupwise(self, name: str, shard: Shard, shape: list[int]) -> GroupwiseWeight | None:
        stem = name.removesuffix(".weight")
        if self._quantization is None or self._packed_parts(stem) is None:
            return None

        def open_part(part: str) -> Any:
            handle = self._handles.get(f"{stem}.{part}")
            return None if handle is None else handle.get_slice(f"{stem}.{part}")

        try:
            return read_packed(open_part, self._quantization, shard, shape)
        except ValueError as error:
            raise ValueError(f"{stem} ({self._quantization.method}) of {self._directory}: {error}") from None

    def _read_fp8(self, name: str, shard: Shard) -> Tensor:
        assert self._quantization is not None
        scales = [name.removesuffix(".weight") + ending for ending in FP8_SCALES]
        found = next((scale for scale in scales if scale in self._handles), None)
        if found is None:
            raise ValueError(f"{name} of {self._directory} has type {FP8}, but there is no {' or '.join(scales)}")
        weight, scale = self._handles[name].get_slice(name), self._handles[found].get_tensor(found)
        try:
            return read_fp8(weight, scale, self._quantization.block_shape, shard)
        except ValueError as error:
            raise ValueError(f"{name} of {self._directory}: {error}") from None

    def _weight_of(self, name: str) -> list[str]:
        """Return the name of the weight that a tensor is, or is the first part of; nothing for another part."""
        stem, dot, leaf = name.rpartition(".")
        if (parts := self._packed_parts(stem)) is not None and leaf in parts:
            return [f"{stem}.weight"] if leaf == parts[0] else []
        is_scale = dot + leaf in FP8_SCALES and self._is_fp8(f"{stem}.weight")
        return [] if is_scale or name.endswith(UNUSED_SCALES) else [name]

    def _is_fp8(self, name: str) -> bool:
        handle = self._handles.get(name)
        return handle is not None and handle.get_slice(name).get_dtype() == FP8

    def _packed_parts(self, stem: str) -> tuple[str, ...] | None:
        """Return what the weight of layer `stem` may consist of; None if it is not packed."""
        return next((parts for parts in PACKED_PARTS if f"{stem}.{parts[0]}" in self._handles), None)


def checkpoint_files(directory: Path) -> list[Path]:
    """Return the files that hold a directory's model. Raises ValueError if one of them is missing."""
    paths = [directory / name for name in weight_files(directory).names]
    if absent := [path.name for path in paths if not path.is_file()]:
        raise ValueError(f"{directory} has no {', '.join(absent)}: download the model again")
    return paths


def stored_dtype(directory: Path) -> torch.dtype | None:
    """Return the type that most elements of a directory's plain weights have; None if it has no plain weights.

    Scales beside packed weights count: they are in the type that the model computes in. Raises ValueError for a file
    that is damaged.
    """
    num_elements: Counter[str] = Counter()
    for path in _present_files(directory):
        with _open(path) as handle:
            for name in handle.keys():  # noqa: SIM118 (no mapping)
                tensor = handle.get_slice(name)
                num_elements[tensor.get_dtype()] += math.prod(tensor.get_shape())
    plain = {name: count for name, count in num_elements.items() if name in DTYPE_OF_TYPE and count}
    return DTYPE_OF_TYPE[max(plain, key=lambda name: plain[name])] if plain else None


def _present_files(directory: Path) -> list[Path]:
    """Return the files that hold the weights; nothing if one of them is missing."""
    try:
        return checkpoint_files(directory)
    except ValueError:
        return []


def _open(path: Path) -> Any:
    if path.suffix == ".bin":
        return TorchFile(path)
    try:
        return safe_open(path, framework="pt")
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged or incomplete: {error}. Download it again") from None


def listed(names: set[str], limit: int = 5) -> str:
    """Return how many tensors there are, and the names of some, for a message."""
    shown = ", ".join(sorted(names)[:limit])
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return f"{len(names)} tensor{'s' if len(names) > 1 else ''}: {shown}{more}"
