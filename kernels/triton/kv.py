# Triton infers the types of what it compiles.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Storing keys and values in the paged cache in Triton, also with the rotation of queries and keys in the same launch.

A program takes PAIRS or ELEMENTS of one token, whatever heads they belong to: so one compiled kernel serves all head
sizes. Sizes are in units of UNIT components, which lets the compiler see what can be loaded and stored as vectors.
Within a block of the cache, component e of a token's keys (counted over its heads) lies at e * P + offset.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.triton.checks import check_caches, check_heads, check_index
from octavo.kernels.triton.configuration import SHIPPED_DTYPES, Configuration, triton_type

ELEMENTS = 512  # of a program
WARPS = 4
VARYING = [
    "num_heads",
    "num_kv_heads",
    "block_size",
    "head_units",
    "value_units",
    "half_units",
    "q_stride_units",
    "k_stride_units",
    "v_stride_units",
]


def store_kv(k_TKD: Tensor, v_TKD: Tensor, k_cache_NKDP: Tensor, v_cache_NKPD: Tensor, slot_mapping_T: Tensor) -> None:
    """See `kernels.backend.Backend.store_kv`. Numbers beyond the range of float8_e4m3fn become its largest."""
    _check(k_TKD, v_TKD, k_cache_NKDP, v_cache_NKPD, slot_mapping_T)
    num_tokens, num_kv_heads, head_size = k_TKD.shape
    value_size = v_TKD.shape[2]
    if num_tokens == 0:
        return
    unit = math.gcd(8, head_size, value_size, k_TKD.stride(0), v_TKD.stride(0))
    _store_kernel[(num_tokens, triton.cdiv(num_kv_heads * max(head_size, value_size), ELEMENTS))](
        k_TKD,
        v_TKD,
        k_cache_NKDP,
        v_cache_NKPD,
        slot_mapping_T.contiguous(),
        num_kv_heads,
        v_cache_NKPD.shape[2],
        head_size // unit,
        value_size // unit,
        k_TKD.stride(0) // unit,
        v_TKD.stride(0) // unit,
        UNIT=unit,
        BLOCK=ELEMENTS,
        num_warps=WARPS,
    )


def rotate_and_store_kv(
    q_THD: Tensor,
    k_TKD: Tensor,
    v_TKD: Tensor,
    cos_sin_PR: Tensor,
    positions_T: Tensor,
    k_cache_NKDP: Tensor,
    v_cache_NKPD: Tensor,
    slot_mapping_T: Tensor,
) -> None:
    """See `kernels.backend.Backend.rotate_and_store_kv`; one launch. The keys in k stay as they are."""
    _check(k_TKD, v_TKD, k_cache_NKDP, v_cache_NKPD, slot_mapping_T)
    check_heads("q", q_THD, k_TKD)
    _check_rotation(q_THD, k_TKD, cos_sin_PR, positions_T)
    num_tokens, num_kv_heads, head_size = k_TKD.shape
    num_heads, value_size, half = q_THD.shape[1], v_TKD.shape[2], cos_sin_PR.shape[1] // 2
    if num_tokens == 0:
        return
    strides = (q_THD.stride(0), k_TKD.stride(0), v_TKD.stride(0))
    unit = math.gcd(8, head_size, value_size, half, *strides)
    rotations = triton.cdiv(num_heads * half, ELEMENTS) + triton.cdiv(num_kv_heads * half, ELEMENTS)
    copies = triton.cdiv(num_kv_heads * max(head_size - 2 * half, value_size), ELEMENTS)
    _rotate_and_store_kernel[(num_tokens, rotations + copies)](
        q_THD,
        k_TKD,
        v_TKD,
        cos_sin_PR,
        positions_T.contiguous(),
        k_cache_NKDP,
        v_cache_NKPD,
        slot_mapping_T.contiguous(),
        num_heads,
        num_kv_heads,
        v_cache_NKPD.shape[2],
        head_size // unit,
        value_size // unit,
        half // unit,
        *(stride // unit for stride in strides),
        UNIT=unit,
        BLOCK=ELEMENTS,
        num_warps=WARPS,
    )


def configurations() -> list[Configuration]:
    """Return the shipped forms: one for each pair of dtypes, whatever the head sizes."""
    return [
        Configuration(
            kernel=kernel,
            signature=_signature(kernel, dtype, cache_dtype),
            constexprs={"UNIT": 8, "BLOCK": ELEMENTS},
            num_warps=WARPS,
            num_stages=3,
            name=f"{name} {triton_type(dtype)} into {triton_type(cache_dtype)}",
        )
        for name, kernel in (("store_kv", _store_kernel), ("rotate_and_store_kv", _rotate_and_store_kernel))
        for dtype, cache_dtype in SHIPPED_DTYPES
    ]


def _signature(kernel, dtype: torch.dtype, cache_dtype: torch.dtype) -> dict[str, str]:
    model, cache = f"*{triton_type(dtype)}", f"*{triton_type(cache_dtype)}"
    pointers = {
        "q": model,
        "k": model,
        "v": model,
        "cos_sin": "*fp32",
        "positions": "*i64",
        "k_cache": cache,
        "v_cache": cache,
        "slot_mapping": "*i64",
    }
    return {name: pointers.get(name, "i32") for name in kernel.arg_names if name not in ("UNIT", "BLOCK")}


def _check(k_TKD: Tensor, v_TKD: Tensor, k_cache_NKDP: Tensor, v_cache_NKPD: Tensor, slot_mapping_T: Tensor) -> None:
    num_tokens, num_kv_heads, head_size = k_TKD.shape
    check_caches(k_cache_NKDP, v_cache_NKPD, num_kv_heads, head_size, v_TKD.shape[2], k_TKD)
    check_heads("k", k_TKD, k_TKD)
    check_heads("v", v_TKD, k_TKD)
    if v_TKD.shape[1] != num_kv_heads:
        raise ValueError(f"v has {v_TKD.shape[1]} heads, k has {num_kv_heads}")
    check_index("slot_mapping_T", slot_mapping_T, (num_tokens,), torch.int64, k_TKD.device)


def _check_rotation(q_THD: Tensor, k_TKD: Tensor, cos_sin_PR: Tensor, positions_T: Tensor) -> None:
    num_positions, rotary_size = cos_sin_PR.shape
    head_size = k_TKD.shape[2]
    if q_THD.shape[2] != head_size:
        raise ValueError(f"q has heads of {q_THD.shape[2]} components, k of {head_size}")
    if rotary_size % 2 or rotary_size > head_size or not cos_sin_PR.is_contiguous():
        raise ValueError(f"cos_sin_PR has {rotary_size} columns, expected an even number, at most {head_size}")
    check_index("cos_sin_PR", cos_sin_PR, (num_positions, rotary_size), torch.float32, q_THD.device)
    check_index("positions_T", positions_T, (len(q_THD),), torch.int64, q_THD.device)


@triton.jit(do_not_specialize=VARYING)
def _store_kernel(
    k,
    v,
    k_cache,
    v_cache,
    slot_mapping,
    num_kv_heads,
    block_size,
    head_units,
    value_units,
    k_stride_units,
    v_stride_units,
    UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Store BLOCK components of the keys, and of the values, of one token. Grid: (T, blocks of components)."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token)
    if slot < 0:
        return
    element = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    num_key_elements = num_kv_heads * (head_units * UNIT)
    key = tl.load(k + token * (k_stride_units * UNIT) + element, mask=element < num_key_elements)
    _store_keys(k_cache, key, element, element < num_key_elements, slot, num_key_elements, block_size)
    _copy_values(
        v + token * (v_stride_units * UNIT), v_cache, element, slot, num_kv_heads, block_size, value_units, UNIT
    )


@triton.jit(do_not_specialize=VARYING)
def _rotate_and_store_kernel(
    q,
    k,
    v,
    cos_sin,
    positions,
    k_cache,
    v_cache,
    slot_mapping,
    num_heads,
    num_kv_heads,
    block_size,
    head_units,
    value_units,
    half_units,
    q_stride_units,
    k_stride_units,
    v_stride_units,
    UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Do one part of one token: rotate queries, rotate and store keys, or copy. Grid: (T, parts in this order)."""
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    q_parts = tl.cdiv(num_heads * (half_units * UNIT), BLOCK)
    k_parts = tl.cdiv(num_kv_heads * (half_units * UNIT), BLOCK)
    slot = tl.load(slot_mapping + token)
    if (part >= q_parts) & (slot < 0):
        return
    head_size = head_units * UNIT
    half = half_units * UNIT
    table_row = cos_sin + tl.load(positions + token) * (2 * half)
    q_token = q + token * (q_stride_units * UNIT)
    k_token = k + token * (k_stride_units * UNIT)
    lane = tl.arange(0, BLOCK)
    if part < q_parts:
        pair = part * BLOCK + lane
        first, left, right = _rotated(q_token, table_row, pair, num_heads, head_size, half)
        tl.store(q_token + first, left, mask=pair < num_heads * half)
        tl.store(q_token + first + half, right, mask=pair < num_heads * half)
    elif part < q_parts + k_parts:
        pair = (part - q_parts) * BLOCK + lane
        first, left, right = _rotated(k_token, table_row, pair, num_kv_heads, head_size, half)
        is_pair = pair < num_kv_heads * half
        _store_keys(k_cache, left, first, is_pair, slot, num_kv_heads * head_size, block_size)
        _store_keys(k_cache, right, first + half, is_pair, slot, num_kv_heads * head_size, block_size)
    else:
        element = (part - q_parts - k_parts) * BLOCK + lane
        rest = head_size - 2 * half
        if rest > 0:
            is_rest = element < num_kv_heads * rest
            unrotated = element // rest * head_size + 2 * half + element % rest
            key = tl.load(k_token + unrotated, mask=is_rest)
            _store_keys(k_cache, key, unrotated, is_rest, slot, num_kv_heads * head_size, block_size)
        v_token = v + token * (v_stride_units * UNIT)
        _copy_values(v_token, v_cache, element, slot, num_kv_heads, block_size, value_units, UNIT)


@triton.jit
def _rotated(x_token, table_row, pair, num_heads, head_size, half):
    """Return where the first of each pair of components is, and both after the rotation, in the dtype of x."""
    first = pair // half * head_size + pair % half
    is_pair = pair < num_heads * half
    left = tl.load(x_token + first, mask=is_pair, other=0.0).to(tl.float32)
    right = tl.load(x_token + first + half, mask=is_pair, other=0.0).to(tl.float32)
    cos = tl.load(table_row + pair % half)
    sin = tl.load(table_row + half + pair % half)
    dtype = x_token.dtype.element_ty
    return first, (left * cos - right * sin).to(dtype), (right * cos + left * sin).to(dtype)


@triton.jit
def _store_keys(k_cache, key, element, is_element, slot, num_elements, block_size):
    start = slot // block_size * num_elements * block_size + slot % block_size
    tl.store(k_cache + start + element * block_size, key.to(k_cache.dtype.element_ty), mask=is_element)


@triton.jit
def _copy_values(v_token, v_cache, element, slot, num_kv_heads, block_size, value_units, UNIT: tl.constexpr):
    value_size = value_units * UNIT
    is_element = element < num_kv_heads * value_size
    value = tl.load(v_token + element, mask=is_element)
    start = slot // block_size * num_kv_heads * (block_size * value_size) + slot % block_size * value_size
    target = element // value_size * (block_size * value_size) + element % value_size
    tl.store(v_cache + start + target, value.to(v_cache.dtype.element_ty), mask=is_element)
