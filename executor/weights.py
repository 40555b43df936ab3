"""The model asks for its weights: only the slices it needs, none missing, none left over."""

import zlib
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from tqdm import tqdm

from executor.models.layers import Layer, Shard

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
# a fused layer: the checkpoint's layers it is made of, in order
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
# what old checkpoints store although it is computed
SKIPPED = ("rotary_emb.inv_freq",)
READABLE_TYPES = ("F64", "F32", "F16", "BF16")


class Source(Protocol):
    """Where weights come from."""

    def check(self, needed: set[str], unneeded: set[str]) -> None:
        """Raise ValueError if a needed tensor is missing, or one is there that is neither needed nor `unneeded`."""

    def read(self, name: str, shard: Shard, part: Tensor) -> None:
        """Fill `part` with the shard of tensor `name`, in part's dtype. Raises ValueError if it does not fit."""


class Checkpoint:
    """The safetensors of a directory, open until the `with` block ends."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
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
        present = {name for name in self._handles if not name.endswith(SKIPPED)}
        problems = []
        if missing := needed - present:
            problems.append(f"lacks {listed(missing)}")
        if left_over := present - needed - unneeded:
            problems.append(f"has, of no use to the model, {listed(left_over)}")
        if problems:
            raise ValueError(f"the checkpoint {self._directory} {' and '.join(problems)}")

    def read(self, name: str, shard: Shard, part: Tensor) -> None:
        tensor = self._handles[name].get_slice(name)
        if tensor.get_dtype() not in READABLE_TYPES:
            raise ValueError(f"{name} has type {tensor.get_dtype()}; supported: {', '.join(READABLE_TYPES)}")
        shape = list(part.shape)
        shape[shard.dim] = shard.size
        if list(tensor.get_shape()) != shape:
            raise ValueError(f"{name} has shape {tensor.get_shape()}, but config.json asks for {shape}")
        part.copy_(tensor[(slice(None),) * shard.dim + (slice(*shard.bounds),)])


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


def load_weights(
    model: nn.Module,
    source: Source,
    dtype: torch.dtype,
    device: torch.device,
    *,
    tied: Mapping[str, str],
    progress: bool | None,
) -> None:
    """Fill every parameter of `model` and let each layer pack its own before the next one is read.

    `tied` names parameters that are read from another's tensor. `progress` shows a bar on stderr (None: if it is a
    terminal). Raises ValueError as `Source` does.
    """
    layers = {path: module for path, module in model.named_modules() if isinstance(module, Layer)}
    names = {f"{path}.{leaf}" for path, layer in layers.items() for leaf, _ in layer.named_parameters()}
    source.check({tied.get(part, part) for name in names for part in source_names(name)}, set(tied))
    with tqdm(total=len(names), desc="loading weights", unit="tensor", disable=_disable(progress)) as bar:
        for path, layer in layers.items():
            for leaf, parameter in list(layer.named_parameters()):
                sources = [tied.get(part, part) for part in source_names(f"{path}.{leaf}")]
                filled = torch.zeros(parameter.shape, dtype=dtype, device=device)
                _fill(filled, sources, layer.shards(leaf), source)
                setattr(layer, leaf, nn.Parameter(filled, requires_grad=False))
                bar.update()
            layer.finish_loading()


def source_names(name: str) -> list[str]:
    """Return the checkpoint's names of what the parameter `name` is made of."""
    *path, layer, leaf = name.split(".")
    return [".".join([*path, part, leaf]) for part in FUSED.get(layer, (layer,))]


def checkpoint_files(directory: Path) -> list[Path]:
    """Return the safetensors files that hold a directory's model. Raises ValueError if one of them is missing."""
    index = directory / INDEX_FILE
    paths = [directory / name for name in (_indexed_files(index) if index.exists() else [SINGLE_FILE])]
    if absent := [path.name for path in paths if not path.is_file()]:
        raise ValueError(f"{directory} has no {', '.join(absent)}")
    return paths


def _indexed_files(index: Path) -> list[str]:
    try:
        weight_map = msgspec.convert(msgspec.json.decode(index.read_bytes())["weight_map"], dict[str, str])
    except (msgspec.MsgspecError, KeyError, TypeError) as error:
        raise ValueError(f"{index} is not an index of safetensors: {error}") from None
    return sorted(set(weight_map.values()))


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged or incomplete: {error}") from None


def _fill(parameter: Tensor, sources: list[str], shards: tuple[Shard, ...], source: Source) -> None:
    """Fill the parameter with the parts of the tensors that it is made of, one after the other."""
    offset = 0
    for name, shard in zip(sources, shards, strict=True):
        start, stop = shard.bounds
        source.read(name, shard, parameter.narrow(shard.dim, offset, stop - start))
        offset += stop - start


def _disable(progress: bool | None) -> bool | None:
    """Return tqdm's `disable`, in which None means: unless stderr is a terminal."""
    return None if progress is None else not progress


def listed(names: set[str], limit: int = 5) -> str:
    """Return how many tensors there are, and the names of some, for a message."""
    shown = ", ".join(sorted(names)[:limit])
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return f"{len(names)} tensor{'s' if len(names) > 1 else ''}: {shown}{more}"
