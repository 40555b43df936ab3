"""The KV cache: a pair of tensors for each layer."""

import math
import mmap
from collections.abc import Sequence

import torch
from torch import Tensor

# N blocks, K key/value heads, D head size, P tokens in a block

KVShape = tuple[int, int, int]  # num_kv_heads, key_head_size, value_head_size
KVCaches = list[tuple[Tensor, Tensor]]  # of each layer: k_cache_NKDP, v_cache_NKPD


def block_bytes(kv_shapes: Sequence[KVShape], block_size: int, dtype: torch.dtype) -> int:
    """Return the bytes of one block in all layers."""
    elements = sum(heads * (key_size + value_size) for heads, key_size, value_size in kv_shapes)
    return elements * block_size * dtype.itemsize


def allocate_kv_caches(
    kv_shapes: Sequence[KVShape], num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
) -> KVCaches:
    """Return each layer's k_cache_NKDP and v_cache_NKPD, zero; on the CPU a page takes memory once it is written.

    Raises ValueError if the system does not give that much.
    """
    return [
        (
            _zeros((num_blocks, heads, key_size, block_size), dtype, device),
            _zeros((num_blocks, heads, block_size, value_size), dtype, device),
        )
        for heads, key_size, value_size in kv_shapes
    ]


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # torch.zeros writes its zeros; fresh anonymous pages are zero without being there.
    num_bytes = math.prod(shape) * dtype.itemsize
    try:
        pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise ValueError(f"no memory for the KV cache: {error}; set --kv-cache-memory-bytes to less") from None
    return torch.frombuffer(pages, dtype=dtype).view(shape)
