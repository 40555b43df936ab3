# Numba infers the types.
# mypy: allow-untyped-defs, allow-untyped-calls
"""Choosing tokens on the CPU in one pass, and drawing them without sorting.

To draw, a radix descent finds the probability at which top_k or top_p cut.

Probabilities are not negative, so that their bit patterns, as integers, are ordered as they are. A row is the same
operations whichever thread computes it. V tokens of the vocabulary.
"""

import numpy as np
from numba import prange

from octavo.kernels.cpu.elementary import exp
from octavo.kernels.cpu.jit import kernel, routine
from octavo.kernels.cpu.lanes import LANES
from octavo.kernels.cpu.memory import load, load_part, pointer, store_part
from octavo.kernels.cpu.simd import choose_below, fma, largest_lane, maximum, splat, sum_of_lanes

DIGIT_BITS = 11
SHIFTS = (22, 11, 0)  # of the three digits of 32 bits, the highest first
ALL = np.inf
BLOCK = 1024  # logits
RARE = 0.999  # less than 1, by more than the rounding of sums
LEAST_EXPONENT = np.float32(-87.0)  # of what `exp` does not clamp
ZERO, ONE, MINUS_INFINITY, NAN = np.float32(0.0), np.float32(1.0), np.float32(-np.inf), np.float32(np.nan)


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
def _softmax(logits, start, end, temperature):
    """Overwrite logits start to end with softmax(logits / temperature); what is below e**-87 of the largest is 0."""
    largest, _ = _find_largest(logits, start, end)
    scaled_largest, total = splat(largest) / splat(temperature), 0.0
    for first in range(start, end, BLOCK):
        sums = splat(ZERO)
        for at in range(first, min(first + BLOCK, end), LANES):
            below = load_part(logits, at, end - at) / splat(temperature) - scaled_largest
            store_part(logits, at, end - at, choose_below(below, splat(LEAST_EXPONENT), splat(ZERO), exp(below)))
            sums = sums + load_part(logits, at, end - at)
        total += sum_of_lanes(sums)
    for at in range(start, end, LANES):
        store_part(logits, at, end - at, load_part(logits, at, end - at) / splat(np.float32(total)))


@kernel()
def softmax(logits_RV, temperature_R):
    """Overwrite each row with softmax(logits / temperature)."""
    size = logits_RV.shape[1]
    logits = pointer(logits_RV.ctypes.data, np.float32)
    for row in range(len(temperature_R)):
        _softmax(logits, row * size, (row + 1) * size, np.float32(temperature_R[row]))


@kernel(parallel=True)
def softmax_parallel(logits_RV, temperature_R):
    for row in prange(len(temperature_R)):
        softmax(logits_RV[row : row + 1], temperature_R[row : row + 1])


@routine()
def _sum(probs_V):
    """Return the sum of all, as float64: several sums side by side, which do not wait for one another."""
    sums = np.zeros(LANES)
    whole = len(probs_V) - len(probs_V) % LANES
    for first in range(0, whole, LANES):
        for lane in range(LANES):
            sums[lane] += probs_V[first + lane]
    total = sums.sum()
    for token in range(whole, len(probs_V)):
        total += probs_V[token]
    return total


@routine(forceinline=True)
def _has_none(probs_V, first, least):
    """Return whether a whole vector of probabilities, from `first` on, lies below `least`."""
    if first + LANES > len(probs_V):
        return False
    return largest_lane(load(pointer(probs_V.ctypes.data, np.float32), first)) < least


@routine()
def _at_least(probs_V, least):
    """Return the tokens whose probability is at least `least`, by id."""
    tokens, num_tokens = np.empty(len(probs_V), np.int64), 0
    for first in range(0, len(probs_V), LANES):
        if _has_none(probs_V, first, least):
            continue
        for token in range(first, min(first + LANES, len(probs_V))):
            tokens[num_tokens] = token
            num_tokens += probs_V[token] >= least
    return tokens[:num_tokens]


@routine()
def _digit(sums, before, limit):
    """Return the digit at which what comes before, the highest first, reaches `limit`, and what comes before it.

    It is one that some token has, also if the limit is so small that it is 0.
    """
    digit = len(sums) - 1
    while digit > 0 and (sums[digit] == 0.0 or before + sums[digit] < limit):
        before += sums[digit]
        digit -= 1
    return digit, before


@routine()
def _as_probability(bits):
    pattern = np.empty(1, np.uint32)
    pattern[0] = bits
    return pattern.view(np.float32)[0]


@routine()
def _cut(bits_V, probs_V, by_count, limit, rare):
    """Return where, likeliest first, what comes before (tokens, or their mass) reaches `limit`.

    That is a bit pattern, above which all is kept, how many of the tokens that have it are kept too, and, by id, all
    tokens that may be. The cut is known not to lie below the probability `rare`.
    """
    sums = np.zeros(1 << DIGIT_BITS)
    for first in range(0, len(probs_V), LANES):
        if not _has_none(probs_V, first, rare):
            for token in range(first, min(first + LANES, len(probs_V))):
                sums[bits_V[token] >> SHIFTS[0]] += 1.0 if by_count else probs_V[token]
    prefix, before = _digit(sums, 0.0, limit)
    tokens = _at_least(probs_V, _as_probability(prefix << SHIFTS[0]))
    for shift in SHIFTS[1:]:
        sums[:] = 0.0
        for token in tokens:
            bits = np.int64(bits_V[token])
            if bits >> (shift + DIGIT_BITS) == prefix:
                sums[(bits >> shift) & (len(sums) - 1)] += 1.0 if by_count else probs_V[token]
        digit, before = _digit(sums, before, limit)
        prefix = prefix << DIGIT_BITS | digit
    if prefix == 0:
        return prefix, ALL, tokens
    weight = 1.0 if by_count else np.float64(_as_probability(prefix))
    return prefix, max(1.0, np.ceil((limit - before) / weight)), tokens


@routine()
def _walk(bits_V, probs_V, cut, num_at_cut, target):
    """Add up what is kept, by token id, until it passes `target`; return the last token with weight, and the sum."""
    mass, last, num_equal = 0.0, 0, 0.0
    for token in range(len(bits_V)):
        if bits_V[token] < cut:
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
    is_cut, ids = False, np.empty(0, np.int64)
    if min_p > 0.0:
        ids = _at_least(probs_V, min_p * probs_V.max())
        is_cut, bits_V, probs_V = True, bits_V[ids], probs_V[ids]
    if top_k > 0:
        cut, num_at_cut, kept = _cut(bits_V, probs_V, True, np.float64(top_k), 0.0)
        ids = ids[kept] if is_cut else kept
        is_cut, bits_V, probs_V = True, bits_V[kept], probs_V[kept]
    if top_p < 1.0 and len(probs_V) > 0:
        mass = _walk(bits_V, probs_V, cut, num_at_cut, ALL)[1] if is_cut else _sum(probs_V)
        rare = RARE * (1.0 - top_p) * mass / len(probs_V)  # all below it have less than 1 - top_p of the mass together
        cut_p, num_at_cut_p, kept = _cut(bits_V, probs_V, False, top_p * mass, rare)
        if cut_p > cut or (cut_p == cut and num_at_cut_p < num_at_cut):
            cut, num_at_cut = cut_p, num_at_cut_p
        ids = ids[kept] if is_cut else kept
        is_cut, bits_V, probs_V = True, bits_V[kept], probs_V[kept]
    _, mass = _walk(bits_V, probs_V, cut, num_at_cut, ALL)
    drawn, _ = _walk(bits_V, probs_V, cut, num_at_cut, uniform * mass)
    return ids[drawn] if is_cut and len(ids) > 0 else drawn  # none is left of probabilities that are no numbers


@kernel()
def draw(bits_RV, probs_RV, top_k_R, top_p_R, min_p_R, uniform_R, token_ids_R):
    for row in range(len(token_ids_R)):
        token_ids_R[row] = _draw(bits_RV[row], probs_RV[row], top_k_R[row], top_p_R[row], min_p_R[row], uniform_R[row])


@kernel(parallel=True)
def draw_parallel(bits_RV, probs_RV, top_k_R, top_p_R, min_p_R, uniform_R, token_ids_R):
    for row in prange(len(token_ids_R)):
        token_ids_R[row] = _draw(bits_RV[row], probs_RV[row], top_k_R[row], top_p_R[row], min_p_R[row], uniform_R[row])


@routine()
def _num_above(scores, start, end, chosen):
    """Return how many of the scores start to end are above the chosen one."""
    num_above = 0
    for first in range(start, end, BLOCK):
        counts = splat(ZERO)
        whole_end = min(first + BLOCK, end - (end - start) % LANES)
        for at in range(first, whole_end, LANES):
            counts = counts + choose_below(splat(chosen), load(scores, at), splat(ONE), splat(ZERO))
        num_above += int(sum_of_lanes(counts))
        for at in range(max(first, whole_end), min(first + BLOCK, end)):
            num_above += scores[at] > chosen
    return num_above


@kernel()
def rank(scores_RV, chosen_R, ranks_R):
    size = scores_RV.shape[1]
    scores = pointer(scores_RV.ctypes.data, np.float32)
    for row in range(len(ranks_R)):
        ranks_R[row] = _num_above(scores, row * size, (row + 1) * size, chosen_R[row]) + 1


@kernel(parallel=True)
def rank_parallel(scores_RV, chosen_R, ranks_R):
    for row in prange(len(ranks_R)):
        rank(scores_RV[row : row + 1], chosen_R[row : row + 1], ranks_R[row : row + 1])


@routine()
def _insert(score, token_id, num_kept, values_K, token_ids_K):
    """Put a score in its place among those that are kept; return how many are kept now."""
    most = len(values_K)
    if num_kept < most:
        num_kept += 1
    elif not score > values_K[most - 1]:
        return num_kept
    place = num_kept - 1
    while place > 0 and score > values_K[place - 1]:
        values_K[place], token_ids_K[place] = values_K[place - 1], token_ids_K[place - 1]
        place -= 1
    values_K[place], token_ids_K[place] = score, token_id
    return num_kept


@routine()
def _top(scores_V, values_K, token_ids_K):
    """Keep the K highest scores in order; an equal one that comes later stands behind those before it, or nowhere."""
    num_kept, most = 0, len(values_K)
    scores = pointer(scores_V.ctypes.data, np.float32)
    for first in range(0, len(scores_V), LANES):
        end = min(first + LANES, len(scores_V))
        is_low = (
            num_kept == most and end - first == LANES and not largest_lane(load(scores, first)) > values_K[most - 1]
        )
        if not is_low:
            for token_id in range(first, end):
                num_kept = _insert(scores_V[token_id], token_id, num_kept, values_K, token_ids_K)


@kernel()
def top_k(scores_RV, values_RK, token_ids_RK):
    for row in range(len(scores_RV)):
        _top(scores_RV[row], values_RK[row], token_ids_RK[row])


@kernel(parallel=True)
def top_k_parallel(scores_RV, values_RK, token_ids_RK):
    for row in prange(len(scores_RV)):
        _top(scores_RV[row], values_RK[row], token_ids_RK[row])
