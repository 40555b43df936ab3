"""The KV pool: how many blocks there is room for, and the tensors."""

import math
import mmap
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from octavo.executor.cgroups import ROOT, group_directories, memory_limit, memory_limits, read_integer, read_table
from octavo.protocol.config import Config

# N blocks, K key/value heads, D head size, P tokens in a block

# Of what this process may still use once the weights are there. The rest is for activations, logits, the other
# processes and the system's page cache.
CPU_SHARE = 0.4

KVShape = tuple[int, int, int]  # num_kv_heads, key_head_size, value_head_size
KVCaches = list[tuple[Tensor, Tensor]]  # of each layer: k_cache_NKDP, v_cache_NKPD


class PoolSize(NamedTuple):
    num_blocks: int
    block_bytes: int  # of all layers

    @property
    def total_bytes(self) -> int:
        return self.num_blocks * self.block_bytes


def size_pool(
    config: Config,
    block_bytes: int,
    max_model_len: int,
    device: torch.device,
    root: Path = ROOT,
    *,
    activation_bytes: int = 0,
    num_sharing: int = 1,
) -> PoolSize:
    """Return how large the KV pool is to be.

    That is `kv_cache_memory_bytes` if it is set. Otherwise it is a share of memory, but no more than `max_num_seqs`
    sequences of `max_model_len` tokens fill: on a GPU what `gpu_memory_utilization` leaves, on the CPU 40 % of what
    this process may still use, which `num_sharing` executors divide; either less `activation_bytes`. Raises ValueError
    if not even one sequence of `max_model_len` tokens fits.
    """
    sequence_blocks = math.ceil(max_model_len / config.block_size)
    if config.kv_cache_memory_bytes is not None:
        room_bytes, num_blocks = config.kv_cache_memory_bytes, config.kv_cache_memory_bytes // block_bytes
        has_bytes = total_bytes(device, root)
        if 0 < has_bytes < room_bytes:
            raise ValueError(
                f"--kv-cache-memory-bytes is {room_bytes / 2**30:.1f} GiB, more than the {has_bytes / 2**30:.1f} GiB of"
                " memory that there are: set it to less, or leave it out"
            )
    else:
        share_bytes = (
            free_device_bytes(device, config.gpu_memory_utilization)
            if device.type == "cuda"
            else _cpu_share(root) // num_sharing
        )
        room_bytes = max(0, share_bytes - activation_bytes)
        num_blocks = min(room_bytes // block_bytes, config.max_num_seqs * sequence_blocks)
    if num_blocks < sequence_blocks:
        longest = num_blocks * config.block_size
        raise ValueError(
            _no_room(sequence_blocks * block_bytes, room_bytes, max_model_len, longest, _more_room(config, device))
        )
    return PoolSize(num_blocks, block_bytes)


def usable_bytes(root: Path = ROOT) -> int:
    """Return the memory this process may still use: what the system has available, within its control groups' limits.

    File pages that a group could drop count as available, as they do for the system. Raises ValueError without
    /proc/meminfo.
    """
    available = read_table(root / "proc/meminfo").get("MemAvailable")
    if available is None:
        raise ValueError("cannot tell how much memory is available: set --kv-cache-memory-bytes")
    rooms = [room for group in group_directories("memory", root) if (room := _group_room(group)) is not None]
    return max(0, min([available, *rooms]))


def free_device_bytes(device: torch.device, utilization: float) -> int:
    """Return what is left of `utilization` of a GPU's memory, the weights being there already."""
    free, total = torch.cuda.mem_get_info(device)
    return max(0, int(total * utilization) - (total - free))


def total_bytes(device: torch.device, root: Path = ROOT) -> int:
    """Return the size of a GPU's memory; on the CPU the system's, or the least limit of this process's groups."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[1])
    return min([read_table(root / "proc/meminfo").get("MemTotal", 0), *memory_limits(root)])


def used_bytes(device: torch.device, root: Path = ROOT) -> int:
    """Return what this process holds of a GPU's memory through torch; on the CPU, what is resident of it.

    May be called from any thread, and never waits for the device.
    """
    if device.type == "cuda":
        return int(torch.cuda.memory_reserved(device))
    return read_table(root / "proc/self/status").get("VmRSS", 0)


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


def _cpu_share(root: Path) -> int:
    return int(usable_bytes(root) * CPU_SHARE)


def _group_room(group: Path) -> int | None:
    """Return a control group's limit less its use; None without a limit."""
    limit = memory_limit(group)
    used = read_integer(group / "memory.current") or read_integer(group / "memory.usage_in_bytes")
    if limit is None or used is None:
        return None
    table = read_table(group / "memory.stat")
    return limit - used + table.get("total_inactive_file", table.get("inactive_file", 0))


def _no_room(needed_bytes: int, room_bytes: int, max_model_len: int, longest: int, more_room: str) -> str:
    shorter = f"--max-model-len to {longest} or less, or " if longest else ""
    return (
        f"a sequence of {max_model_len} tokens (max_model_len) needs {needed_bytes} bytes of KV cache, and there is"
        f" room for {room_bytes}: set {shorter}--kv-cache-memory-bytes to {needed_bytes} or more{more_room}"
    )


def _more_room(config: Config, device: torch.device) -> str:
    """Return what else makes room for the KV cache, which is not the same everywhere, as the end of a sentence."""
    if config.kv_cache_memory_bytes is not None:
        return ""
    if device.type == "cuda":
        return (
            f", or raise --gpu-memory-utilization ({config.gpu_memory_utilization}), take --kv-cache-dtype fp8, or"
            " share the model with --tensor-parallel-size"
        )
    return f" (the default is {CPU_SHARE:.0%} of what is free), or free some memory"


def refuse_too_large(
    config: Config, weight_bytes: int, device: torch.device, root: Path = ROOT, *, num_sharing: int = 1
) -> None:
    """Raise ValueError if weights of so many bytes, of this rank, cannot be held, before minutes of loading."""
    if device.type == "cuda":
        free_bytes = free_device_bytes(device, config.gpu_memory_utilization)
        where = f"of the GPU's memory by --gpu-memory-utilization {config.gpu_memory_utilization}"
    else:
        try:
            free_bytes, where = usable_bytes(root) // num_sharing, "of this machine's memory"
        except ValueError:
            return  # `size_pool` says so, where it has to know
    if weight_bytes > free_bytes:
        raise ValueError(
            f"the weights take {weight_bytes / 2**30:.1f} GiB, and {free_bytes / 2**30:.1f} GiB {where} are free: free"
            " some, round the weights with --quantization int8 or int4, share them among more devices with"
            " --tensor-parallel-size, or take a smaller model"
        )
