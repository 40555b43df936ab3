"""The model asks for its weights: only the slices it needs, none missing, none left over."""

import logging
import math
import zlib
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from itertools import groupby
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from tqdm import tqdm

from executor.models.layers import Layer, num_outputs
from executor.quantization import Quantization, round_weight
from executor.quantization.fp8 import read_fp8
from executor.quantization.groups import form_of, pad_outputs, to_device
from executor.quantization.packed import PACKED_PARTS, read_packed
from executor.shards import Shard
from kernels.groupwise import GroupwiseWeight, concatenate
from protocol.safetensors_index import INDEX_FILE, indexed_files

SINGLE_FILE = "model.safetensors"
# a fused layer: the checkpoint's layers it is made of, in order
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
# what old checkpoints store although it is computed
SKIPPED = ("rotary_emb.inv_freq",)
READABLE_TYPES = ("F64", "F32", "F16", "BF16")
FP8_SCALES = (".weight_scale", ".weight_scale_inv")  # what stands beside a .weight of 8-bit floats
# scales for activations and caches of 8-bit floats, which stay as they are here
UNUSED_SCALES = (".input_scale", ".output_scale", ".k_scale", ".v_scale")

logger = logging.getLogger(__name__)


class Source(Protocol):
    """Where weights come from."""

    def check(self, needed: set[str], unneeded: set[str]) -> None:
        """Raise ValueError if a needed tensor is missing, or one is there that is neither needed nor `unneeded`."""

    def read(self, name: str, shard: Shard, part: Tensor) -> None:
        """Fill `part` with the shard of tensor `name`, in part's dtype. Raises ValueError if it does not fit."""

    def read_groupwise(self, name: str, shard: Shard, shape: list[int]) -> GroupwiseWeight | None:
        """Return the shard of a quantized weight `name`, which as a whole has `shape`; None if it is a plain one.

        Raises ValueError, naming tensor and file, if it does not fit or cannot be divided so.
        """


class Checkpoint:
    """The safetensors of a directory, open until the `with` block ends.

    A weight that is packed into several tensors answers to the name of the plain weight that it is.
    """

    def __init__(self, directory: Path, quantization: Quantization | None = None) -> None:
        self._directory = directory
        self._quantization = quantization
        self._handles: dict[str, Any] = {}
        with ExitStack() as files:
            for path in checkpoint_files(directory):
                handle = files.enter_context(_open(path))
                self._handles |= dict.fromkeys(handle.keys(), handle)
            self._files = files.pop_all()

    def __enter__(self) -> "Checkpoint":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._files.close()

    def check(self, needed: set[str], unneeded: set[str]) -> None:
        present = self._weights()
        problems = []
        if missing := needed - present:
            problems.append(f"lacks {listed(missing)}")
        if left_over := {name for name in present - needed - unneeded if not self._is_empty_bias(name)}:
            problems.append(f"has, of no use to the model, {listed(left_over)}")
        if problems:
            raise ValueError(f"the checkpoint {self._directory} {' and '.join(problems)}")

    def read(self, name: str, shard: Shard, part: Tensor) -> None:
        tensor = self._handles[name].get_slice(name)
        shape = list(part.shape)
        shape[shard.dim] = shard.size
        if list(tensor.get_shape()) != shape:
            raise ValueError(f"{name} has shape {tensor.get_shape()}, but config.json asks for {shape}")
        if tensor.get_dtype() == "F8_E4M3" and self._quantization is not None:
            part.copy_(self._read_fp8(name, shard))
        elif tensor.get_dtype() in READABLE_TYPES:
            part.copy_(tensor[(slice(None),) * shard.dim + (slice(*shard.bounds),)])
        else:
            raise ValueError(f"{name} has type {tensor.get_dtype()}; supported: {', '.join(READABLE_TYPES)}")

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
            raise ValueError(f"{name} of {self._directory} has type F8_E4M3, but there is no {' or '.join(scales)}")
        weight, scale = self._handles[name].get_slice(name), self._handles[found].get_tensor(found)
        try:
            return read_fp8(weight, scale, self._quantization.block_shape, shard)
        except ValueError as error:
            raise ValueError(f"{name} of {self._directory}: {error}") from None

    def _weights(self) -> set[str]:
        """Return the names of what is there, with one name for all parts of a quantized weight."""
        present = {name for name in self._handles if not name.endswith(SKIPPED)}
        return present if self._quantization is None else {w for name in present for w in self._weight_of(name)}

    def _weight_of(self, name: str) -> list[str]:
        """Return the name of the weight that a tensor is, or is the first part of; nothing for another part."""
        stem, dot, leaf = name.rpartition(".")
        if (parts := self._packed_parts(stem)) is not None and leaf in parts:
            return [f"{stem}.weight"] if leaf == parts[0] else []
        is_scale = dot + leaf in FP8_SCALES and f"{stem}.weight" in self._handles
        return [] if is_scale or name.endswith(UNUSED_SCALES) else [name]

    def _packed_parts(self, stem: str) -> tuple[str, ...] | None:
        """Return what the weight of layer `stem` may consist of; None if it is not packed."""
        return next((parts for parts in PACKED_PARTS if f"{stem}.{parts[0]}" in self._handles), None)

    def _is_empty_bias(self, name: str) -> bool:
        """Whether it is one of the biases of zeros that GPTQ's tools add to layers that have none."""
        stem, _, leaf = name.rpartition(".")
        if leaf != "bias" or f"{stem}.qweight" not in self._handles:
            return False
        return not bool(self._handles[name].get_tensor(name).any())


class DummyWeights:
    """Random weights, the same for the same seed, name and shard: for trials of speed and memory."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def check(self, needed: set[str], unneeded: set[str]) -> None:
        """Accept everything: whatever is asked for is there."""

    def read(self, name: str, shard: Shard, part: Tensor) -> None:
        if name.endswith("norm.weight"):
            part.fill_(1.0)
            return
        # The CPU's generator takes no more than 32 bits of seed.
        seed = zlib.crc32(f"{self._seed} {name} {shard.index}".encode())
        generator = torch.Generator(part.device).manual_seed(seed)
        part.normal_(std=0.02, generator=generator)

    def read_groupwise(self, name: str, shard: Shard, shape: list[int]) -> GroupwiseWeight | None:
        return None


def load_weights(
    model: nn.Module,
    source: Source,
    dtype: torch.dtype,
    device: torch.device,
    *,
    tied: Mapping[str, str],
    progress: bool | None,
    rounded_bits: int | None = None,
) -> None:
    """Fill every parameter of `model` and let each layer pack its own before the next one is read.

    `tied` names parameters that are read from another's tensor. `rounded_bits` rounds the plain weights of products,
    except the head's, to 8 or 4 bits. `progress` shows a bar on stderr (None: if it is a terminal). Raises ValueError
    as `Source` does.
    """
    layers = {path: module for path, module in model.named_modules() if isinstance(module, Layer)}
    names = {f"{path}.{leaf}" for path, layer in layers.items() for leaf, _ in layer.named_parameters()}
    source.check({tied.get(part, part) for name in names for part in source_names(name)}, set(tied))
    with tqdm(total=len(names), desc="loading weights", unit="tensor", disable=_disable(progress)) as bar:
        for path, layer in layers.items():
            owner = layers.get(tied.get(f"{path}.weight", "").removesuffix(".weight"))
            leaves = [leaf for leaf, _ in layer.named_parameters()]
            if owner is None or not layer.tie(owner):
                for leaf in leaves:
                    sources = [tied.get(part, part) for part in source_names(f"{path}.{leaf}")]
                    bits = rounded_bits if layer.can_be_rounded and leaf == "weight" else None
                    layer.take(leaf, _read(layer, leaf, sources, source, dtype, device, bits))
                layer.finish_loading(dtype)
            bar.update(len(leaves))


def source_names(name: str) -> list[str]:
    """Return the checkpoint's names of what the parameter `name` is made of."""
    *path, layer, leaf = name.split(".")
    return [".".join([*path, part, leaf]) for part in FUSED.get(layer, (layer,))]


def checkpoint_files(directory: Path) -> list[Path]:
    """Return the safetensors files that hold a directory's model. Raises ValueError if one of them is missing."""
    index = directory / INDEX_FILE
    paths = [directory / name for name in (indexed_files(index) if index.exists() else [SINGLE_FILE])]
    if absent := [path.name for path in paths if not path.is_file()]:
        raise ValueError(f"{directory} has no {', '.join(absent)}")
    return paths


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged or incomplete: {error}") from None


def _read(
    layer: Layer,
    leaf: str,
    names: list[str],
    source: Source,
    dtype: torch.dtype,
    device: torch.device,
    rounded_bits: int | None,
) -> Sequence[Tensor | GroupwiseWeight]:
    """Return what a layer's parameter is made of: neighbours of one form as one part, filled up to its size."""
    shape, shards = list(layer.get_parameter(leaf).shape), layer.shards(leaf)
    quantized = [
        source.read_groupwise(name, shard, _whole(shape, shard))
        if layer.can_be_quantized and leaf == "weight"
        else None
        for name, shard in zip(names, shards, strict=True)
    ]
    if all(weight is None for weight in quantized):
        plain = _read_plain(names, shards, shape, source, torch.float32 if rounded_bits else dtype, device)
        return [plain if rounded_bits is None else _rounded(names, plain, rounded_bits, dtype)]
    parts: list[Tensor | GroupwiseWeight] = []
    for form, run in groupby(zip(names, shards, quantized, strict=True), key=lambda one: one[2] and form_of(one[2])):
        run_names, run_shards, weights = zip(*run, strict=True)
        if form is None:
            rows = sum(stop - start for start, stop in (shard.bounds for shard in run_shards))
            parts.append(_read_plain(run_names, run_shards, [rows, *shape[1:]], source, dtype, device))
        else:
            parts.append(to_device(concatenate(weights) if len(weights) > 1 else weights[0], device))
    if isinstance(last := parts[-1], GroupwiseWeight):  # the last rank's share of a vocabulary may be a smaller one
        parts[-1] = pad_outputs(last, shape[0] - sum(map(num_outputs, parts[:-1])))
    return parts


def _whole(shape: list[int], shard: Shard) -> list[int]:
    """Return the shape of the checkpoint's tensor, of a part of which a parameter of `shape` is made."""
    return [shard.size if dim == shard.dim else size for dim, size in enumerate(shape)]


def _read_plain(
    names: Sequence[str],
    shards: Sequence[Shard],
    shape: list[int],
    source: Source,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """Return the parts of tensors that a parameter is made of, one after the other, then zeros.

    Memory is touched only once a tensor was found to have the shape that is asked for.
    """
    try:
        filled = torch.empty(shape, dtype=dtype, device=device)
    except RuntimeError as error:
        num_bytes = math.prod(shape) * dtype.itemsize
        raise ValueError(f"{', '.join(names)}: {num_bytes} bytes of memory are not to be had on {device}") from error
    offset, dim = 0, shards[0].dim
    for name, shard in zip(names, shards, strict=True):
        start, stop = shard.bounds
        source.read(name, shard, filled.narrow(dim, offset, stop - start))
        offset += stop - start
    filled.narrow(dim, offset, shape[dim] - offset).zero_()
    return filled


def _rounded(names: Sequence[str], weight_NK: Tensor, bits: int, dtype: torch.dtype) -> Tensor | GroupwiseWeight:
    rounded = round_weight(weight_NK, bits)
    if rounded is None:
        logger.warning("%s stays plain: %d inputs are no multiple of 32", ", ".join(names), weight_NK.shape[1])
        return weight_NK.to(dtype)
    return rounded


def _disable(progress: bool | None) -> bool | None:
    """Return tqdm's `disable`, in which None means: unless stderr is a terminal."""
    return None if progress is None else not progress


def listed(names: set[str], limit: int = 5) -> str:
    """Return how many tensors there are, and the names of some, for a message."""
    shown = ", ".join(sorted(names)[:limit])
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return f"{len(names)} tensor{'s' if len(names) > 1 else ''}: {shown}{more}"
