"""What kernels that see addresses only must be sure of. Nothing here waits for the device."""

import torch
from torch import Tensor


def require_shape(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    if tensor.shape != shape:
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}, expected {shape}")


def require_dtype(name: str, tensor: Tensor, dtype: torch.dtype) -> None:
    if tensor.dtype is not dtype:
        raise ValueError(f"{name} is {tensor.dtype}, {dtype} is needed")


def dense_heads(x_THD: Tensor) -> Tensor:
    """Return x, or a copy, in which the heads of each token lie side by side, whatever lies between the tokens."""
    _, num_heads, head_size = x_THD.shape
    _, head_stride, stride = x_THD.stride()
    is_dense = stride == 1 and (head_stride == head_size or num_heads == 1)
    return x_THD if is_dense else x_THD.contiguous()


def dense_rows(x_RV: Tensor) -> Tensor:
    """Return x, or a copy, in which the elements of a row lie side by side."""
    return x_RV if x_RV.stride(1) == 1 else x_RV.contiguous()
