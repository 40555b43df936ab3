"""From logits to tokens. A row's result depends on nothing but the row: not on its neighbours, not on their number.

The order is vLLM's: log probabilities of the raw distribution; bias, `min_tokens` and penalties; temperature; top_k;
top_p (of what top_k left); min_p (of the likeliest token). Then one uniform number picks a token by inverse CDF, in
the order of token ids. Among equals, the lower token id counts as the likelier.

Only operations that treat rows apart are used: torch splits a sum over one row among threads, and may treat the ends
of a thread's share of an elementwise `exp` differently, but softmax and topk work row by row. Logits that are
not finite (a broken checkpoint, an overflow) are clamped and logged: the sequence ends as others do.
"""

import logging
from collections.abc import Iterable, Sequence
from enum import IntEnum

import torch
from torch import Tensor

from executor.sequences import SequenceState
from kernels import Backend
from kernels.philox import uniform
from protocol.messages import Logprobs
from protocol.sampling import SamplingParams

# S rows, R some of them, V vocabulary, K likeliest tokens, B blocks of C tokens of the vocabulary

logger = logging.getLogger(__name__)

GREEDY_BELOW = 1e-5  # temperature; vLLM's border
LARGEST_LOGIT = 1e30  # finite after division by the least temperature
BLOCK = 256  # tokens
TOP_BLOCK = 64  # tokens, of blocks searched for the likeliest


class Purpose(IntEnum):
    """What a number is drawn for: purposes at one position are independent of one another."""

    SAMPLE = 0


def sample(
    logits_SV: Tensor, sequences: Sequence[SequenceState], backend: Backend
) -> tuple[list[int], list[Logprobs | None]]:
    """Return the next token of each row's sequence, and its log probabilities where they are wanted.

    `logits_SV` is float32 and is overwritten.
    """
    _clamp_non_finite(logits_SV)
    wanting = [row for row, seq in enumerate(sequences) if seq.sampling.num_logprobs is not None]
    logprobs_RV = _select(logits_SV, wanting).log_softmax(-1) if wanting else None
    for row, seq in enumerate(sequences):
        if _is_edited(seq):
            _edit(logits_SV[row], seq)
    token_ids = _choose(logits_SV, sequences, backend)
    logprobs: list[Logprobs | None] = [None] * len(sequences)
    if logprobs_RV is not None:
        chosen = [token_ids[row] for row in wanting]
        alternatives = [sequences[row].sampling.num_logprobs or 0 for row in wanting]
        for row, entry in zip(wanting, token_logprobs(logprobs_RV, chosen, alternatives), strict=True):
            logprobs[row] = entry
    return token_ids, logprobs


def log_probs(logits_RV: Tensor) -> Tensor:
    """Return the log probabilities of the raw distribution; logits that are not finite are clamped in place."""
    _clamp_non_finite(logits_RV)
    return logits_RV.log_softmax(-1)


def token_logprobs(logprobs_RV: Tensor, token_ids: Sequence[int], num_alternatives: Sequence[int]) -> list[Logprobs]:
    """Return the log probabilities of one token a row, with its rank and the row's likeliest tokens."""
    token_ids_R1 = torch.tensor(token_ids, device=logprobs_RV.device)[:, None]
    chosen_R1 = logprobs_RV.gather(1, token_ids_R1)
    ranks_R = ((logprobs_RV > chosen_R1).sum(-1) + 1).to(torch.int32)
    values_RK, ids_RK = top_k(logprobs_RV, max(num_alternatives))
    ids_RK = ids_RK.to(torch.int32)
    chosen, ranks, values, ids = (t.numpy(force=True) for t in (chosen_R1, ranks_R, values_RK, ids_RK))
    return [
        Logprobs(k, chosen[row].tobytes(), ranks[row].tobytes(), ids[row, :k].tobytes(), values[row, :k].tobytes())
        for row, k in enumerate(num_alternatives)
    ]


def top_k(scores_RV: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return each row's `k` highest scores (all, if there are fewer), descending, and their token ids.

    Equal scores come in the order of their ids, also where only some of them fit.
    """
    k = min(k, scores_RV.shape[1])
    # torch leaves the order of equals open; one score more shows a tie across the border.
    values_RK, ids_RK = _topk(scores_RV, min(k + 1, scores_RV.shape[1]))
    tied_R = (values_RK[:, 1:] == values_RK[:, :-1]).any(-1)
    values_RK, ids_RK = values_RK[:, :k], ids_RK[:, :k]
    for row in tied_R.nonzero().flatten().tolist() if k else ():
        candidates = (scores_RV[row] >= values_RK[row, -1]).nonzero().flatten()
        order = scores_RV[row, candidates].sort(stable=True, descending=True).indices[:k]
        ids_RK[row] = candidates[order]
    return values_RK, ids_RK


def _topk(scores_RV: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return torch's topk. A small k looks only into the k blocks of the highest maxima, in a fraction of the time."""
    num_rows, vocab_size = scores_RV.shape
    if vocab_size % TOP_BLOCK or k * TOP_BLOCK > vocab_size // 8:
        return scores_RV.topk(k)
    blocks_RBC = scores_RV.reshape(num_rows, -1, TOP_BLOCK)
    block_RK = blocks_RBC.amax(-1).topk(k, sorted=False).indices
    candidates = blocks_RBC.gather(1, block_RK[:, :, None].expand(-1, -1, TOP_BLOCK)).flatten(1)
    values_RK, index_RK = candidates.topk(k)
    return values_RK, block_RK.gather(1, index_RK // TOP_BLOCK) * TOP_BLOCK + index_RK % TOP_BLOCK


def _clamp_non_finite(logits_SV: Tensor) -> None:
    """Clamp rows that have no finite maximum. A NaN makes its row's maximum NaN; a masked token (-inf) may stay."""
    bad_S = ~logits_SV.amax(-1).isfinite()
    if bad_S.any():
        logger.warning("logits of %d sequences are not finite: is the checkpoint sound?", int(bad_S.sum()))
        logits_SV[bad_S] = logits_SV[bad_S].nan_to_num(-LARGEST_LOGIT, LARGEST_LOGIT, -LARGEST_LOGIT)


def _is_edited(seq: SequenceState) -> bool:
    sampling = seq.sampling
    return bool(sampling.logit_bias) or seq.num_output_tokens < sampling.min_tokens or seq.counts is not None


def _edit(logits_V: Tensor, seq: SequenceState) -> None:
    """Apply logit_bias, min_tokens and penalties in place."""
    sampling = seq.sampling
    if sampling.logit_bias:
        ids, biases = zip(*sampling.logit_bias, strict=True)
        logits_V[list(ids)] += torch.tensor(biases, dtype=torch.float32, device=logits_V.device)
    if seq.num_output_tokens < sampling.min_tokens:
        # A model's end-of-text id may lie beyond its vocabulary; it cannot be sampled then.
        stops = [i for i in (*sampling.eos_token_ids, *sampling.stop_token_ids) if i < len(logits_V)]
        logits_V[stops] = -LARGEST_LOGIT
    if seq.counts is not None:
        ids_N, counts_N = (tensor.to(logits_V.device) for tensor in seq.counts.tensors())
        logits_V[ids_N] = _penalize(logits_V[ids_N], counts_N, sampling)


def _penalize(logits_N: Tensor, counts_N: Tensor, sampling: SamplingParams) -> Tensor:
    penalty = sampling.repetition_penalty
    logits_N = torch.where(logits_N > 0, logits_N / penalty, logits_N * penalty)
    logits_N -= sampling.frequency_penalty * counts_N
    return logits_N - sampling.presence_penalty * (counts_N > 0)


def _choose(logits_SV: Tensor, sequences: Sequence[SequenceState], backend: Backend) -> list[int]:
    greedy = [row for row, seq in enumerate(sequences) if _is_greedy(seq.sampling)]
    drawn = [row for row, seq in enumerate(sequences) if not _is_greedy(seq.sampling)]
    token_ids = [0] * len(sequences)
    if greedy:
        _place(token_ids, greedy, _argmax(_select(logits_SV, greedy)))
    if drawn:
        samplings = [sequences[row].sampling for row in drawn]
        uniforms = [
            uniform(sequences[row].sampling.seed, sequences[row].num_output_tokens, Purpose.SAMPLE) for row in drawn
        ]
        _place(token_ids, drawn, _draw(_select(logits_SV, drawn), samplings, uniforms, backend))
    return token_ids


def _select(tensor: Tensor, rows: list[int]) -> Tensor:
    return tensor if len(rows) == len(tensor) else tensor[rows]


def _place(token_ids: list[int], rows: list[int], token_ids_R: Tensor) -> None:
    for row, token_id in zip(rows, token_ids_R.tolist(), strict=True):
        token_ids[row] = token_id


def _argmax(logits_RV: Tensor) -> Tensor:
    """Return each row's argmax, the first of equals. Maxima of blocks come first: torch vectorises amax, not argmax."""
    if logits_RV.shape[1] % BLOCK:
        return logits_RV.argmax(-1)
    blocks_RBC = logits_RV.reshape(len(logits_RV), -1, BLOCK)
    block_R = blocks_RBC.amax(-1).argmax(-1)
    return block_R * BLOCK + _gather_blocks(blocks_RBC, block_R).argmax(-1)


def _gather_blocks(blocks_RBC: Tensor, block_R: Tensor) -> Tensor:
    return blocks_RBC[torch.arange(len(block_R), device=block_R.device), block_R]


def _is_greedy(sampling: SamplingParams) -> bool:
    return sampling.temperature < GREEDY_BELOW or sampling.top_k == 1


def _draw(
    logits_RV: Tensor, samplings: Sequence[SamplingParams], uniforms: Sequence[float], backend: Backend
) -> Tensor:
    """Return a random token for each row; scales the logits in place."""

    def column(values: Iterable[float]) -> Tensor:
        return torch.tensor(list(values), dtype=torch.float64, device=logits_RV.device)

    probs_RV = backend.scale_to_probs(logits_RV, column(s.temperature for s in samplings))
    top_k_R = column(s.top_k for s in samplings).long()
    top_p_R, min_p_R = column(s.top_p for s in samplings), column(s.min_p for s in samplings)
    return backend.draw(probs_RV, top_k_R, top_p_R, min_p_R, column(uniforms))
