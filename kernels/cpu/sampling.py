# Numba infers the types.
# mypy: allow-untyped-defs, allow-untyped-calls
"""Choosing tokens on the CPU in one pass, and drawing them without sorting.

To draw, a radix descent finds the probability at which top_k or top_p cut.

Probabilities are not negative, so that their bit patterns, as integers, are ordered as they are. A row is the same
operations whichever thread computes it. V tokens of the vocabulary.
"""

import numpy as np
from numba import prange

from kernels.cpu.jit import kernel, routine
from kernels.cpu.simd import LANES, fma, largest_lane, load, maximum, pointer, splat, sum_of_lanes

DIGIT_BITS = 11
SHIFTS = (22, 11, 0)  # of the three digits of 32 bits, the highest first
ALL = np.inf
BLOCK = 1024  # logits
ZERO, MINUS_INFINITY, NAN = np.float32(0.0), np.float32(-np.inf), np.float32(np.nan)


@routine()
def _has_nan(logits, start, end):
    num_nans = 0
    for at in range(start, end):
        num_nans += logits[at] != logits[at]
    return num_nans > 0


@routine()
def _find_largest(logits, start, end):
    """Return the largest of logits start to end, which are not looked at twice but for one block, and its place."""
    largest, block, suspect = MINUS_INFINITY, start, ZERO
    for first in range(start, end, BLOCK):
        lanes, infinite = splat(MINUS_INFINITY), splat(ZERO)
        whole_end = min(first + BLOCK, end - (end - start) % LANES)
        for at in range(first, whole_end, LANES):
            values = load(logits, at)
            lanes = maximum(values, lanes)  # not a NaN
            infinite = fma(values, splat(ZERO), infinite)  # a NaN of a NaN, and of what is infinite
        found = largest_lane(lanes)
        for at in range(max(first, whole_end), min(first + BLOCK, end)):
            found = logits[at] if logits[at] > found else found
            suspect += logits[at] * ZERO
        suspect += sum_of_lanes(infinite)
        if found > largest:
            largest, block = found, first
    if suspect != suspect and _has_nan(logits, start, end):
        return NAN, np.int64(0)
    for at in range(block, min(block + BLOCK, end)):
        if logits[at] == largest:
            return largest, np.int64(at - start)
    return largest, np.int64(0)


@kernel()
def largest(logits_RV, values_R, token_ids_R):
    size = logits_RV.shape[1]
    logits = pointer(logits_RV.ctypes.data, np.float32)
    for row in range(len(token_ids_R)):
        values_R[row], token_ids_R[row] = _find_largest(logits, row * size, (row + 1) * size)


@kernel(parallel=True)
def largest_parallel(logits_RV, values_R, token_ids_R):
    for row in prange(len(token_ids_R)):
        largest(logits_RV[row : row + 1], values_R[row : row + 1], token_ids_R[row : row + 1])


@routine()
def _cut(bits_V, probs_V, by_count, limit):
    """Return where, likeliest first, what comes before (tokens, or their mass) reaches `limit`.

    That is a bit pattern, above which all is kept, and how many of the tokens that have it are kept too.
    """
    prefix, before = np.int64(0), 0.0
    for shift in SHIFTS:
        sums = np.zeros(1 << DIGIT_BITS)
        for token in range(len(bits_V)):
            bits = np.int64(bits_V[token])
            if bits >> (shift + DIGIT_BITS) == prefix:
                sums[(bits >> shift) & (len(sums) - 1)] += 1.0 if by_count else probs_V[token]
        digit = len(sums) - 1
        while digit > 0 and before + sums[digit] < limit:
            before += sums[digit]
            digit -= 1
        prefix = prefix << DIGIT_BITS | digit
    if prefix == 0:
        return prefix, ALL
    pattern = np.empty(1, np.uint32)
    pattern[0] = prefix
    weight = 1.0 if by_count else np.float64(pattern.view(np.float32)[0])
    return prefix, max(1.0, np.ceil((limit - before) / weight))


@routine()
def _walk(bits_V, probs_V, cut, num_at_cut, least, target):
    """Add up what is kept, by token id, until it passes `target`; return the last token with weight, and the sum."""
    mass, last, num_equal = 0.0, 0, 0.0
    for token in range(len(bits_V)):
        if bits_V[token] < cut or probs_V[token] < least:
            continue
        if bits_V[token] == cut:
            num_equal += 1.0
            if num_equal > num_at_cut:
                continue
        if probs_V[token] > 0:
            last = token
            mass += probs_V[token]
            if mass > target:
                break
    return last, mass


@routine()
def _draw(bits_V, probs_V, top_k, top_p, min_p, uniform):
    cut, num_at_cut = np.int64(0), ALL
    if top_k > 0:
        cut, num_at_cut = _cut(bits_V, probs_V, True, np.float64(top_k))
    if top_p < 1.0:
        _, mass = _walk(bits_V, probs_V, cut, num_at_cut, 0.0, ALL)
        cut_p, num_at_cut_p = _cut(bits_V, probs_V, False, top_p * mass)
        if cut_p > cut or (cut_p == cut and num_at_cut_p < num_at_cut):
            cut, num_at_cut = cut_p, num_at_cut_p
    least = min_p * probs_V.max() if min_p > 0.0 else 0.0
    _, mass = _walk(bits_V, probs_V, cut, num_at_cut, least, ALL)
    token, _ = _walk(bits_V, probs_V, cut, num_at_cut, least, uniform * mass)
    return token


@kernel(parallel=True)
def draw(bits_RV, probs_RV, top_k_R, top_p_R, min_p_R, uniform_R, token_ids_R):
    for row in prange(len(token_ids_R)):
        token_ids_R[row] = _draw(bits_RV[row], probs_RV[row], top_k_R[row], top_p_R[row], min_p_R[row], uniform_R[row])
