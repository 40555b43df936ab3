"""The kernels for the CPU: Numba for attention, small operations and quantized products, oneDNN for the others.

The functions take the arguments of `kernels.backend`, in float32 or bfloat16, check them, and hand addresses to the
compiled kernels. The result for a token has the same bits whatever else is in the batch, however its prompt was cut
into chunks, and for any block size, block table and number of threads.
"""

from octavo.kernels.cpu import jit as jit  # before torch

# isort: split
from collections.abc import Iterable

import numba
import numpy as np
import torch
from torch import Tensor

from octavo.kernels.backend import MASKED_LOGIT, Compilation, PackedLinear
from octavo.kernels.cpu import attention, edits, masks, pointwise, sampling
from octavo.kernels.cpu.checks import (
    address_of_heads,
    addresses,
    contiguous,
    dense_heads,
    has_dense_heads,
    like,
    require_contiguous,
    require_inside,
    require_shape,
)
from octavo.kernels.cpu.operations import OPERATIONS
from octavo.kernels.cpu.panel_linear import PanelLinear
from octavo.kernels.cpu.products import embedding, linear, pack_linear
from octavo.kernels.cpu.program import NO_WINDOW, Program
from octavo.kernels.reference import uniform

__all__ = [
    "OPERATIONS",
    "PanelLinear",
    "Program",
    "add_rms_norm",
    "allow_tokens",
    "can_be_recorded",
    "compilation_for",
    "draw",
    "edit_logits",
    "embedding",
    "kv_dtypes",
    "largest",
    "linear",
    "pack_linear",
    "paged_attention",
    "program_of",
    "rank",
    "rms_norm",
    "rotate_and_store_kv",
    "scale_to_probs",
    "set_num_threads",
    "silu_and_mul",
    "store_kv",
    "top_k",
    "uniform",
]

LEAST_PARALLEL_ELEMENTS = 2**16  # below, a second thread costs more than it brings


def set_num_threads(num_threads: int) -> None:
    """Let kernels and products use `num_threads` threads. Raises ValueError for more threads than CPUs."""
    if not 1 <= num_threads <= numba.config.NUMBA_NUM_THREADS:
        raise ValueError(
            f"num_threads is {num_threads}, this process may use 1 to {numba.config.NUMBA_NUM_THREADS} CPUs: set"
            " --num-threads to one of these, or leave it out"
        )
    numba.set_num_threads(num_threads)
    torch.set_num_threads(num_threads)


def kv_dtypes(dtype: torch.dtype) -> tuple[torch.dtype, ...]:
    return (dtype,)


def can_be_recorded() -> bool:
    return False


def program_of(products: Iterable[PackedLinear]) -> type[Program] | None:
    """See `kernels.backend`: a Program multiplies with panels only."""
    return Program if all(isinstance(packed, PanelLinear) for packed in products) else None


def compilation_for(dtype: torch.dtype, products: Iterable[PackedLinear], has_program: bool) -> Compilation:
    from octavo.kernels.cpu.warm_up import compiling_calls  # which calls the functions of this module

    has_panels = any(isinstance(packed, PanelLinear) for packed in products)
    directories = (jit.cache_directory(), jit.shipped_directory())
    is_first = not any(any(directory.rglob("*.nbc")) for directory in directories if directory)
    return Compilation(list(compiling_calls(dtype, has_panels, has_program)), is_first)


def store_kv(k_TKD: Tensor, v_TKD: Tensor, k_cache_NKDP: Tensor, v_cache_NKPD: Tensor, slot_mapping_T: Tensor) -> None:
    num_tokens, num_kv_heads, head_size = k_TKD.shape
    value_size = v_TKD.shape[2]
    num_blocks, _, _, block_size = k_cache_NKDP.shape
    require_shape("v", v_TKD, (num_tokens, num_kv_heads, value_size))
    require_shape("k_cache", k_cache_NKDP, (num_blocks, num_kv_heads, head_size, block_size))
    require_shape("v_cache", v_cache_NKPD, (num_blocks, num_kv_heads, block_size, value_size))
    require_shape("slot_mapping", slot_mapping_T, (num_tokens,))
    kind = like(k_TKD, v_TKD, k_cache_NKDP, v_cache_NKPD)
    require_contiguous(k_cache_NKDP, v_cache_NKPD)
    k_TKD, v_TKD, slot_mapping_T = dense_heads(k_TKD), dense_heads(v_TKD), contiguous(slot_mapping_T, torch.int64)
    require_inside("slot", slot_mapping_T, -(2**63), num_blocks * block_size)
    memory = addresses(k_TKD, v_TKD, k_cache_NKDP, v_cache_NKPD, slot_mapping_T)
    sizes = (num_kv_heads, head_size, value_size, block_size, k_TKD.stride(0), v_TKD.stride(0))
    if k_TKD.numel() < LEAST_PARALLEL_ELEMENTS:
        pointwise.store_kv(kind, memory, sizes, 0, num_tokens)
    else:
        pointwise.store_kv_parallel(kind, memory, sizes, num_tokens, torch.get_num_threads())


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
    num_tokens, num_heads, head_size = q_THD.shape
    num_blocks, num_kv_heads, _, block_size = k_cache_NKDP.shape
    value_size = v_cache_NKPD.shape[3]
    num_seqs, max_blocks = block_tables_SM.shape
    require_shape("k_cache", k_cache_NKDP, (num_blocks, num_kv_heads, head_size, block_size))
    require_shape("v_cache", v_cache_NKPD, (num_blocks, num_kv_heads, block_size, value_size))
    require_shape("cu_seqlens_q", cu_seqlens_q, (num_seqs + 1,))
    require_shape("seq_lens", seq_lens_S, (num_seqs,))
    if num_heads % num_kv_heads != 0:
        raise ValueError(f"{num_heads} query heads do not share {num_kv_heads} key/value heads evenly")
    if sliding_window is not None and sliding_window < 1:
        raise ValueError(f"sliding_window is {sliding_window}, at least 1 is needed")
    if soft_cap is not None and not soft_cap > 0:
        raise ValueError(f"soft_cap is {soft_cap}, more than 0 is needed")
    kind = like(q_THD, k_cache_NKDP, v_cache_NKPD)
    require_contiguous(k_cache_NKDP, v_cache_NKPD)
    q_THD = dense_heads(q_THD)
    block_tables_SM = contiguous(block_tables_SM, torch.int32)
    cu_seqlens_q, seq_lens_S = contiguous(cu_seqlens_q, torch.int32), contiguous(seq_lens_S, torch.int32)
    out_THD = q_THD.new_empty((num_tokens, num_heads, value_size))
    malformed = attention.paged_attention(
        kind,
        (
            *addresses(out_THD, q_THD, k_cache_NKDP, v_cache_NKPD, block_tables_SM, cu_seqlens_q, seq_lens_S),
            *(
                address_of_heads("sinks", sinks_H, num_heads),
                address_of_heads("alibi_slopes", alibi_slopes_H, num_heads),
            ),
        ),
        (
            *(num_tokens, num_seqs, num_blocks, max_blocks, block_size, num_heads, num_kv_heads),
            *(head_size, value_size, q_THD.stride(0), sliding_window or NO_WINDOW),
        ),
        float(scale),
        float(soft_cap or 0.0),
        torch.get_num_threads(),
    )
    if malformed >= 0:
        raise IndexError(f"the lengths or the block table of sequence {malformed} point outside")
    return out_THD


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
    rotary_embedding(q_THD, k_TKD, cos_sin_PR, positions_T)
    store_kv(k_TKD, v_TKD, k_cache_NKDP, v_cache_NKPD, slot_mapping_T)


def rms_norm(x_TE: Tensor, weight_E: Tensor, eps: float) -> Tensor:
    size = x_TE.shape[-1]
    require_shape("weight", weight_E, (size,))
    kind = like(x_TE, weight_E)
    require_contiguous(weight_E)
    if x_TE.is_contiguous():
        rows_per_token, token_stride = 1, size
    elif x_TE.ndim == 3:
        x_TE = dense_heads(x_TE)
        rows_per_token, token_stride = x_TE.shape[1], x_TE.stride(0)
    else:
        x_TE = x_TE.contiguous()
        rows_per_token, token_stride = 1, size
    out_TE = x_TE.new_empty(x_TE.shape)
    num_rows = x_TE.numel() // size
    memory, sizes = addresses(out_TE, x_TE, weight_E), (rows_per_token, token_stride, size)
    if x_TE.numel() < LEAST_PARALLEL_ELEMENTS:
        pointwise.rms_norm(kind, memory, sizes, float(eps), 0, num_rows)
    else:
        pointwise.rms_norm_parallel(kind, memory, sizes, float(eps), num_rows, torch.get_num_threads())
    return out_TE


def add_rms_norm(x_TE: Tensor, residual_TE: Tensor, weight_E: Tensor, eps: float) -> Tensor:
    num_rows, size = x_TE.shape
    require_shape("residual", residual_TE, (num_rows, size))
    require_shape("weight", weight_E, (size,))
    kind = like(x_TE, weight_E)
    if residual_TE.dtype != torch.float32:
        raise ValueError(f"the residual is {residual_TE.dtype}, float32 is needed")
    require_contiguous(residual_TE, weight_E)
    x_TE = x_TE.contiguous()
    out_TE = torch.empty_like(x_TE)
    memory = addresses(out_TE, x_TE, residual_TE, weight_E)
    if x_TE.numel() < LEAST_PARALLEL_ELEMENTS:
        pointwise.add_rms_norm(kind, memory, size, float(eps), 0, num_rows)
    else:
        pointwise.add_rms_norm_parallel(kind, memory, size, float(eps), num_rows, torch.get_num_threads())
    return out_TE


def rotary_embedding(q_THD: Tensor, k_TKD: Tensor, cos_sin_PR: Tensor, positions_T: Tensor) -> None:
    num_tokens, num_heads, head_size = q_THD.shape
    num_kv_heads = k_TKD.shape[1]
    num_positions, rotary_size = cos_sin_PR.shape
    require_shape("k", k_TKD, (num_tokens, num_kv_heads, head_size))
    require_shape("positions", positions_T, (num_tokens,))
    if rotary_size > head_size or rotary_size % 2 != 0 or cos_sin_PR.dtype != torch.float32:
        raise ValueError(f"cos_sin has {rotary_size} columns of {cos_sin_PR.dtype} for heads of {head_size}")
    kind = like(q_THD, k_TKD)
    require_contiguous(cos_sin_PR)
    if not (has_dense_heads(q_THD) and has_dense_heads(k_TKD)):
        raise ValueError("the heads of a token do not lie side by side in q or k")
    positions_T = contiguous(positions_T, torch.int64)
    require_inside("position", positions_T, 0, num_positions)
    memory = addresses(q_THD, k_TKD, cos_sin_PR, positions_T)
    sizes = (num_heads, num_kv_heads, head_size, rotary_size, q_THD.stride(0), k_TKD.stride(0))
    if q_THD.numel() < LEAST_PARALLEL_ELEMENTS:
        pointwise.rotary_embedding(kind, memory, sizes, 0, num_tokens)
    else:
        pointwise.rotary_embedding_parallel(kind, memory, sizes, num_tokens, torch.get_num_threads())


def silu_and_mul(gate_up_T2I: Tensor) -> Tensor:
    num_rows, double_size = gate_up_T2I.shape
    if double_size % 2 != 0:
        raise ValueError(f"gate and up have {double_size} columns together, an even number is needed")
    gate_up_T2I = gate_up_T2I.contiguous()
    size = double_size // 2
    out_TI = gate_up_T2I.new_empty((num_rows, size))
    kind, memory = like(gate_up_T2I), addresses(out_TI, gate_up_T2I)
    if gate_up_T2I.numel() < LEAST_PARALLEL_ELEMENTS:
        pointwise.silu_and_mul(kind, memory, size, 0, num_rows)
    else:
        pointwise.silu_and_mul_parallel(kind, memory, size, num_rows, torch.get_num_threads())
    return out_TI


def edit_logits(
    logits_SV: Tensor, row_R: Tensor, bounds_R4: Tensor, penalties_R3: Tensor, token_id_N: Tensor, value_N: Tensor
) -> None:
    num_rows, num_entries = len(row_R), len(value_N)
    for name, tensor, shape, dtype in (
        ("logits", logits_SV, logits_SV.shape, torch.float32),
        ("row", row_R, (num_rows,), torch.int64),
        ("bounds", bounds_R4, (num_rows, 4), torch.int64),
        ("penalties", penalties_R3, (num_rows, 3), torch.float32),
        ("token_id", token_id_N, (num_entries,), torch.int32),
        ("value", value_N, (num_entries,), torch.float32),
    ):
        require_shape(name, tensor, shape)
        if tensor.dtype is not dtype:
            raise ValueError(f"{name} is {tensor.dtype}, {dtype} is needed")
    require_inside("row", row_R.contiguous(), 0, len(logits_SV))
    require_inside("bound", bounds_R4.contiguous().view(-1), 0, num_entries + 1)
    edit = edits.edit_logits if num_rows == 1 or num_entries < LEAST_PARALLEL_ELEMENTS else edits.edit_logits_parallel
    given = (tensor.contiguous().numpy() for tensor in (row_R, bounds_R4, penalties_R3, token_id_N, value_N))
    edit(logits_SV.numpy(), *given, np.float32(MASKED_LOGIT))


def allow_tokens(logits_SV: Tensor, row_R: Tensor, allowed_RW: Tensor) -> None:
    num_rows, vocab_size = len(row_R), logits_SV.shape[1]
    for name, tensor, shape, dtype in (
        ("logits", logits_SV, logits_SV.shape, torch.float32),
        ("row", row_R, (num_rows,), torch.int64),
        ("allowed", allowed_RW, (num_rows, -(-vocab_size // 32)), torch.int32),
    ):
        require_shape(name, tensor, shape)
        if tensor.dtype is not dtype:
            raise ValueError(f"{name} is {tensor.dtype}, {dtype} is needed")
    require_inside("row", row_R.contiguous(), 0, len(logits_SV))
    is_small = num_rows == 1 or num_rows * vocab_size < LEAST_PARALLEL_ELEMENTS
    allow = masks.allow_tokens if is_small else masks.allow_tokens_parallel
    allow(logits_SV.numpy(), row_R.contiguous().numpy(), allowed_RW.contiguous().numpy(), np.float32(MASKED_LOGIT))


def scale_to_probs(logits_RV: Tensor, temperature_R: Tensor) -> Tensor:
    if logits_RV.dtype != torch.float32:
        raise ValueError(f"logits are {logits_RV.dtype}, float32 is needed")
    require_shape("temperature", temperature_R, (len(logits_RV),))
    probs_RV = logits_RV.contiguous()
    probs = probs_RV.numpy()
    scale = sampling.softmax if _is_small(probs) else sampling.softmax_parallel
    scale(probs, temperature_R.double().contiguous().numpy())
    return probs_RV


def largest(logits_RV: Tensor) -> tuple[Tensor, Tensor]:
    if logits_RV.dtype != torch.float32:
        raise ValueError(f"logits are {logits_RV.dtype}, float32 is needed")
    logits = logits_RV.contiguous().numpy()
    values_R, token_ids_R = np.empty(len(logits), np.float32), np.empty(len(logits), np.int64)
    find = sampling.largest if _is_small(logits) else sampling.largest_parallel
    find(logits, values_R, token_ids_R)
    return torch.from_numpy(values_R), torch.from_numpy(token_ids_R)


def rank(scores_RV: Tensor, token_ids_R: Tensor) -> Tensor:
    scores, chosen_R = scores_RV.contiguous().numpy(), scores_RV.gather(1, token_ids_R[:, None])[:, 0]
    ranks_R = np.empty(len(scores), np.int32)
    count = sampling.rank if _is_small(scores) else sampling.rank_parallel
    count(scores, chosen_R.numpy(), ranks_R)
    return torch.from_numpy(ranks_R)


def top_k(scores_RV: Tensor, k: int) -> tuple[Tensor, Tensor]:
    scores = scores_RV.contiguous().numpy()
    shape = len(scores), min(k, scores.shape[1])
    values_RK, token_ids_RK = np.empty(shape, np.float32), np.empty(shape, np.int64)
    find = sampling.top_k if _is_small(scores) else sampling.top_k_parallel
    find(scores, values_RK, token_ids_RK)
    return torch.from_numpy(values_RK), torch.from_numpy(token_ids_RK)


def draw(probs_RV: Tensor, top_k_R: Tensor, top_p_R: Tensor, min_p_R: Tensor, uniform_R: Tensor) -> Tensor:
    num_rows = len(probs_RV)
    if probs_RV.dtype != torch.float32:
        raise ValueError(f"probabilities are {probs_RV.dtype}, float32 is needed")
    for name, values_R, dtype in (
        ("top_k", top_k_R, torch.int64),
        ("top_p", top_p_R, torch.float64),
        ("min_p", min_p_R, torch.float64),
        ("uniform", uniform_R, torch.float64),
    ):
        require_shape(name, values_R, (num_rows,))
        if values_R.dtype is not dtype:
            raise ValueError(f"{name} is {values_R.dtype}, {dtype} is needed")
    token_ids_R = torch.empty(num_rows, dtype=torch.int64)
    probs = probs_RV.contiguous().numpy()
    limits = [values_R.contiguous().numpy() for values_R in (top_k_R, top_p_R, min_p_R, uniform_R)]
    choose = sampling.draw if _is_small(probs) else sampling.draw_parallel
    choose(probs.view(np.uint32), probs, *limits, token_ids_R.numpy())
    return token_ids_R


def _is_small(rows_RV: np.ndarray) -> bool:
    """Return whether one thread is as quick as several, which share whole rows."""
    return len(rows_RV) == 1 or rows_RV.size < LEAST_PARALLEL_ELEMENTS
