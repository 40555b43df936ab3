"""The functions of `kernels` in plain torch: slow, obvious, and what the tests compare with.

Signatures, shapes and legend are those of `kernels`. All arithmetic is in float32.
"""

import torch
from torch import Tensor
from torch.nn import functional


def store_kv(k_TKD: Tensor, v_TKD: Tensor, k_cache_NKDP: Tensor, v_cache_NKPD: Tensor, slot_mapping_T: Tensor) -> None:
    block_size = v_cache_NKPD.shape[2]
    for token, slot in enumerate(slot_mapping_T.tolist()):
        if slot >= 0:
            block, offset = divmod(slot, block_size)
            k_cache_NKDP[block, :, :, offset] = k_TKD[token]
            v_cache_NKPD[block, :, offset] = v_TKD[token]


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
    block_size = v_cache_NKPD.shape[2]
    out_THD = q_THD.new_empty((*q_THD.shape[:2], v_cache_NKPD.shape[3]))
    starts = cu_seqlens_q.tolist()
    for seq, seq_len in enumerate(seq_lens_S.tolist()):
        tokens = slice(starts[seq], starts[seq + 1])
        blocks = block_tables_SM[seq, : -(-seq_len // block_size)].long()
        k_KCD = k_cache_NKDP[blocks].permute(1, 0, 3, 2).flatten(1, 2)[:, :seq_len].float()
        v_KCD = v_cache_NKPD[blocks].permute(1, 0, 2, 3).flatten(1, 2)[:, :seq_len].float()
        q_HQD = q_THD[tokens].transpose(0, 1).float()
        visible_QC = _visible(q_HQD.shape[1], seq_len, sliding_window)
        out_HQD = functional.scaled_dot_product_attention(q_HQD, k_KCD, v_KCD, visible_QC, scale=scale, enable_gqa=True)
        out_THD[tokens] = out_HQD.transpose(0, 1).to(q_THD.dtype)
    return out_THD


def rms_norm(x_TE: Tensor, weight_E: Tensor, eps: float) -> Tensor:
    x_float = x_TE.float()
    factor = torch.rsqrt(x_float.square().mean(-1, keepdim=True) + eps)
    return (x_float * factor * weight_E.float()).to(x_TE.dtype)


def add_rms_norm(x_TE: Tensor, residual_TE: Tensor, weight_E: Tensor, eps: float) -> Tensor:
    residual_TE += x_TE
    return rms_norm(residual_TE, weight_E, eps).to(x_TE.dtype)


def rotary_embedding(q_THD: Tensor, k_TKD: Tensor, cos_sin_PR: Tensor, positions_T: Tensor) -> None:
    cos_T1R, sin_T1R = cos_sin_PR[positions_T].unsqueeze(1).chunk(2, dim=-1)
    half = cos_T1R.shape[-1]
    for x_THD in (q_THD, k_TKD):
        left, right = x_THD[..., :half].float(), x_THD[..., half : 2 * half].float()
        rotated = torch.cat([left * cos_T1R - right * sin_T1R, right * cos_T1R + left * sin_T1R], dim=-1)
        x_THD[..., : 2 * half] = rotated


def silu_and_mul(gate_up_T2I: Tensor) -> Tensor:
    gate_TI, up_TI = gate_up_T2I.float().chunk(2, dim=-1)
    return (functional.silu(gate_TI) * up_TI).to(gate_up_T2I.dtype)


def draw(probs_RV: Tensor, top_k_R: Tensor, top_p_R: Tensor, min_p_R: Tensor, uniform_R: Tensor) -> Tensor:
    sorted_RV, ids_RV = probs_RV.double().sort(dim=-1, descending=True, stable=True)
    ranks_V = torch.arange(probs_RV.shape[1])
    sorted_RV = torch.where((top_k_R[:, None] == 0) | (ranks_V < top_k_R[:, None]), sorted_RV, 0)
    before_RV = sorted_RV.cumsum(-1) - sorted_RV
    kept_RV = (top_p_R[:, None] >= 1) | (before_RV < top_p_R[:, None] * sorted_RV.sum(-1, keepdim=True))
    kept_RV &= sorted_RV >= min_p_R[:, None] * sorted_RV[:, :1]
    weights_RV = torch.zeros_like(sorted_RV).scatter(1, ids_RV, torch.where(kept_RV, sorted_RV, 0))
    mass_RV = weights_RV.cumsum(-1)
    passed_RV = (mass_RV > uniform_R[:, None] * mass_RV[:, -1:]) & (weights_RV > 0)
    return passed_RV.to(torch.int8).argmax(-1)


def linear(
    x_TE: Tensor, weight_NE: Tensor, bias_N: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> Tensor:
    bias_float = None if bias_N is None else bias_N.float()
    return functional.linear(x_TE.float(), weight_NE.float(), bias_float).to(out_dtype or x_TE.dtype)


def _visible(num_queries: int, seq_len: int, sliding_window: int | None) -> Tensor:
    """Return which of the seq_len positions each of the last num_queries ones sees, as bool."""
    position_Q1 = torch.arange(seq_len - num_queries, seq_len).unsqueeze(1)
    visible_QC = torch.arange(seq_len) <= position_Q1
    if sliding_window is not None:
        visible_QC &= torch.arange(seq_len) > position_Q1 - sliding_window
    return visible_QC
