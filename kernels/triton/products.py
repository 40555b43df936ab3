"""Linear layers on a GPU: plain weights by cuBLAS (or what torch has), those of few bits by our kernels.

M rows, N outputs, K inputs, T tokens.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from octavo.kernels.groupwise import GroupwiseWeight
from octavo.kernels.triton import groupwise
from octavo.kernels.triton.checks import check_dtype
from octavo.kernels.triton.groupwise import GroupwiseLinear


@dataclass(frozen=True, slots=True, eq=False)
class PlainLinear:
    """A linear layer whose weight has the dtype of the activations."""

    weight_NK: Tensor
    bias_N: Tensor | None

    @property
    def form(self) -> str:
        return f"{str(self.weight_NK.dtype).removeprefix('torch.')} weights, multiplied by torch"

    @property
    def nbytes(self) -> int:
        return self.weight_NK.nbytes


def pack_linear(weight: Tensor | GroupwiseWeight, bias_N: Tensor | None = None) -> PlainLinear | GroupwiseLinear:
    """See `kernels.backend`."""
    bias_N = None if bias_N is None else bias_N.clone()
    if not isinstance(weight, GroupwiseWeight):
        return PlainLinear(weight.clone(memory_format=torch.contiguous_format), bias_N)
    return groupwise.pack(weight, bias_N)


def linear(x_MK: Tensor, layer: PlainLinear | GroupwiseLinear, out_dtype: torch.dtype | None = None) -> Tensor:
    """See `kernels.backend`."""
    out_dtype = out_dtype or x_MK.dtype
    if isinstance(layer, PlainLinear):
        return _plain_linear(x_MK, layer, out_dtype)
    return groupwise.linear(x_MK, layer, out_dtype)


def embedding(token_ids_T: Tensor, layer: GroupwiseLinear, dtype: torch.dtype) -> Tensor:
    """See `kernels.backend`."""
    check_dtype("token_ids", token_ids_T, torch.int64)
    return groupwise.rows(token_ids_T, layer, dtype)


def _plain_linear(x_MK: Tensor, layer: PlainLinear, out_dtype: torch.dtype) -> Tensor:
    """Multiply by cuBLAS, which can store its float32 sums unrounded: logits of bfloat16 would have many equals."""
    is_widened = x_MK.dtype != torch.float32 and out_dtype == torch.float32
    if is_widened and x_MK.is_cuda and torch.version.hip is None:
        out_MN = torch.mm(x_MK, layer.weight_NK.t(), out_dtype=torch.float32)
        return out_MN if layer.bias_N is None else out_MN.add_(layer.bias_N)
    return functional.linear(x_MK, layer.weight_NK, layer.bias_N).to(out_dtype)
