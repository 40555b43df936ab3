"""Weights of few bits, in the one form into which every quantized checkpoint is converted."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# N outputs, K inputs, G groups of inputs, B bytes of a row's codes


@dataclass(frozen=True, slots=True, eq=False)
class GroupwiseWeight:
    """weight[n, k] = scale[n, g] * code[n, k] + offset[n, g], where g = k // group_size.

    Codes are unsigned and have 8 bits (one a byte) or 4 (two a byte, the even k in the low half). Without offsets the
    middle code stands for zero: weight = scale * (code - 2**(bits - 1)). Scales and offsets are float16 where that
    loses nothing, otherwise float32.
    """

    codes_NB: Tensor  # uint8
    bits: int  # 4 or 8
    group_size: int  # divides K; a multiple of 16
    scales_NG: Tensor
    offsets_NG: Tensor | None

    def __post_init__(self) -> None:
        if self.bits not in (4, 8) or self.group_size % 16:
            raise ValueError(f"groups of {self.group_size} codes of {self.bits} bits are not supported")
        if self.scales_NG.shape != (self.num_outputs, self.num_inputs // self.group_size):
            raise ValueError(
                f"scales have shape {tuple(self.scales_NG.shape)} for {self.num_outputs} outputs of"
                f" {self.num_inputs} inputs in groups of {self.group_size}"
            )

    @property
    def num_outputs(self) -> int:
        return self.codes_NB.shape[0]

    @property
    def num_inputs(self) -> int:
        return self.codes_NB.shape[1] * 8 // self.bits

    @property
    def nbytes(self) -> int:
        """Return the memory that the weight takes."""
        offsets_bytes = 0 if self.offsets_NG is None else self.offsets_NG.nbytes
        return self.codes_NB.nbytes + self.scales_NG.nbytes + offsets_bytes

    def codes(self) -> Tensor:
        """Return codes_NK, uint8, one a byte."""
        if self.bits == 8:
            return self.codes_NB
        return torch.stack([self.codes_NB & 15, self.codes_NB >> 4], dim=-1).flatten(1)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return weight_NK, computed in float32."""
        codes_NGC = self.codes().float().view(self.num_outputs, -1, self.group_size)
        scales_NG1 = self.scales_NG.float().unsqueeze(-1)
        weight_NGC: Tensor
        if self.offsets_NG is None:
            weight_NGC = scales_NG1 * (codes_NGC - 2 ** (self.bits - 1))
        else:
            weight_NGC = scales_NG1 * codes_NGC + self.offsets_NG.float().unsqueeze(-1)
        return weight_NGC.flatten(1).to(dtype)


def pack_codes(codes_NK: Tensor, bits: int) -> Tensor:
    """Return codes (uint8, one a byte) as `GroupwiseWeight.codes_NB`."""
    if bits == 8:
        return codes_NK.contiguous()
    return codes_NK[:, ::2] | (codes_NK[:, 1::2] << 4)


def concatenate(parts: Sequence[GroupwiseWeight]) -> GroupwiseWeight:
    """Return the outputs of several weights of the same inputs as one. Raises ValueError if their forms differ."""
    first = parts[0]
    forms = {(part.bits, part.group_size, part.offsets_NG is None) for part in parts}
    if len(forms) > 1:
        raise ValueError(f"weights of different forms cannot be one: {sorted(forms)}")
    offsets = [part.offsets_NG for part in parts if part.offsets_NG is not None]
    return GroupwiseWeight(
        torch.cat([part.codes_NB for part in parts]),
        first.bits,
        first.group_size,
        torch.cat([part.scales_NG for part in parts]),
        torch.cat(offsets) if offsets else None,
    )
