"""Checks of tensors before their addresses go to the compiled kernels, which check nothing."""

import numpy as np
import torch
from torch import Tensor

from octavo.kernels.cpu import pointwise

# What stands for a tensor's dtype in the compiled kernels (16-bit words are bfloat16).
LIKE: dict[torch.dtype, np.ndarray] = {torch.float32: np.empty(0, np.float32), torch.bfloat16: np.empty(0, np.uint16)}


def like(*tensors: Tensor) -> np.ndarray:
    """Return what stands for the tensors' common dtype. Raises ValueError if the dtypes differ or have no kernels."""
    dtype = tensors[0].dtype
    for tensor in tensors:
        if tensor.dtype is not dtype or dtype not in LIKE or not tensor.is_cpu:
            kinds = ", ".join(f"{tensor.dtype} on {tensor.device}" for tensor in tensors)
            raise ValueError(f"expected tensors of float32, or all of bfloat16, on the CPU, not {kinds}")
    return LIKE[dtype]


def addresses(*tensors: Tensor) -> tuple[int, ...]:
    return tuple([tensor.data_ptr() for tensor in tensors])


def address_of_heads(name: str, values_H: Tensor | None, num_heads: int) -> int:
    """Return the address of one float32 a head; 0 if there are none."""
    if values_H is None:
        return 0
    require_shape(name, values_H, (num_heads,))
    if values_H.dtype is not torch.float32 or not values_H.is_cpu:
        raise ValueError(f"{name} is {values_H.dtype} on {values_H.device}, float32 on the CPU is needed")
    require_contiguous(values_H)
    return values_H.data_ptr()


def require_shape(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    if tensor.shape != shape:
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}, expected {shape}")


def require_contiguous(*tensors: Tensor) -> None:
    for tensor in tensors:
        if not tensor.is_contiguous():
            raise ValueError(f"a tensor of shape {tuple(tensor.shape)} is not contiguous")


def require_inside(name: str, values: Tensor, least: int, limit: int) -> None:
    """Raise IndexError unless least <= value < limit for all values (contiguous, int64)."""
    index = pointwise.first_outside(values.data_ptr(), len(values), least, limit)
    if index >= 0:
        raise IndexError(f"{name} {int(values[index])} of token {index} is outside the {limit} there are")


def contiguous(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    if tensor.dtype is not dtype:
        raise ValueError(f"expected indices of {dtype}, not {tensor.dtype}")
    return tensor.contiguous()


def has_dense_heads(x_THD: Tensor) -> bool:
    """Return whether the heads of each token lie side by side, whatever lies between the tokens."""
    _, num_heads, head_size = x_THD.shape
    _, head_stride, stride = x_THD.stride()
    return stride == 1 and (head_stride == head_size or num_heads == 1)


def dense_heads(x_THD: Tensor) -> Tensor:
    return x_THD if has_dense_heads(x_THD) else x_THD.contiguous()
