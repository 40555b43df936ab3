# Triton infers the types of what it compiles.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Drawing tokens without a sort: one program a row, whose every sum is in a fixed order.

A limit that a row lacks costs nothing; each limit of a row costs 16 readings of the row, from the L2 cache.

R rows, V vocabulary.
"""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.triton.checks import check_dtype, check_shape, dense_rows
from octavo.kernels.triton.configuration import Configuration

ROW_BLOCK, NUM_WARPS = 4096, 16  # tokens of a row at a time
DIGIT_BITS = tl.constexpr(2)
NUM_DIGITS = tl.constexpr(16)
ALL = tl.constexpr(float("inf"))


@triton.jit
def _digit_sums(probs_ptr, vocab_size, prefix, shift, BY_COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """Return what the tokens sum to (their number, or mass) whose bits go on after `prefix` with 3, 2 and 1."""
    columns = tl.arange(0, BLOCK)
    sum3 = tl.zeros((BLOCK,), tl.float64)
    sum2 = tl.zeros((BLOCK,), tl.float64)
    sum1 = tl.zeros((BLOCK,), tl.float64)
    for start in range(0, vocab_size, BLOCK):
        probs = tl.load(probs_ptr + start + columns, mask=start + columns < vocab_size, other=0.0)
        bits = probs.to(tl.int32, bitcast=True) >> shift
        digit = bits - (prefix << DIGIT_BITS)  # beyond 0 to 3 for other prefixes
        weight = tl.full((BLOCK,), 1.0, tl.float64) if BY_COUNT else probs.to(tl.float64)
        sum3 += tl.where(digit == 3, weight, 0.0)
        sum2 += tl.where(digit == 2, weight, 0.0)
        sum1 += tl.where(digit == 1, weight, 0.0)
    return tl.sum(sum3, axis=0), tl.sum(sum2, axis=0), tl.sum(sum1, axis=0)


@triton.jit
def _cut(probs_ptr, vocab_size, limit, BY_COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """Return where, likeliest first, what comes before (tokens, or their mass) reaches `limit`.

    The place is a bit pattern, above which all tokens are kept, and how many of the tokens with this pattern are kept.
    """
    prefix = tl.full((), 0, tl.int32)
    before = tl.full((), 0.0, tl.float64)
    for step in range(NUM_DIGITS):
        shift = (NUM_DIGITS - 1 - step) * DIGIT_BITS
        sum3, sum2, sum1 = _digit_sums(probs_ptr, vocab_size, prefix, shift, BY_COUNT, BLOCK)
        pass3 = before + sum3 < limit
        before += tl.where(pass3, sum3, 0.0)
        pass2 = pass3 & (before + sum2 < limit)
        before += tl.where(pass2, sum2, 0.0)
        pass1 = pass2 & (before + sum1 < limit)
        before += tl.where(pass1, sum1, 0.0)
        digit = 3 - pass3.to(tl.int32) - pass2.to(tl.int32) - pass1.to(tl.int32)
        prefix = (prefix << DIGIT_BITS) | digit
    weight = tl.full((), 1.0, tl.float64) if BY_COUNT else prefix.to(tl.float32, bitcast=True).to(tl.float64)
    at_cut = tl.maximum(tl.ceil((limit - before) / tl.where(prefix == 0, 1.0, weight)), 1.0)
    return prefix, tl.where(prefix == 0, ALL, at_cut)


@triton.jit
def _walk(probs_ptr, vocab_size, cut, num_at_cut, least, target, BLOCK: tl.constexpr):
    """Add up what is kept, block by block in the order of token ids.

    Returns the mass; and of the block in which it passes `target` the start, the mass before it, and how many tokens
    before it have the bits of the cut.
    """
    columns = tl.arange(0, BLOCK)
    weight_at_cut = cut.to(tl.float32, bitcast=True).to(tl.float64)
    weight_at_cut = tl.where(weight_at_cut >= least, weight_at_cut, 0.0)
    mass = tl.full((), 0.0, tl.float64)
    num_equal = tl.full((), 0.0, tl.float64)
    found_start = tl.full((), 0, tl.int32)
    found_mass = tl.full((), 0.0, tl.float64)
    found_num_equal = tl.full((), 0.0, tl.float64)
    for start in range(0, vocab_size, BLOCK):
        probs = tl.load(probs_ptr + start + columns, mask=start + columns < vocab_size, other=0.0)
        bits, weights = probs.to(tl.int32, bitcast=True), probs.to(tl.float64)
        above = tl.sum(tl.where((bits > cut) & (weights >= least), weights, 0.0), axis=0)
        equal = tl.sum((bits == cut).to(tl.int32), axis=0).to(tl.float64)
        kept_equal = tl.minimum(tl.maximum(num_at_cut - num_equal, 0.0), equal)
        mass_after = mass + (above + kept_equal * weight_at_cut)
        passes = (mass <= target) & (mass_after > target)
        found_start = tl.where(passes, start, found_start)
        found_mass = tl.where(passes, mass, found_mass)
        found_num_equal = tl.where(passes, num_equal, found_num_equal)
        mass, num_equal = mass_after, num_equal + equal
    return mass, found_start, found_mass, found_num_equal


@triton.jit
def _pick(probs_ptr, vocab_size, cut, num_at_cut, least, target, start, mass, num_equal, BLOCK: tl.constexpr):
    """Return the first token of the block at `start` at which the mass passes `target`; rounded away, its last kept."""
    columns = start + tl.arange(0, BLOCK)
    probs = tl.load(probs_ptr + columns, mask=columns < vocab_size, other=0.0)
    bits, weights = probs.to(tl.int32, bitcast=True), probs.to(tl.float64)
    is_equal = bits == cut
    order = num_equal + tl.cumsum(is_equal.to(tl.int32), axis=0).to(tl.float64)
    is_kept = ((bits > cut) | (is_equal & (order <= num_at_cut))) & (weights >= least) & (weights > 0.0)
    passed = is_kept & (mass + tl.cumsum(tl.where(is_kept, weights, 0.0), axis=0) > target)
    last = tl.max(tl.where(is_kept, columns, start), axis=0)
    return tl.min(tl.where(passed, columns, last), axis=0)


@triton.jit
def draw_kernel(
    token_ids_ptr,
    probs_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    uniform_ptr,
    row_stride,
    vocab_size,
    BLOCK: tl.constexpr,
):
    """Draw the token of one row, without a sort.

    Probabilities are not negative, so that their bit patterns, as integers, are ordered as they are: a radix descent
    over these finds the probability at which top_k or top_p cut, two bits a pass. What comes before a token, the
    likeliest first, is the same with and without those that min_p drops: only the mass of top_p counts what is left.
    A limit that a row lacks costs nothing.
    """
    row = tl.program_id(0).to(tl.int64)
    probs_ptr += row * row_stride
    top_k, top_p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row)
    min_p, uniform = tl.load(min_p_ptr + row), tl.load(uniform_ptr + row)
    cut, num_at_cut = tl.full((), 0, tl.int32), tl.full((), ALL, tl.float64)
    nothing = tl.full((), 0.0, tl.float64)
    least = nothing
    if min_p > 0.0:
        least = min_p * _largest(probs_ptr, vocab_size, BLOCK).to(tl.float64)
    if top_k > 0:
        cut, num_at_cut = _cut(probs_ptr, vocab_size, top_k.to(tl.float64), True, BLOCK)
    if top_p < 1.0:
        mass, _, _, _ = _walk(probs_ptr, vocab_size, cut, num_at_cut, least, nothing, BLOCK)
        cut_p, num_at_cut_p = _cut(probs_ptr, vocab_size, top_p * mass, False, BLOCK)
        is_stricter = (cut_p > cut) | ((cut_p == cut) & (num_at_cut_p < num_at_cut))
        cut, num_at_cut = tl.where(is_stricter, cut_p, cut), tl.where(is_stricter, num_at_cut_p, num_at_cut)
    mass, _, _, _ = _walk(probs_ptr, vocab_size, cut, num_at_cut, least, nothing, BLOCK)
    target = uniform * mass
    _, start, mass, num_equal = _walk(probs_ptr, vocab_size, cut, num_at_cut, least, target, BLOCK)
    token = _pick(probs_ptr, vocab_size, cut, num_at_cut, least, target, start, mass, num_equal, BLOCK)
    tl.store(token_ids_ptr + row, token.to(tl.int64))


@triton.jit
def _largest(probs_ptr, vocab_size, BLOCK: tl.constexpr):
    columns = tl.arange(0, BLOCK)
    largest = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, vocab_size, BLOCK):
        probs = tl.load(probs_ptr + start + columns, mask=start + columns < vocab_size, other=0.0)
        largest = tl.maximum(largest, probs)
    return tl.max(largest, axis=0)


def draw(probs_RV: Tensor, top_k_R: Tensor, top_p_R: Tensor, min_p_R: Tensor, uniform_R: Tensor) -> Tensor:
    """See `kernels.backend`."""
    num_rows, vocab_size = probs_RV.shape
    check_dtype("probabilities", probs_RV, torch.float32)
    limits = {"top_k": top_k_R, "top_p": top_p_R, "min_p": min_p_R, "uniform": uniform_R}
    for name, values_R in limits.items():
        check_shape(name, values_R, (num_rows,))
        check_dtype(name, values_R, torch.int64 if name == "top_k" else torch.float64)
    probs_RV = dense_rows(probs_RV)
    token_ids_R = torch.empty(num_rows, dtype=torch.int64, device=probs_RV.device)
    if num_rows:
        draw_kernel[(num_rows,)](
            *(token_ids_R, probs_RV, *(values_R.contiguous() for values_R in limits.values())),
            *(probs_RV.stride(0), vocab_size),
            BLOCK=ROW_BLOCK,
            num_warps=NUM_WARPS,
        )
    return token_ids_R


def configurations() -> Iterator[Configuration]:
    limits = {"top_k_ptr": "*i64", "top_p_ptr": "*fp64", "min_p_ptr": "*fp64", "uniform_ptr": "*fp64"}
    sizes = {"row_stride": "i32:16", "vocab_size": "i32:16"}
    yield Configuration(
        name="draw",
        kernel=draw_kernel,
        signature={"token_ids_ptr": "*i64", "probs_ptr": "*fp32"} | limits | sizes,
        constexprs={"BLOCK": ROW_BLOCK},
        num_warps=NUM_WARPS,
        num_stages=1,
    )
