"""From logits to tokens. A row's result depends on the row alone, not on its neighbours or their number.

The order is vLLM's: log probabilities of the raw distribution; bias, `min_tokens` and penalties; the mask of a grammar,
which comes after all that could make a forbidden token likelier than an allowed one; temperature; min_p
(of the likeliest token); top_k; top_p (of the mass that is left). Then one uniform number picks a token by inverse
CDF, in the order of token ids. Among equal tokens, the lower id counts as the likelier.

The host's parameters become columns (`columns.py`) and edits (`edits.py`), which are uploaded; after that nothing waits
for a value of the device. Reading a value is sometimes cheaper on a CPU: then a device that is not lazy (`device.py`)
reads it, with the same bits.

Only operations that treat each row on its own are used: softmax and topk work row by row. torch splits a sum over one
row among threads, and an elementwise `exp` may treat the ends of a thread's share differently. Logits that are not
finite (a broken checkpoint, an overflow) are clamped and counted: the sequence ends as others do.
"""

import math
from collections.abc import Sequence
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from octavo.executor.step.columns import Columns, Draws
from octavo.executor.step.edits import Edits
from octavo.kernels.backend import MASKED_LOGIT, Backend
from octavo.protocol.messages import Logprobs

# S rows, R some of them, V vocabulary, K likeliest tokens

LARGEST_LOGIT = -MASKED_LOGIT
PURPOSE = 0  # of a random number; another purpose gives independent numbers for the same positions

Array = TypeVar("Array", Tensor, np.ndarray)


class TokenLogprobs(NamedTuple, Generic[Array]):
    """Log probabilities of one token a row, its rank (from 1), and the row's K likeliest tokens."""

    logprob_R: Array  # float32
    rank_R: Array  # int32
    top_ids_RK: Array  # int32
    top_logprobs_RK: Array  # float32


class Masks(NamedTuple, Generic[Array]):
    """The rows that follow a grammar, and the tokens that it allows: the arguments of `Backend.allow_tokens`."""

    row_R: Array  # int64
    allowed_RW: Array  # int32, a bit a token


class Sampled(NamedTuple):
    """The samples of a step's rows, on the device."""

    token_ids_S: Tensor  # int64
    largest_S: Tensor  # float32, of the raw logits; not finite if a logit is not
    logprobs: TokenLogprobs[Tensor] | None  # of the rows that want them


def sample(
    logits_SV: Tensor,
    columns: Columns[Tensor],
    edits: Edits | None,
    backend: Backend,
    *,
    is_lazy: bool,
    masks: Masks[Tensor] | None = None,
) -> Sampled:
    """Return the next token of each row, and the log probabilities of the rows that want them.

    `logits_SV` is float32 and is overwritten. The host computes nothing and, if `is_lazy`, waits for nothing.
    """
    largest_S, likeliest_S = backend.largest(logits_SV)
    is_clamped = clamp_non_finite(logits_SV, largest_S, is_lazy=is_lazy)
    wanted = columns.wanted
    logprobs_RV = None if wanted is None else _select(logits_SV, wanted.row_R).log_softmax(-1)
    if edits is not None:
        backend.edit_logits(logits_SV, *edits)
    if masks is not None:
        backend.allow_tokens(logits_SV, *masks)
    has_greedy = columns.draws is None or len(columns.draws.row_R) < len(logits_SV)
    if has_greedy and (is_clamped or edits is not None or masks is not None):
        _, likeliest_S = backend.largest(logits_SV)
    token_ids_S = _choose(logits_SV, likeliest_S, columns.draws, backend)
    if wanted is None or logprobs_RV is None:
        return Sampled(token_ids_S, largest_S, None)
    chosen_R = token_ids_S.index_select(0, wanted.row_R)
    logprobs = token_logprobs(logprobs_RV, chosen_R, columns.num_alternatives, backend)
    return Sampled(token_ids_S, largest_S, logprobs)


def token_logprobs(
    logprobs_RV: Tensor, token_ids_R: Tensor, num_alternatives: int, backend: Backend
) -> TokenLogprobs[Tensor]:
    """Return the log probability of one token a row, and the row's likeliest tokens; `logprobs_RV` has all tokens."""
    logprob_R = logprobs_RV.gather(1, token_ids_R[:, None])[:, 0]
    rank_R = backend.rank(logprobs_RV, token_ids_R)
    if not num_alternatives:
        none = (len(rank_R), 0)
        return TokenLogprobs(logprob_R, rank_R, rank_R.new_empty(none), logprob_R.new_empty(none))
    top_RK, ids_RK = backend.top_k(logprobs_RV, num_alternatives)
    return TokenLogprobs(logprob_R, rank_R, ids_RK.to(torch.int32), top_RK)


def pack_logprobs(values: TokenLogprobs[np.ndarray], num_alternatives: Sequence[int]) -> list[Logprobs]:
    """Return each row's log probabilities as a message has them, with its own number of alternatives."""
    return [
        Logprobs(
            k,
            values.logprob_R[row].tobytes(),
            values.rank_R[row].tobytes(),
            values.top_ids_RK[row, :k].tobytes(),
            values.top_logprobs_RK[row, :k].tobytes(),
        )
        for row, k in enumerate(num_alternatives)
    ]


def clamp_non_finite(logits_SV: Tensor, largest_S: Tensor, *, is_lazy: bool) -> bool:
    """Clamp, in place, the rows whose largest logit (of Backend.largest) is not finite. A masked token (-inf) may stay.

    Return whether a row may have been clamped.
    """
    if not is_lazy and all(map(math.isfinite, largest_S.tolist())):
        return False
    clamped_SV = logits_SV.nan_to_num(-LARGEST_LOGIT, LARGEST_LOGIT, -LARGEST_LOGIT)
    torch.where(largest_S.isfinite()[:, None], logits_SV, clamped_SV, out=logits_SV)
    return True


def _choose(logits_SV: Tensor, likeliest_S: Tensor, draws: Draws[Tensor] | None, backend: Backend) -> Tensor:
    """Return a token for each row: a drawn one, or the likeliest of a greedy row."""
    if draws is None:
        return likeliest_S
    uniform_R = backend.uniform(draws.seed_R, draws.position_R, PURPOSE)
    drawn_R = _draw(_select(logits_SV, draws.row_R), draws, uniform_R, backend)
    return drawn_R if len(drawn_R) == len(likeliest_S) else likeliest_S.index_copy_(0, draws.row_R, drawn_R)


def _select(tensor: Tensor, rows_R: Tensor) -> Tensor:
    """Return the rows. Rows ascend, so all rows are the tensor itself."""
    return tensor if len(rows_R) == len(tensor) else tensor.index_select(0, rows_R)


def _draw(logits_RV: Tensor, draws: Draws[Tensor], uniform_R: Tensor, backend: Backend) -> Tensor:
    """Return a random token for each row; scales the logits in place."""
    probs_RV = backend.scale_to_probs(logits_RV, draws.temperature_R)
    return backend.draw(probs_RV, draws.top_k_R, draws.top_p_R, draws.min_p_R, uniform_R)
