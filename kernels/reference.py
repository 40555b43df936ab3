"""The backend in plain torch: slow, obvious, on any device, and what the tests compare with.

Signatures, shapes and legend are those of `kernels.backend`. All arithmetic is in float32, also that of products.
"""

from collections.abc import Iterable
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from octavo.kernels import philox
from octavo.kernels.backend import MASKED_LOGIT, Compilation, PackedLinear
from octavo.kernels.groupwise import GroupwiseWeight


def kv_dtypes(dtype: torch.dtype) -> tuple[torch.dtype, ...]:
    return (dtype, torch.float8_e4m3fn)


def can_be_recorded() -> bool:
    return False


def program_of(products: Iterable[PackedLinear]) -> None:
    return None


def compilation_for(dtype: torch.dtype, products: Iterable[PackedLinear], has_program: bool) -> Compilation:
    """See `kernels.backend`: nothing is compiled, or not before it is used."""
    return Compilation([], is_first=False)


def store_kv(k_TKD: Tensor, v_TKD: Tensor, k_cache_NKDP: Tensor, v_cache_NKPD: Tensor, slot_mapping_T: Tensor) -> None:
    block_size = v_cache_NKPD.shape[2]
    for token, slot in enumerate(slot_mapping_T.tolist()):
        if slot >= 0:
            block, offset = divmod(slot, block_size)
            k_cache_NKDP[block, :, :, offset] = _saturate(k_TKD[token], k_cache_NKDP.dtype)
            v_cache_NKPD[block, :, offset] = _saturate(v_TKD[token], v_cache_NKPD.dtype)


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


def rotary_embedding(q_THD: Tensor, k_TKD: Tensor, cos_sin_PR: Tensor, positions_T: Tensor) -> None:
    """Rotate queries and keys in place, as `rotate_and_store_kv` does."""
    cos_T1R, sin_T1R = cos_sin_PR[positions_T].unsqueeze(1).chunk(2, dim=-1)
    half = cos_T1R.shape[-1]
    for x_THD in (q_THD, k_TKD):
        left, right = x_THD[..., :half].float(), x_THD[..., half : 2 * half].float()
        rotated = torch.cat([left * cos_T1R - right * sin_T1R, right * cos_T1R + left * sin_T1R], dim=-1)
        x_THD[..., : 2 * half] = rotated


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
    block_size = v_cache_NKPD.shape[2]
    out_THD = q_THD.new_empty((*q_THD.shape[:2], v_cache_NKPD.shape[3]))
    starts = cu_seqlens_q.tolist()
    for seq, seq_len in enumerate(seq_lens_S.tolist()):
        tokens = slice(starts[seq], starts[seq + 1])
        blocks = block_tables_SM[seq, : -(-seq_len // block_size)].long()
        k_KCD = k_cache_NKDP[blocks].permute(1, 0, 3, 2).flatten(1, 2)[:, :seq_len].float()
        v_KCD = v_cache_NKPD[blocks].permute(1, 0, 2, 3).flatten(1, 2)[:, :seq_len].float()
        q_HQD = q_THD[tokens].transpose(0, 1).float()
        group_size = q_HQD.shape[0] // k_KCD.shape[0]
        scores_HQC = q_HQD @ k_KCD.repeat_interleave(group_size, 0).transpose(1, 2) * scale
        if soft_cap is not None:
            scores_HQC = soft_cap * torch.tanh(scores_HQC / soft_cap)
        distance_QC = _distances(q_HQD.shape[1], seq_len, q_THD.device)
        if alibi_slopes_H is not None:
            scores_HQC = scores_HQC - alibi_slopes_H[:, None, None] * distance_QC
        is_visible_QC = (distance_QC >= 0) & (distance_QC < (sliding_window or seq_len))
        weights_HQC = _softmax(scores_HQC.masked_fill(~is_visible_QC, -torch.inf), sinks_H)
        out_HQD = weights_HQC @ v_KCD.repeat_interleave(group_size, 0)
        out_THD[tokens] = out_HQD.transpose(0, 1).to(q_THD.dtype)
    return out_THD


def rms_norm(x_TE: Tensor, weight_E: Tensor, eps: float) -> Tensor:
    x_float = x_TE.float()
    factor = torch.rsqrt(x_float.square().mean(-1, keepdim=True) + eps)
    return (x_float * factor * weight_E.float()).to(x_TE.dtype)


def add_rms_norm(x_TE: Tensor, residual_TE: Tensor, weight_E: Tensor, eps: float) -> Tensor:
    residual_TE += x_TE
    return rms_norm(residual_TE, weight_E, eps).to(x_TE.dtype)


def silu_and_mul(gate_up_T2I: Tensor) -> Tensor:
    gate_TI, up_TI = gate_up_T2I.float().chunk(2, dim=-1)
    return (functional.silu(gate_TI) * up_TI).to(gate_up_T2I.dtype)


def draw(probs_RV: Tensor, top_k_R: Tensor, top_p_R: Tensor, min_p_R: Tensor, uniform_R: Tensor) -> Tensor:
    sorted_RV, ids_RV = probs_RV.double().sort(dim=-1, descending=True, stable=True)
    ranks_V = torch.arange(probs_RV.shape[1], device=probs_RV.device)
    is_likely_RV = sorted_RV >= min_p_R[:, None] * sorted_RV[:, :1]
    is_likely_RV &= (top_k_R[:, None] == 0) | (ranks_V < top_k_R[:, None])
    sorted_RV = torch.where(is_likely_RV, sorted_RV, 0)
    before_RV = sorted_RV.cumsum(-1) - sorted_RV
    kept_RV = (top_p_R[:, None] >= 1) | (before_RV < top_p_R[:, None] * sorted_RV.sum(-1, keepdim=True))
    weights_RV = torch.zeros_like(sorted_RV).scatter(1, ids_RV, torch.where(kept_RV, sorted_RV, 0))
    mass_RV = weights_RV.cumsum(-1)
    passed_RV = (mass_RV > uniform_R[:, None] * mass_RV[:, -1:]) & (weights_RV > 0)
    return passed_RV.to(torch.int8).argmax(-1)


def edit_logits(
    logits_SV: Tensor, row_R: Tensor, bounds_R4: Tensor, penalties_R3: Tensor, token_id_N: Tensor, value_N: Tensor
) -> None:
    for row, bounds, penalties in zip(row_R.tolist(), bounds_R4.tolist(), penalties_R3, strict=True):
        logits_V = logits_SV[row]
        (masked, _), (biased, added), (counted, counts) = (
            _entries(token_id_N[start:end], value_N[start:end], len(logits_V)) for start, end in pairwise(bounds)
        )
        repetition, frequency, presence = penalties
        logits_V[biased] += added
        logits_V[masked] = MASKED_LOGIT
        logits = logits_V[counted]
        logits = torch.where(logits > 0, logits / repetition, logits * repetition)
        logits -= frequency * counts
        logits_V[counted] = logits - presence * (counts > 0)


def allow_tokens(logits_SV: Tensor, row_R: Tensor, allowed_RW: Tensor) -> None:
    bits_RW32 = (allowed_RW[:, :, None] >> torch.arange(32, device=allowed_RW.device)) & 1
    forbidden_RV = bits_RW32.flatten(1)[:, : logits_SV.shape[1]] == 0
    logits_SV[row_R] = logits_SV[row_R].clamp(min=MASKED_LOGIT).masked_fill(forbidden_RV, -torch.inf)


def scale_to_probs(logits_RV: Tensor, temperature_R: Tensor) -> Tensor:
    return (logits_RV / temperature_R[:, None].float()).softmax(-1)


def uniform(seed_R: Tensor, position_R: Tensor, purpose: int) -> Tensor:
    counters = zip(seed_R.tolist(), position_R.tolist(), strict=True)
    numbers = [philox.uniform(seed, position, purpose) for seed, position in counters]
    return torch.from_numpy(np.array(numbers)).to(seed_R.device)


def largest(logits_RV: Tensor) -> tuple[Tensor, Tensor]:
    return logits_RV.amax(-1), logits_RV.argmax(-1)


def rank(scores_RV: Tensor, token_ids_R: Tensor) -> Tensor:
    return ((scores_RV > scores_RV.gather(1, token_ids_R[:, None])).sum(-1) + 1).to(torch.int32)


def top_k(scores_RV: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Sort by integers that no two tokens of a row share, so that the host need not look at the scores.

    The upper half of an integer is the float's bits, those of a negative float inverted but for the sign: they have the
    order of the floats. The lower half is the inverted token id.
    """
    bits_RV = (scores_RV + 0.0).view(torch.int32).long()  # -0.0 becomes 0.0
    ordered_RV = torch.where(bits_RV < 0, bits_RV ^ 0x7FFFFFFF, bits_RV)
    last_id = scores_RV.shape[1] - 1
    keys_RV = (ordered_RV << 32) + (last_id - torch.arange(last_id + 1, device=scores_RV.device))
    ids_RK = last_id - (keys_RV.topk(min(k, last_id + 1)).values & 0xFFFFFFFF)
    return scores_RV.gather(1, ids_RK), ids_RK


class DenseLinear:
    """A linear layer in float32; a quantized one is dequantized at every use."""

    def __init__(self, weight: Tensor | GroupwiseWeight, bias_N: Tensor | None) -> None:
        self.weight = weight if isinstance(weight, GroupwiseWeight) else weight.clone()
        self.bias_N = None if bias_N is None else bias_N.float()

    @property
    def form(self) -> str:
        kind = f"{self.weight.bits}-bit" if isinstance(self.weight, GroupwiseWeight) else f"{self.weight.dtype}"
        return f"{kind} weights, multiplied in float32"

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes

    def dequantize(self) -> Tensor:
        """Return weight_NE, float32."""
        return self.weight.dequantize() if isinstance(self.weight, GroupwiseWeight) else self.weight.float()


def pack_linear(weight: Tensor | GroupwiseWeight, bias_N: Tensor | None = None) -> DenseLinear:
    return DenseLinear(weight, bias_N)


def linear(x_TE: Tensor, layer: DenseLinear, out_dtype: torch.dtype | None = None) -> Tensor:
    return functional.linear(x_TE.float(), layer.dequantize(), layer.bias_N).to(out_dtype or x_TE.dtype)


def embedding(token_ids_T: Tensor, layer: DenseLinear, dtype: torch.dtype) -> Tensor:
    return layer.dequantize()[token_ids_T].to(dtype)


def _entries(token_ids: Tensor, values: Tensor, vocab_size: int) -> tuple[Tensor, Tensor]:
    """Return the entries of tokens that the vocabulary has."""
    is_inside = (token_ids >= 0) & (token_ids < vocab_size)
    return token_ids[is_inside].long(), values[is_inside]


def _saturate(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return x in the cache's dtype; numbers beyond the range of a float8 become its largest value."""
    if dtype == torch.float8_e4m3fn:
        largest = torch.finfo(dtype).max
        x = x.clamp(-largest, largest)
    return x.to(dtype)


def _distances(num_queries: int, seq_len: int, device: torch.device) -> Tensor:
    """Return by how many tokens each of the seq_len positions lies before each of the last num_queries ones."""
    position_Q1 = torch.arange(seq_len - num_queries, seq_len, device=device).unsqueeze(1)
    return position_Q1 - torch.arange(seq_len, device=device)


def _softmax(scores_HQC: Tensor, sinks_H: Tensor | None) -> Tensor:
    """Return softmax over C, in which a sink is one more score, without a value."""
    if sinks_H is None:
        return scores_HQC.softmax(-1)
    sinks_HQ1 = sinks_H.float()[:, None, None].expand(-1, scores_HQC.shape[1], 1)
    return torch.cat([scores_HQC, sinks_HQ1], dim=-1).softmax(-1)[..., :-1]
