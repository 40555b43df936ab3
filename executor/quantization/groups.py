"""Parts of weights of few bits: the rows and whole groups of inputs that ranks and fused layers need."""

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional

from octavo.executor.shards import Shard
from octavo.kernels.groupwise import GroupwiseWeight

MAX_RANKS = 64  # named in a refusal


def form_of(weight: GroupwiseWeight) -> tuple[int, int, bool]:
    """Return the properties that weights of the same inputs must share to be joined."""
    return weight.bits, weight.group_size, weight.offsets_NG is None


def whole_groups(shard: Shard, group_size: int) -> tuple[int, int]:
    """Return the (start, stop) of a part of the inputs, which must consist of whole groups.

    Raises ValueError, naming the numbers of ranks that could share them, if it is not.
    """
    if shard.count > 1 and shard.size % (shard.count * group_size):
        possible = [count for count in range(1, MAX_RANKS + 1) if shard.size % (count * group_size) == 0]
        raise ValueError(
            f"{shard.size} inputs in groups of {group_size} cannot be divided among {shard.count} ranks by whole"
            f" groups, but among {', '.join(map(str, possible))}"
        )
    return shard.bounds


def cut_inputs(weight: GroupwiseWeight, start: int, stop: int) -> GroupwiseWeight:
    """Return the inputs from `start` to `stop`, both of which lie between groups, without memory of the others."""
    codes = slice(start * weight.bits // 8, stop * weight.bits // 8)
    groups = slice(start // weight.group_size, stop // weight.group_size)
    return replace(
        weight,
        codes_NB=weight.codes_NB[:, codes].clone(memory_format=torch.contiguous_format),
        scales_NG=weight.scales_NG[:, groups].clone(memory_format=torch.contiguous_format),
        offsets_NG=_cut(weight.offsets_NG, groups),
    )


def pad_outputs(weight: GroupwiseWeight, num_outputs: int) -> GroupwiseWeight:
    """Return the weight with rows of zeros after its own, up to `num_outputs`."""
    added = num_outputs - weight.num_outputs
    if added == 0:
        return weight
    offsets_NG = weight.offsets_NG
    return replace(
        weight,
        codes_NB=functional.pad(weight.codes_NB, (0, 0, 0, added)),
        scales_NG=functional.pad(weight.scales_NG, (0, 0, 0, added)),
        offsets_NG=None if offsets_NG is None else functional.pad(offsets_NG, (0, 0, 0, added)),
    )


def to_device(weight: GroupwiseWeight, device: torch.device) -> GroupwiseWeight:
    offsets_NG = weight.offsets_NG
    return replace(
        weight,
        codes_NB=weight.codes_NB.to(device),
        scales_NG=weight.scales_NG.to(device),
        offsets_NG=None if offsets_NG is None else offsets_NG.to(device),
    )


def smallest_float(values: Tensor) -> Tensor:
    """Return the values, contiguous, in float16 if that loses nothing, else in float32."""
    half = values.half()
    return (half if torch.equal(half.float(), values.float()) else values.float()).contiguous()


def _cut(values_NG: Tensor | None, groups: slice) -> Tensor | None:
    return None if values_NG is None else values_NG[:, groups].clone(memory_format=torch.contiguous_format)
