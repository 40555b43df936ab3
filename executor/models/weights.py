"""Loads the weights that a model asks for: only the slices that it needs; none is missing, none is left over."""

import logging
import math
import zlib
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Protocol

import torch
from torch import Tensor, nn
from tqdm import tqdm

from octavo.executor.models.layers import WeightModule, num_outputs
from octavo.executor.models.progress_bars import tqdm_disable
from octavo.executor.quantization import round_weight
from octavo.executor.quantization.groups import form_of, pad_outputs, to_device
from octavo.executor.shards import Shard
from octavo.kernels.groupwise import GroupwiseWeight, concatenate

# a fused layer: the checkpoint's layers it is made of, in order
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}

logger = logging.getLogger(__name__)


class Source(Protocol):
    """Where weights come from."""

    def check(self, needed: set[str], unneeded: set[str]) -> None:
        """Raise ValueError if a needed tensor is missing, or if a tensor is neither needed nor in `unneeded`."""

    def read(self, name: str, shard: Shard, part: Tensor) -> None:
        """Fill `part` with the shard of tensor `name`, in part's dtype. Raises ValueError if it does not fit."""

    def read_groupwise(self, name: str, shard: Shard, shape: list[int]) -> GroupwiseWeight | None:
        """Return the shard of a quantized weight `name`, which as a whole has `shape`; None if it is a plain one.

        Raises ValueError, naming tensor and file, if it does not fit or cannot be divided so.
        """


class NamedSource(Source, Protocol):
    """A Source whose files may have more weights than a configuration speaks of."""

    def has(self, name: str) -> bool:
        """Return whether a weight is there."""

    def equal(self, name: str, other: str) -> bool:
        """Return whether two weights that are there have the same values."""


def agreed_ties(tied: Mapping[str, str], source: NamedSource) -> dict[str, str]:
    """Return which parameters are to be read from another's tensor, as `load_weights` takes it.

    `tied` comes from config.json. As in transformers, two tensors that differ are both used; if only one is stored,
    under either name, it serves both parameters.
    """
    agreed = {}
    for name, owner in tied.items():
        if not source.has(name):
            agreed[name] = owner
        elif not source.has(owner):
            agreed[owner] = name
        elif source.equal(name, owner):
            agreed[name] = owner
        else:
            logger.warning(
                "config.json ties %s to %s, but the checkpoint has both, and they differ: each is used as it is"
                " (tie_word_embeddings should be false)",
                *(name, owner),
            )
    return agreed


class DummyWeights:
    """Random weights for trials of speed and memory. The same seed, name and shard give the same weights."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def check(self, needed: set[str], unneeded: set[str]) -> None:
        """Accept everything: every tensor exists."""

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
    layers = {path: module for path, module in model.named_modules() if isinstance(module, WeightModule)}
    names = {f"{path}.{leaf}" for path, layer in layers.items() for leaf, _ in layer.named_parameters()}
    source.check({tied.get(part, part) for name in names for part in source_names(name)}, set(tied))
    with tqdm(total=len(names), desc="loading weights", unit="tensor", disable=tqdm_disable(progress)) as bar:
        for path, layer in layers.items():
            owner = layers.get(tied.get(f"{path}.weight", "").removesuffix(".weight"))
            leaves = [leaf for leaf, _ in layer.named_parameters()]
            if owner is None or not layer.tie(owner):
                parameters = {}
                for leaf in leaves:
                    sources = [tied.get(part, part) for part in source_names(f"{path}.{leaf}")]
                    bits = rounded_bits if layer.can_be_rounded and leaf == "weight" else None
                    parameters[leaf] = _read(layer, leaf, sources, source, dtype, device, bits)
                layer.fill(parameters, dtype)
            bar.update(len(leaves))


def source_names(name: str) -> list[str]:
    """Return the checkpoint's names of what the parameter `name` is made of."""
    *path, layer, leaf = name.split(".")
    return [".".join([*path, part, leaf]) for part in FUSED.get(layer, (layer,))]


def _read(
    layer: WeightModule,
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
        raise ValueError(f"{', '.join(names)}: {num_bytes} bytes of memory are not available on {device}") from error
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
