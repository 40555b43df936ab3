"""The KV pool: how many blocks there is room for."""

import math
from pathlib import Path
from typing import NamedTuple

import torch

from octavo.executor.machine.cgroups import ROOT
from octavo.executor.machine.memory import free_device_bytes, total_bytes, usable_bytes
from octavo.protocol.config import Config

# The pool's share of the memory that this process may still use after the weights are loaded. Activations, logits, the
# other processes and the system's page cache need the rest.
CPU_SHARE = 0.4


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
    """Return the size of the KV pool.

    `kv_cache_memory_bytes` is the size if it is set. Otherwise the pool takes a share of memory, less
    `activation_bytes`: on a GPU, the part of `gpu_memory_utilization` that is still free; on the CPU, 40 % of the
    memory that this process may still use, divided by `num_sharing` executors. The pool is never larger than
    `max_num_seqs` sequences of `max_model_len` tokens. Raises ValueError if one such sequence does not fit.
    """
    sequence_blocks = math.ceil(max_model_len / config.block_size)
    if not block_bytes:  # an encoder: blocks are numbers that the scheduler counts, without memory
        return PoolSize(config.max_num_seqs * sequence_blocks, 0)
    if config.kv_cache_memory_bytes is not None:
        _refuse_more_than_there_is(config.kv_cache_memory_bytes, total_bytes(device, root))
        room_bytes, num_blocks = config.kv_cache_memory_bytes, config.kv_cache_memory_bytes // block_bytes
    else:
        is_gpu = device.type == "cuda"
        share_bytes = (
            free_device_bytes(device, config.gpu_memory_utilization) if is_gpu else _cpu_share(root) // num_sharing
        )
        room_bytes = max(0, share_bytes - activation_bytes)
        num_blocks = min(room_bytes // block_bytes, config.max_num_seqs * sequence_blocks)
    if num_blocks < sequence_blocks:
        longest = num_blocks * config.block_size
        raise ValueError(
            _no_room(sequence_blocks * block_bytes, room_bytes, max_model_len, longest, _more_room(config, device))
        )
    return PoolSize(num_blocks, block_bytes)


def _refuse_more_than_there_is(asked_bytes: int, has_bytes: int) -> None:
    """Raise ValueError if the pool is to be larger than all memory; `has_bytes` is 0 if that size is unknown."""
    if 0 < has_bytes < asked_bytes:
        raise ValueError(
            f"--kv-cache-memory-bytes is {asked_bytes / 2**30:.1f} GiB, but the machine has only"
            f" {has_bytes / 2**30:.1f} GiB of memory: set it to less, or leave it out"
        )


def _cpu_share(root: Path) -> int:
    return int(usable_bytes(root) * CPU_SHARE)


def _no_room(needed_bytes: int, room_bytes: int, max_model_len: int, longest: int, more_room: str) -> str:
    shorter = f"--max-model-len to {longest} or less, or " if longest else ""
    return (
        f"a sequence of {max_model_len} tokens (max_model_len) needs {needed_bytes} bytes of KV cache, and there is"
        f" room for {room_bytes}: set {shorter}--kv-cache-memory-bytes to {needed_bytes} or more{more_room}"
    )


def _more_room(config: Config, device: torch.device) -> str:
    """Return, as the end of a sentence, what else makes room for the KV cache on this device."""
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
    """Raise ValueError, before minutes of loading, if this rank's weights of `weight_bytes` do not fit."""
    if device.type == "cuda":
        free_bytes = free_device_bytes(device, config.gpu_memory_utilization)
        where = f"of the GPU's memory by --gpu-memory-utilization {config.gpu_memory_utilization}"
    else:
        try:
            free_bytes, where = usable_bytes(root) // num_sharing, "of this machine's memory"
        except ValueError:
            return  # `size_pool` refuses if it needs to know
    if weight_bytes > free_bytes:
        raise ValueError(
            f"the weights take {weight_bytes / 2**30:.1f} GiB, and {free_bytes / 2**30:.1f} GiB {where} are free: free"
            " some, round the weights with --quantization int8 or int4, share them among more devices with"
            " --tensor-parallel-size, or take a smaller model"
        )
