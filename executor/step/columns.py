"""The sampling parameters of a step's rows, as columns: arrays on the host, then tensors on the device.

`executor.step.edits` has the parameters that change logits before a token is chosen.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Generic, NamedTuple, TypeVar

import numpy as np
from torch import Tensor

from octavo.executor.step.sequences import SequenceState
from octavo.protocol.sampling import Sampling

# R rows

GREEDY_BELOW = 1e-5  # temperature; vLLM's border
LEAST_TOP_P = 1e-200  # a smaller top_p also keeps only the likeliest token, but its product with a mass could be 0
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


class Wanted(NamedTuple, Generic[Array]):
    """The rows that want log probabilities, ascending."""

    row_R: Array  # int64


class Columns(NamedTuple, Generic[Array]):
    """All columns; None stands for a group that has no rows.

    Rows that are not drawn are greedy. `num_alternatives` is the largest number that a row wants beside its token's
    log probability.
    """

    draws: Draws[Array] | None
    wanted: Wanted[Array] | None
    num_alternatives: int


def to_device(columns: Columns[np.ndarray], upload: Callable[[Sequence[np.ndarray]], list[Tensor]]) -> Columns[Tensor]:
    """Return the columns on a device; one upload takes all arrays."""
    draws, wanted, num_alternatives = columns
    groups = [group for group in (draws, wanted) if group is not None]
    tensors = iter(upload([array for group in groups for array in group]))
    return Columns(
        draws=None if draws is None else Draws(*islice(tensors, len(draws))),
        wanted=None if wanted is None else Wanted(*islice(tensors, len(wanted))),
        num_alternatives=num_alternatives,
    )


def make_columns(sequences: Sequence[SequenceState]) -> Columns[np.ndarray]:
    """Return the columns of rows that sample the next token of these sequences."""
    wanting = [row for row, seq in enumerate(sequences) if seq.sampling.num_logprobs is not None]
    return Columns(
        draws=_draws(sequences),
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


def _int64(values: Iterable[int]) -> np.ndarray:
    return np.array(list(values), np.int64)


def _float64(values: Iterable[float]) -> np.ndarray:
    return np.array(list(values), np.float64)
