"""Plain weights rounded to few bits at load: each group of inputs to its nearest codes."""

import torch
from torch import Tensor

from octavo.executor.quantization.groups import smallest_float
from octavo.kernels.groupwise import GroupwiseWeight, pack_codes

GROUP_SIZES = (128, 64, 32)

# N outputs, K inputs, G groups of inputs, C inputs of a group


def round_weight(weight_NK: Tensor, bits: int) -> GroupwiseWeight | None:
    """Return a plain weight, or a rank's part of one, in 8 or 4 bits; None if its inputs do not divide into groups.

    Groups have 128 inputs, or 64 or 32 where those do not divide them. 8 bits are symmetric: the largest magnitude of a
    group becomes code 127. 4 bits have an offset: a group's least value becomes code 0, its largest 15.
    """
    num_inputs = weight_NK.shape[1]
    group_size = rounded_group(num_inputs)
    if group_size is None:
        return None
    groups_NGC = weight_NK.float().reshape(len(weight_NK), -1, group_size)
    codes_NGC, scales_NG, offsets_NG = _symmetric(groups_NGC) if bits == 8 else _asymmetric(groups_NGC)
    codes_NB = pack_codes(codes_NGC.flatten(1).to(torch.uint8), bits)
    return GroupwiseWeight(codes_NB, bits, group_size, scales_NG, offsets_NG)


def rounded_group(num_inputs: int) -> int | None:
    """Return how many inputs share a scale; None if they do not divide into groups."""
    return next((size for size in GROUP_SIZES if num_inputs % size == 0), None)


def _symmetric(groups_NGC: Tensor) -> tuple[Tensor, Tensor, None]:
    scales_NG = _half(groups_NGC.abs().amax(-1) / 127)
    codes_NGC = (groups_NGC / _divisor(scales_NG)).round_().clamp_(-127, 127)
    return codes_NGC.add_(128), scales_NG, None


def _asymmetric(groups_NGC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    least_NG, most_NG = groups_NGC.aminmax(dim=-1)
    offsets_NG = _half(least_NG)
    scales_NG = _half((most_NG - offsets_NG.float()) / 15)
    codes_NGC = (groups_NGC - offsets_NG.float().unsqueeze(-1)) / _divisor(scales_NG)
    return codes_NGC.round_().clamp_(0, 15), scales_NG, offsets_NG


def _half(values_NG: Tensor) -> Tensor:
    """Return values, from which codes are yet to be computed, in float16 if all are in its range."""
    magnitudes = values_NG.abs()
    is_normal = (magnitudes <= 65504) & ((magnitudes >= 2**-14) | (magnitudes == 0))
    return values_NG.half() if bool(is_normal.all()) else smallest_float(values_NG)


def _divisor(scales_NG: Tensor) -> Tensor:
    """Return scales to divide by; a scale of zero stands for a group that its offset alone makes up."""
    scales_NG1 = scales_NG.float().unsqueeze(-1)
    return torch.where(scales_NG1 == 0, 1, scales_NG1)
