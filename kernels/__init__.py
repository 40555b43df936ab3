# A backend is a module.
# mypy: no-warn-return-any
"""Functions on tensors: attention over a paged KV cache, its companions, and linear layers.

Import this package before torch (see `kernels.cpu.jit`). Each function runs where its first tensor is; today that is
the CPU. `kernels.reference` has the same functions in plain torch, slow and obvious.

Legend of the shapes
    T tokens of this step, packed without padding; S sequences; H query heads; K key/value heads;
    D head size (that of V may differ from that of K); N blocks; P tokens a block; M blocks a sequence, at most;
    E hidden size; I intermediate size; R rotary components, or rows; V vocabulary

The cache, for each layer
    k_cache_NKDP  keys; within a block and head the P tokens of one component lie side by side
    v_cache_NKPD  values; within a block and head the D components of one token lie side by side
A token's slot is block * P + its offset in the block. Both caches are contiguous, in the dtype of q, k and v: float32
or bfloat16 on the CPU. What a cache holds in slots that nobody reads is never looked at.

Promise, on the CPU: what comes out for a token has the same bits whatever else is in the batch, however its prompt was
cut into chunks, for any block size, block table and number of threads.
"""

from types import ModuleType

from kernels import cpu  # before torch

# isort: split
import torch
from torch import Tensor

from kernels.cpu.products import PackedLinear

__all__ = [
    "PackedLinear",
    "add_rms_norm",
    "draw",
    "linear",
    "pack_linear",
    "paged_attention",
    "rms_norm",
    "rotary_embedding",
    "silu_and_mul",
    "store_kv",
]


def store_kv(k_TKD: Tensor, v_TKD: Tensor, k_cache_NKDP: Tensor, v_cache_NKPD: Tensor, slot_mapping_T: Tensor) -> None:
    """Write this step's keys and values into the caches, in place.

    slot_mapping_T (int64) says where each token goes; a negative slot is skipped. Raises ValueError on shapes or
    dtypes that do not fit, IndexError on a slot beyond the cache (nothing is written then).
    """
    _backend(k_TKD).store_kv(k_TKD, v_TKD, k_cache_NKDP, v_cache_NKPD, slot_mapping_T)


def paged_attention(
    q_THD: Tensor,
    k_cache_NKDP: Tensor,
    v_cache_NKPD: Tensor,
    block_tables_SM: Tensor,
    cu_seqlens_q: Tensor,
    seq_lens_S: Tensor,
    scale: float,
    sliding_window: int | None = None,
) -> Tensor:
    """Return out_THD (D of the values, q's dtype): causal attention of packed queries over the paged cache.

    The queries of sequence s are the tokens cu_seqlens_q[s] to cu_seqlens_q[s + 1] (int32, S + 1), the last of its
    seq_lens_S[s] tokens (int32), whose keys and values are already stored in the blocks block_tables_SM[s] (int32).
    Query i of n stands at position seq_len - n + i and sees itself and what is before it; with a sliding window of w,
    the last w positions, itself included. H is a multiple of K: head h uses key/value head h // (H / K).
    Raises ValueError on shapes or dtypes that do not fit, IndexError if lengths or tables point outside.
    """
    return _backend(q_THD).paged_attention(
        q_THD, k_cache_NKDP, v_cache_NKPD, block_tables_SM, cu_seqlens_q, seq_lens_S, scale, sliding_window
    )


def rms_norm(x_TE: Tensor, weight_E: Tensor, eps: float) -> Tensor:
    """Return x / sqrt(mean(x**2) + eps) * weight over the last dimension, for any leading ones.

    Computed in float32, rounded once to the dtype of x, which weight_E shares. Also norms q or k by head (x_THD).
    """
    return _backend(x_TE).rms_norm(x_TE, weight_E, eps)


def add_rms_norm(x_TE: Tensor, residual_TE: Tensor, weight_E: Tensor, eps: float) -> Tensor:
    """Add x to the residual (float32) in place; return rms_norm(residual) in the dtype of x, which weight_E shares."""
    return _backend(x_TE).add_rms_norm(x_TE, residual_TE, weight_E, eps)


def rotary_embedding(q_THD: Tensor, k_TKD: Tensor, cos_sin_PR: Tensor, positions_T: Tensor) -> None:
    """Rotate queries and keys in place by their positions (int64), in float32.

    cos_sin_PR (float32) has a row for each position: R / 2 cosines, then R / 2 sines. Component i of the first R is
    paired with i + R / 2 (as in GPT-NeoX and Llama); components from R on stay. q and k may be slices of one tensor, as
    long as the heads of a token lie side by side. Raises IndexError on a position that the table lacks.
    """
    _backend(q_THD).rotary_embedding(q_THD, k_TKD, cos_sin_PR, positions_T)


def silu_and_mul(gate_up_T2I: Tensor) -> Tensor:
    """Return silu(gate) * up as out_TI, where gate is the first half of the last dimension and up the second."""
    return _backend(gate_up_T2I).silu_and_mul(gate_up_T2I)


def draw(probs_RV: Tensor, top_k_R: Tensor, top_p_R: Tensor, min_p_R: Tensor, uniform_R: Tensor) -> Tensor:
    """Return a token of each row (int64), drawn by inverse CDF in the order of token ids.

    probs_RV (float32) need not add up to 1. Kept are the top_k likeliest tokens (int64; 0: all); of these the likeliest
    of which those before have less than top_p of the mass; of these the ones with at least min_p times the largest
    probability. Among equals the lower token id counts as the likelier. uniform_R lies in [0, 1); it, top_p_R and
    min_p_R are float64. A token of probability 0 is never drawn. Raises ValueError on other shapes or dtypes.
    """
    return _backend(probs_RV).draw(probs_RV, top_k_R, top_p_R, min_p_R, uniform_R)


def pack_linear(weight_NE: Tensor, bias_N: Tensor | None = None) -> PackedLinear:
    """Return a linear layer of N outputs in the form that its products take on this machine; `form` names it.

    The weight (float32 or bfloat16) is copied: drop it to free its memory. A row's product has the same bits among any
    number of rows: that is tried out, once for each shape. Raises RuntimeError where this machine cannot keep to it.
    """
    return _backend(weight_NE).pack_linear(weight_NE, bias_N)


def linear(x_TE: Tensor, layer: PackedLinear, out_dtype: torch.dtype | None = None) -> Tensor:
    """Return x @ weight.T + bias as out_TN, in `out_dtype` or else the dtype of the weight, which x shares.

    With a bfloat16 weight, out_dtype float32 gives the accumulated sums unrounded where the product is computed in
    float32; a machine with bfloat16 instructions has rounded them (see `PackedLinear.form`).
    """
    return _backend(x_TE).linear(x_TE, layer, out_dtype)


def _backend(tensor: Tensor) -> ModuleType:
    """Return the package of kernels for the device that holds `tensor`."""
    if tensor.is_cpu:
        return cpu
    raise NotImplementedError(f"there are no kernels for device {tensor.device}")
