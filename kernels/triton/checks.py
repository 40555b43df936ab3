"""Checks of tensors before kernels see their addresses. They neither read the device's memory nor wait for it."""

import torch
from torch import Tensor

FLOAT8 = torch.float8_e4m3fn
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def check_shape(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    if tensor.shape != shape:
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}, expected {shape}")


def check_dtype(name: str, tensor: Tensor, dtype: torch.dtype) -> None:
    if tensor.dtype is not dtype:
        raise ValueError(f"{name} is {tensor.dtype}, expected {dtype}")


def check_caches(
    k_cache_NKDP: Tensor, v_cache_NKPD: Tensor, num_kv_heads: int, head_size: int, value_size: int, like: Tensor
) -> None:
    """Raise ValueError unless the caches fit each other, those sizes, and the dtype and device of `like`."""
    num_blocks, _, block_size, _ = v_cache_NKPD.shape
    check_shape("k_cache", k_cache_NKDP, (num_blocks, num_kv_heads, head_size, block_size))
    check_shape("v_cache", v_cache_NKPD, (num_blocks, num_kv_heads, block_size, value_size))
    if like.dtype not in DTYPES:
        raise ValueError(f"attention is in float32, float16 or bfloat16, not {like.dtype}")
    for name, cache in (("k_cache", k_cache_NKDP), ("v_cache", v_cache_NKPD)):
        if cache.dtype not in (like.dtype, FLOAT8) or cache.dtype is not k_cache_NKDP.dtype:
            raise ValueError(f"{name} is {cache.dtype}, expected {like.dtype}, or {FLOAT8} for both caches")
        if cache.device != like.device:
            raise ValueError(f"{name} is on {cache.device}, expected {like.device}")
        if not cache.is_contiguous():
            raise ValueError(f"{name} is not contiguous")
    if k_cache_NKDP.dtype is FLOAT8:
        check_float8(like.device)


def check_float8(device: torch.device) -> None:
    """Raise ValueError if the device has no instructions for float8_e4m3fn that Triton could use."""
    if device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) < (8, 9):
        raise ValueError(
            f"a cache in float8_e4m3fn needs compute capability 8.9, and {torch.cuda.get_device_name(device)} has"
            f" {'.'.join(map(str, torch.cuda.get_device_capability(device)))}"
        )


def check_heads(name: str, x_THD: Tensor, like: Tensor) -> None:
    """Raise ValueError unless x has the dtype, device and tokens of `like`, and the heads of a token side by side."""
    if x_THD.dtype is not like.dtype or x_THD.device != like.device or len(x_THD) != len(like):
        raise ValueError(
            f"{name} has {len(x_THD)} tokens of {x_THD.dtype} on {x_THD.device},"
            f" expected {len(like)} of {like.dtype} on {like.device}"
        )
    _, num_heads, head_size = x_THD.shape
    if x_THD.stride(2) != 1 or (num_heads > 1 and x_THD.stride(1) != head_size):
        raise ValueError(f"the heads of a token of {name} do not lie side by side: strides {x_THD.stride()}")


def check_index(name: str, index: Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    check_shape(name, index, shape)
    if index.dtype is not dtype or index.device != device:
        raise ValueError(f"{name} is {index.dtype} on {index.device}, expected {dtype} on {device}")


def check_per_head(name: str, values_H: Tensor | None, q_THD: Tensor) -> None:
    if values_H is not None:
        check_index(name, values_H, (q_THD.shape[1],), torch.float32, q_THD.device)


def dense_heads(x_THD: Tensor) -> Tensor:
    """Return x, or a copy, in which the heads of each token lie side by side, whatever lies between the tokens."""
    _, num_heads, head_size = x_THD.shape
    _, head_stride, stride = x_THD.stride()
    is_dense = stride == 1 and (head_stride == head_size or num_heads == 1)
    return x_THD if is_dense else x_THD.contiguous()


def dense_rows(x_RV: Tensor) -> Tensor:
    """Return x, or a copy, in which the elements of a row lie side by side."""
    return x_RV if x_RV.stride(1) == 1 else x_RV.contiguous()
