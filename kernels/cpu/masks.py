# Numba infers the types.
# mypy: allow-untyped-defs, allow-untyped-calls
"""Which tokens a grammar allows, on the CPU. S rows, R of them masked, W words of 32 tokens."""

import numpy as np
from numba import prange

from octavo.kernels.cpu.jit import kernel, routine

NONE, ONE, WORD_BITS = np.int32(0), np.int32(1), 32
FORBIDDEN = np.float32(-np.inf)


@routine()
def _mask_row(logits_V, allowed_W, masked_logit):
    for word in range(len(allowed_W)):
        allowed = allowed_W[word]
        first = word * WORD_BITS
        for bit in range(min(WORD_BITS, len(logits_V) - first)):
            is_forbidden = (allowed >> bit) & ONE == NONE
            logits_V[first + bit] = FORBIDDEN if is_forbidden else max(logits_V[first + bit], masked_logit)


@kernel()
def allow_tokens(logits_SV, row_R, allowed_RW, masked_logit):
    for masked in range(len(row_R)):
        _mask_row(logits_SV[row_R[masked]], allowed_RW[masked], masked_logit)


@kernel(parallel=True)
def allow_tokens_parallel(logits_SV, row_R, allowed_RW, masked_logit):
    for masked in prange(len(row_R)):
        _mask_row(logits_SV[row_R[masked]], allowed_RW[masked], masked_logit)
