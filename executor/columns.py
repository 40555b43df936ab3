"""What the sampler must know of a step's rows, as columns: arrays on the host, then tensors on the device.

An entry of Bias, Mask and Penalties is one logit, named by its row and token id.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Generic, NamedTuple, TypeVar

import numpy as np
from torch import Tensor

from executor.sequences import SequenceState
from protocol.sampling import Sampling

# S rows, R some of them, N logits, K likeliest tokens

GREEDY_BELOW = 1e-5  # temperature; vLLM's border
LEAST_TOP_P = 1e-200  # less keeps the likeliest token as well, but its product with a mass could be 0
MASKED_LOGIT = -1e30  # finite after division by the least temperature
SEED_BITS = (1 << 64) - 1

Array = TypeVar("Array", Tensor, np.ndarray)


class Draws(NamedTuple, Generic[Array]):
    """The rows whose token is drawn, ascending."""

    row_R: Array  # int64
    seed_R: Array  # int64, all its bits
    position_R: Array  # int64, of the token in the output
    temperature_R: Array  # float64
    top_k_R: Array  # int64
    top_p_R: Array  # float64
    min_p_R: Array  # float64


class Bias(NamedTuple, Generic[Array]):
    """What logit_bias adds."""

    row_N: Array  # int64
    token_id_N: Array  # int64
    added_N: Array  # float32


class Mask(NamedTuple, Generic[Array]):
    """What min_tokens forbids."""

    row_N: Array  # int64
    token_id_N: Array  # int64


class Penalties(NamedTuple, Generic[Array]):
    """Tokens that a row's penalties apply to, each with the row's penalties."""

    row_N: Array  # int64
    token_id_N: Array  # int64
    count_N: Array  # float32, in the output
    repetition_N: Array  # float32
    frequency_N: Array  # float32
    presence_N: Array  # float32


class Wanted(NamedTuple, Generic[Array]):
    """The rows that want log probabilities, ascending."""

    row_R: Array  # int64


class Columns(NamedTuple, Generic[Array]):
    """All of them; None is what no row has, as most steps have no entries of most kinds.

    The rows that are not drawn are greedy. `num_alternatives` is the most that any row wants beside its token's log
    probability.
    """

    draws: Draws[Array] | None
    bias: Bias[Array] | None
    mask: Mask[Array] | None
    penalties: Penalties[Array] | None
    wanted: Wanted[Array] | None
    num_alternatives: int


def to_device(columns: Columns[np.ndarray], upload: Callable[[Sequence[np.ndarray]], list[Tensor]]) -> Columns[Tensor]:
    """Return the columns on a device, to which all their arrays go together."""
    draws, bias, mask, penalties, wanted, num_alternatives = columns
    groups = [group for group in (draws, bias, mask, penalties, wanted) if group is not None]
    tensors = iter(upload([array for group in groups for array in group]))
    return Columns(
        draws=None if draws is None else Draws(*islice(tensors, len(draws))),
        bias=None if bias is None else Bias(*islice(tensors, len(bias))),
        mask=None if mask is None else Mask(*islice(tensors, len(mask))),
        penalties=None if penalties is None else Penalties(*islice(tensors, len(penalties))),
        wanted=None if wanted is None else Wanted(*islice(tensors, len(wanted))),
        num_alternatives=num_alternatives,
    )


def make_columns(sequences: Sequence[SequenceState], vocab_size: int) -> Columns[np.ndarray]:
    """Return the columns of rows that sample the next token of these sequences."""
    wanting = [row for row, seq in enumerate(sequences) if seq.sampling.num_logprobs is not None]
    return Columns(
        draws=_draws(sequences),
        bias=_bias(sequences),
        mask=_mask(sequences, vocab_size),
        penalties=_penalties(sequences),
        wanted=Wanted(_int64(wanting)) if wanting else None,
        num_alternatives=max((sequences[row].sampling.num_logprobs or 0 for row in wanting), default=0),
    )


def is_greedy(sampling: Sampling) -> bool:
    return sampling.temperature < GREEDY_BELOW or sampling.top_k == 1


def _draws(sequences: Sequence[SequenceState]) -> Draws[np.ndarray] | None:
    rows = [row for row, seq in enumerate(sequences) if not is_greedy(seq.sampling)]
    if not rows:
        return None
    drawn = [sequences[row].sampling for row in rows]
    return Draws(
        row_R=_int64(rows),
        seed_R=np.array([sampling.seed & SEED_BITS for sampling in drawn], np.uint64).view(np.int64),
        position_R=_int64(sequences[row].num_output_tokens for row in rows),
        temperature_R=_float64(sampling.temperature for sampling in drawn),
        top_k_R=_int64(sampling.top_k for sampling in drawn),
        top_p_R=_float64(max(sampling.top_p, LEAST_TOP_P) for sampling in drawn),
        min_p_R=_float64(sampling.min_p for sampling in drawn),
    )


def _bias(sequences: Sequence[SequenceState]) -> Bias[np.ndarray] | None:
    biased = [(row, *seq.bias) for row, seq in enumerate(sequences) if seq.bias is not None]
    if not biased:
        return None
    rows, ids, added = zip(*biased, strict=True)
    return Bias(_spread(rows, ids), np.concatenate(ids), np.concatenate(added))


def _mask(sequences: Sequence[SequenceState], vocab_size: int) -> Mask[np.ndarray] | None:
    rows, stops = [], []
    for row, seq in enumerate(sequences):
        if seq.stop_ids is not None and seq.num_output_tokens < seq.sampling.min_tokens:
            # A model's end-of-text id may lie beyond its vocabulary; it cannot be sampled then.
            rows.append(row)
            stops.append(seq.stop_ids[: seq.stop_ids.searchsorted(vocab_size)])
    return Mask(_spread(rows, stops), np.concatenate(stops)) if any(map(len, stops)) else None


def _spread(rows: Sequence[int], entries: Sequence[np.ndarray]) -> np.ndarray:
    """Return each row as often as it has entries."""
    return np.repeat(_int64(rows), [len(ids) for ids in entries])


def _penalties(sequences: Sequence[SequenceState]) -> Penalties[np.ndarray] | None:
    penalized = [(row, seq, seq.counts.arrays()) for row, seq in enumerate(sequences) if seq.counts is not None]
    if not penalized:
        return None
    sizes = [len(ids) for _, _, (ids, _) in penalized]

    def spread(values: Iterable[float], dtype: type) -> np.ndarray:
        return np.repeat(np.array(list(values), dtype), sizes)

    return Penalties(
        row_N=spread((row for row, _, _ in penalized), np.int64),
        token_id_N=np.concatenate([ids for _, _, (ids, _) in penalized]),
        count_N=np.concatenate([counts for _, _, (_, counts) in penalized]),
        repetition_N=spread((seq.sampling.repetition_penalty for _, seq, _ in penalized), np.float32),
        frequency_N=spread((seq.sampling.frequency_penalty for _, seq, _ in penalized), np.float32),
        presence_N=spread((seq.sampling.presence_penalty for _, seq, _ in penalized), np.float32),
    )


def _int64(values: Iterable[int]) -> np.ndarray:
    return np.array(list(values), np.int64)


def _float64(values: Iterable[float]) -> np.ndarray:
    return np.array(list(values), np.float64)
