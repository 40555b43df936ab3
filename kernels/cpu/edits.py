# Numba infers the types.
# mypy: allow-untyped-defs, allow-untyped-calls
"""What parameters of a request change of a row's logits, on the CPU: each entry is looked at once.

Rows share nothing, so that threads take whole ones. S rows, R of them edited, N entries.
"""

import numpy as np
from numba import prange

from octavo.kernels.cpu.jit import kernel, routine

ZERO, ONE = np.float32(0.0), np.float32(1.0)


@routine()
def _add(logits_V, token_ids, values):
    for at in range(len(token_ids)):
        if 0 <= token_ids[at] < len(logits_V):
            logits_V[token_ids[at]] += values[at]


@routine()
def _mask(logits_V, token_ids, masked_logit):
    for at in range(len(token_ids)):
        if 0 <= token_ids[at] < len(logits_V):
            logits_V[token_ids[at]] = masked_logit


@routine()
def _penalize(logits_V, token_ids, counts, repetition, frequency, presence):
    for at in range(len(token_ids)):
        token_id, count = token_ids[at], counts[at]
        if 0 <= token_id < len(logits_V):
            logit = logits_V[token_id]
            logit = logit / repetition if logit > ZERO else logit * repetition
            logit -= frequency * count
            logits_V[token_id] = logit - presence * (ONE if count > ZERO else ZERO)


@routine()
def _edit_row(logits_V, bounds, penalties, token_id_N, value_N, masked_logit):
    masked, biased, counted, end = bounds
    repetition, frequency, presence = penalties
    _add(logits_V, token_id_N[biased:counted], value_N[biased:counted])
    _mask(logits_V, token_id_N[masked:biased], masked_logit)
    _penalize(logits_V, token_id_N[counted:end], value_N[counted:end], repetition, frequency, presence)


@kernel()
def edit_logits(logits_SV, row_R, bounds_R4, penalties_R3, token_id_N, value_N, masked_logit):
    for edited in range(len(row_R)):
        logits_V = logits_SV[row_R[edited]]
        _edit_row(logits_V, bounds_R4[edited], penalties_R3[edited], token_id_N, value_N, masked_logit)


@kernel(parallel=True)
def edit_logits_parallel(logits_SV, row_R, bounds_R4, penalties_R3, token_id_N, value_N, masked_logit):
    for edited in prange(len(row_R)):
        logits_V = logits_SV[row_R[edited]]
        _edit_row(logits_V, bounds_R4[edited], penalties_R3[edited], token_id_N, value_N, masked_logit)
