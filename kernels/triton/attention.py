# Triton infers the types of what it compiles.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Paged attention in Triton: which kernel of `attention_kernels` takes a batch, in which tiles, with how many programs.

* `prefill_kernel` takes any batch. The number of programs follows from shapes alone: T // queries of a tile + S, which
  is at least the number of tiles.
* `decode_kernel` takes a batch of single tokens. To occupy the device when there are few sequences, it splits each
  context. The number of splits follows from shapes too.

So nothing is copied to the host and no allocation depends on values: a decode step can be captured in a CUDA graph.
"""

import functools
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from octavo.kernels.triton.attention_kernels import SPLIT_TILES, decode_kernel, merge_kernel, prefill_kernel
from octavo.kernels.triton.checks import DTYPES, FLOAT8, check_caches, check_index, check_per_head
from octavo.kernels.triton.configuration import SHIPPED_DTYPES, Configuration, triton_type

MAX_HEAD_SIZE = 256
LEAST_ROWS = 16  # the fewest rows of a product on tensor cores
MAX_SPLITS = 256
PROGRAMS_PER_PROCESSOR = 4  # at which a split aims
MERGE_SPLITS, MERGE_COMPONENTS = 16, 64  # of a tile of `merge_kernel`
MERGE_WARPS = 4
NO_WINDOW = 2**30

SHIPPED_HEAD_SIZES = [(64, 64), (80, 80), (96, 96), (128, 128), (192, 128), (256, 256)]  # of keys, of values
SHIPPED_BLOCK_SIZE = 16


class Tiling(NamedTuple):
    """How the work of a kernel is cut up."""

    rows: int
    keys: int
    num_warps: int
    num_stages: int


def paged_attention(
    q_THD: Tensor,
    k_cache_NKDP: Tensor,
    v_cache_NKPD: Tensor,
    block_tables_SM: Tensor,
    cu_seqlens_q: Tensor,
    seq_lens_S: Tensor,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    sinks_H: Tensor | None = None,
    alibi_slopes_H: Tensor | None = None,
) -> Tensor:
    """See `kernels.backend.Backend.paged_attention`; head sizes up to 256. A sequence of length 0 gives zeros."""
    _check(q_THD, k_cache_NKDP, v_cache_NKPD, block_tables_SM, cu_seqlens_q, seq_lens_S, sliding_window, soft_cap)
    check_per_head("sinks_H", sinks_H, q_THD)
    check_per_head("alibi_slopes_H", alibi_slopes_H, q_THD)
    num_tokens, num_heads, head_size = q_THD.shape
    _, num_kv_heads, block_size, value_size = v_cache_NKPD.shape
    num_seqs, max_blocks = block_tables_SM.shape
    q_THD = q_THD if q_THD.stride()[1:] == (head_size, 1) else q_THD.contiguous()
    out_THD = q_THD.new_empty(num_tokens, num_heads, value_size)
    if num_tokens == 0:
        return out_THD
    is_decode = num_tokens == num_seqs
    changes_scores = soft_cap is not None or alibi_slopes_H is not None
    block_d, block_v = padded_size(head_size), padded_size(value_size)
    tiling = choose_tiling(is_decode, block_d, block_v, q_THD.dtype, k_cache_NKDP.dtype, changes_scores)
    no_floats = q_THD.new_empty(0, dtype=torch.float32)
    inputs = {
        "q": q_THD,
        "k_cache": k_cache_NKDP,
        "v_cache": v_cache_NKPD,
        "block_tables": block_tables_SM.contiguous(),
        "seq_lens": seq_lens_S.contiguous(),
        "sinks": no_floats if sinks_H is None else sinks_H.contiguous(),
        "alibi_slopes": no_floats if alibi_slopes_H is None else alibi_slopes_H.contiguous(),
        "scale": float(scale),
        "soft_cap": float(soft_cap or 0.0),
        "window": min(sliding_window or NO_WINDOW, NO_WINDOW),
        "has_sinks": int(sinks_H is not None),
        "has_alibi": int(alibi_slopes_H is not None),
        "max_blocks": max_blocks,
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "q_stride": q_THD.stride(0),
        "BLOCK_M": tiling.rows,
        "TILE": tiling.keys,
        "HEAD_SIZE": head_size,
        "VALUE_SIZE": value_size,
        "BLOCK_D": block_d,
        "BLOCK_V": block_v,
        "BLOCK_SIZE": block_size,
        "CHANGES_SCORES": changes_scores,
        "num_warps": tiling.num_warps,
        "num_stages": tiling.num_stages,
    }
    group_size = num_heads // num_kv_heads
    heads_of_tile = min(group_size, tiling.rows)
    head_tiles = num_kv_heads * triton.cdiv(group_size, heads_of_tile)
    if is_decode:
        _decode(out_THD, head_tiles, max_blocks * block_size, inputs)
    else:
        grid = (num_tokens // (tiling.rows // heads_of_tile) + num_seqs, head_tiles)
        prefill_kernel[grid](out_THD, cu_seqlens_q=cu_seqlens_q.contiguous(), num_seqs=num_seqs, **inputs)
    return out_THD


def _decode(out_THD: Tensor, head_tiles: int, max_seq_len: int, inputs: dict[str, Any]) -> None:
    """Attend from single tokens, with split contexts where that pays."""
    num_seqs, num_heads, value_size = out_THD.shape
    num_splits = choose_num_splits(num_seqs * head_tiles, max_seq_len, inputs["TILE"], num_processors(out_THD.device))
    num_partial = num_seqs * num_heads * num_splits if num_splits > 1 else 0
    partial_out_LV = out_THD.new_empty(num_partial, value_size, dtype=torch.float32)
    partial_lse_L = out_THD.new_empty(num_partial, dtype=torch.float32)
    grid = (num_seqs, head_tiles, num_splits)
    decode_kernel[grid](out_THD, partial_out_LV, partial_lse_L, num_splits=num_splits, **inputs)
    if num_splits > 1:
        merge_kernel[(num_seqs, num_heads, triton.cdiv(value_size, MERGE_COMPONENTS))](
            out_THD,
            partial_out_LV,
            partial_lse_L,
            inputs["seq_lens"],
            inputs["window"],
            num_heads,
            num_splits,
            TILE=inputs["TILE"],
            VALUE_SIZE=value_size,
            BLOCK_L=MERGE_SPLITS,
            BLOCK_V=MERGE_COMPONENTS,
            num_warps=MERGE_WARPS,
            num_stages=1,
        )


def padded_size(head_size: int) -> int:
    """Return the power of two that a head's components are padded to."""
    return max(16, int(triton.next_power_of_2(head_size)))


def choose_tiling(
    is_decode: bool,
    block_d: int,
    block_v: int,
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
    changes_scores: bool = False,
) -> Tiling:
    """Return a tiling whose registers do not spill and whose keys and values fit 64 KiB of shared memory.

    The tilings were found by compiling for sm_80, sm_90, sm_100 and gfx942. With fewer stages than three, loads of keys
    would wait for the loads of their block numbers. float32 goes without tensor cores, on which it would lose bits.
    """
    is_wide = max(block_d, block_v) > 128
    changes_float8 = changes_scores and cache_dtype is FLOAT8
    if dtype is torch.float32:
        return Tiling(LEAST_ROWS, 16, 4, 2 if is_decode else 1)
    if is_decode:
        return Tiling(LEAST_ROWS, (16 if changes_float8 else 32) if is_wide else 64, 4, 3)
    if block_v > 128 or (is_wide and cache_dtype is FLOAT8):
        return Tiling(32, 16 if changes_float8 else 32, 4, 3)
    if changes_float8:
        return Tiling(32, 32, 4, 3)
    if is_wide or changes_scores:
        return Tiling(64, 32, 8, 3)
    return Tiling(128, 64, 8, 3) if block_d <= 64 else Tiling(64, 64, 4, 3)


def choose_num_splits(num_programs: int, max_seq_len: int, tile: int, num_processors: int) -> int:
    """Return among how many programs each context is split.

    There are as many as keep the device busy, but each has at least SPLIT_TILES tiles of the longest context.
    """
    wanted = PROGRAMS_PER_PROCESSOR * num_processors // num_programs
    least_tokens: int = SPLIT_TILES.value * tile
    return max(1, min(wanted, max_seq_len // least_tokens, MAX_SPLITS))


def configurations(is_complete: bool = False) -> list[Configuration]:
    """Return the shipped forms: all head sizes in bfloat16 and all dtypes with heads of 128; or every combination."""
    plain = [
        (dtype, cache_dtype, head_size, value_size)
        for dtype, cache_dtype in SHIPPED_DTYPES
        for head_size, value_size in SHIPPED_HEAD_SIZES
        if is_complete or head_size == value_size == 128 or dtype is cache_dtype is torch.bfloat16
    ]
    changed = [form for form in plain if is_complete or (form[1] is torch.bfloat16 and form[2] in (128, 256))]
    return [
        *(_configuration(kernel, *form, False) for form in plain for kernel in (prefill_kernel, decode_kernel)),
        *(_configuration(kernel, *form, True) for form in changed for kernel in (prefill_kernel, decode_kernel)),
        *(_merge_configuration(dtype, 64 if dtype is torch.bfloat16 else 16) for dtype in DTYPES),
    ]


def _configuration(
    kernel, dtype: torch.dtype, cache_dtype: torch.dtype, head_size: int, value_size: int, changes_scores: bool
) -> Configuration:
    is_decode = kernel is decode_kernel
    block_d, block_v = padded_size(head_size), padded_size(value_size)
    tiling = choose_tiling(is_decode, block_d, block_v, dtype, cache_dtype, changes_scores)
    constexprs: dict[str, object] = {
        "BLOCK_M": tiling.rows,
        "TILE": tiling.keys,
        "HEAD_SIZE": head_size,
        "VALUE_SIZE": value_size,
        "BLOCK_D": block_d,
        "BLOCK_V": block_v,
        "BLOCK_SIZE": SHIPPED_BLOCK_SIZE,
        "CHANGES_SCORES": changes_scores,
    }
    name = f"{'decode' if is_decode else 'prefill'} {triton_type(dtype)} over {triton_type(cache_dtype)}"
    return Configuration(
        kernel=kernel,
        signature=_signature(kernel, constexprs, triton_type(dtype), triton_type(cache_dtype)),
        constexprs=constexprs,
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
        name=f"{name} head={head_size}/{value_size}{' soft cap, ALiBi' if changes_scores else ''}",
    )


def _merge_configuration(dtype: torch.dtype, tile: int) -> Configuration:
    constexprs: dict[str, object] = {
        "TILE": tile,
        "VALUE_SIZE": 128,
        "BLOCK_L": MERGE_SPLITS,
        "BLOCK_V": MERGE_COMPONENTS,
    }
    return Configuration(
        kernel=merge_kernel,
        signature=_signature(merge_kernel, constexprs, triton_type(dtype), triton_type(dtype)),
        constexprs=constexprs,
        num_warps=MERGE_WARPS,
        num_stages=1,
        name=f"merge {triton_type(dtype)}",
    )


def _signature(kernel, constexprs: dict[str, object], dtype: str, cache_dtype: str) -> dict[str, str]:
    types = dict.fromkeys(("scale", "soft_cap"), "fp32") | {"q_stride": "i32:16"}
    types |= dict.fromkeys(("out", "q"), f"*{dtype}") | dict.fromkeys(("k_cache", "v_cache"), f"*{cache_dtype}")
    types |= dict.fromkeys(("block_tables", "cu_seqlens_q", "seq_lens"), "*i32")
    types |= dict.fromkeys(("sinks", "alibi_slopes", "partial_out", "partial_lse"), "*fp32")
    return {name: types.get(name, "i32") for name in kernel.arg_names if name not in constexprs}


@functools.cache
def num_processors(device: torch.device) -> int:
    """Return how many multiprocessors (compute units) the device has; the interpreter's stands for a small one."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count) if device.type == "cuda" else 4


def _check(
    q_THD: Tensor,
    k_cache_NKDP: Tensor,
    v_cache_NKPD: Tensor,
    block_tables_SM: Tensor,
    cu_seqlens_q: Tensor,
    seq_lens_S: Tensor,
    sliding_window: int | None,
    soft_cap: float | None,
) -> None:
    num_heads, head_size = q_THD.shape[1:]
    num_kv_heads, value_size = v_cache_NKPD.shape[1], v_cache_NKPD.shape[3]
    check_caches(k_cache_NKDP, v_cache_NKPD, num_kv_heads, head_size, value_size, q_THD)
    if num_heads % num_kv_heads:
        raise ValueError(f"{num_heads} query heads cannot be shared evenly by {num_kv_heads} key/value heads")
    if max(head_size, value_size) > MAX_HEAD_SIZE:
        raise ValueError(f"head sizes up to {MAX_HEAD_SIZE} are supported, not {max(head_size, value_size)}")
    if sliding_window is not None and sliding_window < 1:
        raise ValueError(f"sliding_window must be at least 1, not {sliding_window}")
    if soft_cap is not None and soft_cap <= 0:
        raise ValueError(f"soft_cap must be above 0, not {soft_cap}")
    num_seqs = block_tables_SM.shape[0]
    check_index("block_tables_SM", block_tables_SM, (num_seqs, block_tables_SM.shape[1]), torch.int32, q_THD.device)
    check_index("cu_seqlens_q", cu_seqlens_q, (num_seqs + 1,), torch.int32, q_THD.device)
    check_index("seq_lens_S", seq_lens_S, (num_seqs,), torch.int32, q_THD.device)
