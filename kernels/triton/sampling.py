# Triton infers the types of what it compiles.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""The sampler on the device: softmax, random numbers, drawing without a sort, log probabilities.

Nothing here waits for the device or depends on what its memory holds, so that a CUDA graph can hold all of it. Every
sum is in a fixed order, within a row: what comes out for a row does not depend on the others.

R rows, V vocabulary, P parts of a row.
"""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import philox
from kernels.triton.arguments import require_dtype, require_shape
from kernels.triton.configuration import Configuration

PART = 4096  # tokens: a row of 128 thousand is 32 programs, so that one row alone keeps a device busy
PART_WARPS = 8
DRAW_BLOCK, DRAW_WARPS = 4096, 16  # a whole row for one program
UNIFORM_BLOCK = 32  # rows

MULTIPLIER = tl.constexpr(philox.MULTIPLIER)
KEY_STEP = tl.constexpr(philox.KEY_STEP)
NUM_ROUNDS = tl.constexpr(philox.NUM_ROUNDS)
DIGIT_BITS = tl.constexpr(2)
NUM_DIGITS = tl.constexpr(16)
ALL = tl.constexpr(float("inf"))


@triton.jit
def _add_up_part(x_ptr, row, part, row_stride, vocab_size, scale, maxima_ptr, sums_ptr, num_parts, PART: tl.constexpr):
    """Store the largest x / scale of a part and the sum of all exp(x / scale - largest); return x and its columns."""
    columns = part * PART + tl.arange(0, PART)
    x = tl.load(x_ptr + row * row_stride + columns, mask=columns < vocab_size, other=-float("inf")) / scale
    largest = tl.max(x, axis=0)
    shift = tl.where(largest == -float("inf"), 0.0, largest)  # a part may be masked whole
    tl.store(maxima_ptr + row * num_parts + part, largest)
    tl.store(sums_ptr + row * num_parts + part, tl.sum(tl.exp(x - shift), axis=0))
    return x, columns


@triton.jit
def _join_parts(maxima_ptr, sums_ptr, row, num_parts, PARTS: tl.constexpr):
    """Return a row's maximum and sum of exp(x - maximum) from those of its parts."""
    parts = tl.arange(0, PARTS)
    maxima = tl.load(maxima_ptr + row * num_parts + parts, mask=parts < num_parts, other=-float("inf"))
    sums = tl.load(sums_ptr + row * num_parts + parts, mask=parts < num_parts, other=0.0)
    largest = tl.max(maxima, axis=0)
    return largest, tl.sum(sums * tl.exp(maxima - largest), axis=0)


@triton.jit
def softmax_parts_kernel(
    logits_ptr, temperature_ptr, maxima_ptr, sums_ptr, row_stride, vocab_size, num_parts, PART: tl.constexpr
):
    """First pass of softmax(logits / temperature): each part's maximum and sum (Milakov and Gimelshein, 2018)."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature = tl.load(temperature_ptr + row)
    _add_up_part(logits_ptr, row, part, row_stride, vocab_size, temperature, maxima_ptr, sums_ptr, num_parts, PART)


@triton.jit
def softmax_kernel(
    probs_ptr,
    logits_ptr,
    temperature_ptr,
    maxima_ptr,
    sums_ptr,
    row_stride,
    vocab_size,
    num_parts,
    PART: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Second pass: the probabilities of one part."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    largest, total = _join_parts(maxima_ptr, sums_ptr, row, num_parts, PARTS)
    columns = part * PART + tl.arange(0, PART)
    inside = columns < vocab_size
    logits = tl.load(logits_ptr + row * row_stride + columns, mask=inside, other=-float("inf"))
    probs = tl.exp(logits / tl.load(temperature_ptr + row) - largest) / total
    tl.store(probs_ptr + row * vocab_size + columns, probs, mask=inside)


@triton.jit
def logprob_parts_kernel(
    logits_ptr,
    token_ids_ptr,
    maxima_ptr,
    sums_ptr,
    num_above_ptr,
    row_stride,
    vocab_size,
    num_parts,
    PART: tl.constexpr,
):
    """Store each part's maximum and sum, and how many of its logits are above that of the row's token."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    chosen = tl.load(logits_ptr + row * row_stride + tl.load(token_ids_ptr + row))
    logits, columns = _add_up_part(
        logits_ptr, row, part, row_stride, vocab_size, 1.0, maxima_ptr, sums_ptr, num_parts, PART
    )
    is_above = (columns < vocab_size) & (logits > chosen)
    tl.store(num_above_ptr + row * num_parts + part, tl.sum(is_above.to(tl.int32), axis=0))


@triton.jit
def logprob_kernel(
    logprobs_ptr,
    ranks_ptr,
    logits_ptr,
    token_ids_ptr,
    maxima_ptr,
    sums_ptr,
    num_above_ptr,
    row_stride,
    num_parts,
    PARTS: tl.constexpr,
):
    """Join a row's parts to the log probability of its token, and the token's rank."""
    row = tl.program_id(0).to(tl.int64)
    largest, total = _join_parts(maxima_ptr, sums_ptr, row, num_parts, PARTS)
    chosen = tl.load(logits_ptr + row * row_stride + tl.load(token_ids_ptr + row))
    tl.store(logprobs_ptr + row, chosen - largest - tl.log(total))
    parts = tl.arange(0, PARTS)
    num_above = tl.load(num_above_ptr + row * num_parts + parts, mask=parts < num_parts, other=0)
    tl.store(ranks_ptr + row, tl.sum(num_above, axis=0) + 1)


@triton.jit(do_not_specialize=["purpose", "num_rows"])
def uniform_kernel(out_ptr, seed_ptr, position_ptr, purpose, num_rows, BLOCK: tl.constexpr):
    """Philox-2x64-10 (Salmon et al., SC 2011): the upper 53 bits of its first word, as a fraction."""
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = rows < num_rows
    key = tl.load(seed_ptr + rows, mask=inside, other=0).to(tl.uint64, bitcast=True)
    low = tl.load(position_ptr + rows, mask=inside, other=0).to(tl.uint64, bitcast=True)
    high = tl.full((BLOCK,), 0, tl.uint64) + purpose
    multiplier, key_step = tl.full((BLOCK,), MULTIPLIER, tl.uint64), tl.full((BLOCK,), KEY_STEP, tl.uint64)
    for _ in tl.static_range(NUM_ROUNDS):
        carried = tl.umulhi(multiplier, low)
        low, high = carried ^ key ^ high, multiplier * low
        key += key_step
    # 53 bits: the conversion is exact
    tl.store(out_ptr + rows, (low >> 11).to(tl.float64) * 1.1102230246251565e-16, mask=inside)


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

    That is a bit pattern, above which all is kept, and how many of the tokens that have it are kept too.
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
    over these finds the probability at which top_k or top_p cut, two bits a pass. A limit that a row does not have
    costs it nothing.
    """
    row = tl.program_id(0).to(tl.int64)
    probs_ptr += row * row_stride
    top_k, top_p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row)
    min_p, uniform = tl.load(min_p_ptr + row), tl.load(uniform_ptr + row)
    cut, num_at_cut = tl.full((), 0, tl.int32), tl.full((), ALL, tl.float64)
    nothing = tl.full((), 0.0, tl.float64)
    if top_k > 0:
        cut, num_at_cut = _cut(probs_ptr, vocab_size, top_k.to(tl.float64), True, BLOCK)
    if top_p < 1.0:
        mass, _, _, _ = _walk(probs_ptr, vocab_size, cut, num_at_cut, nothing, nothing, BLOCK)
        cut_p, num_at_cut_p = _cut(probs_ptr, vocab_size, top_p * mass, False, BLOCK)
        is_stricter = (cut_p > cut) | ((cut_p == cut) & (num_at_cut_p < num_at_cut))
        cut, num_at_cut = tl.where(is_stricter, cut_p, cut), tl.where(is_stricter, num_at_cut_p, num_at_cut)
    least = nothing
    if min_p > 0.0:
        least = min_p * _largest(probs_ptr, vocab_size, BLOCK).to(tl.float64)
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


def scale_to_probs(logits_RV: Tensor, temperature_R: Tensor) -> Tensor:
    """See `kernels.backend`."""
    num_rows, vocab_size = logits_RV.shape
    require_dtype("logits", logits_RV, torch.float32)
    require_shape("temperature", temperature_R, (num_rows,))
    logits_RV, temperature_R = _dense_rows(logits_RV), temperature_R.float().contiguous()
    probs_RV = torch.empty(num_rows, vocab_size, dtype=torch.float32, device=logits_RV.device)
    if num_rows == 0:
        return probs_RV
    maxima_RP, sums_RP = _parts(logits_RV, torch.float32), _parts(logits_RV, torch.float32)
    num_parts = maxima_RP.shape[1]
    given = (logits_RV, temperature_R, maxima_RP, sums_RP, logits_RV.stride(0), vocab_size, num_parts)
    softmax_parts_kernel[(num_rows, num_parts)](*given, PART=PART, num_warps=PART_WARPS)
    softmax_kernel[(num_rows, num_parts)](
        probs_RV, *given, PART=PART, PARTS=triton.next_power_of_2(num_parts), num_warps=PART_WARPS
    )
    return probs_RV


def gather_logprobs(logits_RV: Tensor, token_ids_R: Tensor) -> tuple[Tensor, Tensor]:
    """See `kernels.backend`. Ranks compare logits, which no subtraction has rounded to equals."""
    num_rows, vocab_size = logits_RV.shape
    require_dtype("logits", logits_RV, torch.float32)
    require_shape("token_ids", token_ids_R, (num_rows,))
    logits_RV, token_ids_R = _dense_rows(logits_RV), token_ids_R.contiguous()
    logprobs_R = torch.empty(num_rows, dtype=torch.float32, device=logits_RV.device)
    ranks_R = torch.empty(num_rows, dtype=torch.int32, device=logits_RV.device)
    if num_rows == 0:
        return logprobs_R, ranks_R
    parts = (_parts(logits_RV, torch.float32), _parts(logits_RV, torch.float32), _parts(logits_RV, torch.int32))
    num_parts, row_stride = parts[0].shape[1], logits_RV.stride(0)
    logprob_parts_kernel[(num_rows, num_parts)](
        logits_RV, token_ids_R, *parts, row_stride, vocab_size, num_parts, PART=PART, num_warps=PART_WARPS
    )
    logprob_kernel[(num_rows,)](
        *(logprobs_R, ranks_R, logits_RV, token_ids_R, *parts, row_stride, num_parts),
        PARTS=triton.next_power_of_2(num_parts),
        num_warps=1,
    )
    return logprobs_R, ranks_R


def uniform(seed_R: Tensor, position_R: Tensor, purpose: int) -> Tensor:
    """See `kernels.backend`."""
    num_rows = len(seed_R)
    require_shape("position", position_R, (num_rows,))
    require_dtype("seed", seed_R, torch.int64)
    require_dtype("position", position_R, torch.int64)
    out_R = torch.empty(num_rows, dtype=torch.float64, device=seed_R.device)
    if num_rows:
        uniform_kernel[(triton.cdiv(num_rows, UNIFORM_BLOCK),)](
            *(out_R, seed_R.contiguous(), position_R.contiguous(), int(purpose), num_rows),
            BLOCK=UNIFORM_BLOCK,
            num_warps=1,
        )
    return out_R


def draw(probs_RV: Tensor, top_k_R: Tensor, top_p_R: Tensor, min_p_R: Tensor, uniform_R: Tensor) -> Tensor:
    """See `kernels.backend`."""
    num_rows, vocab_size = probs_RV.shape
    require_dtype("probabilities", probs_RV, torch.float32)
    limits = {"top_k": top_k_R, "top_p": top_p_R, "min_p": min_p_R, "uniform": uniform_R}
    for name, values_R in limits.items():
        require_shape(name, values_R, (num_rows,))
        require_dtype(name, values_R, torch.int64 if name == "top_k" else torch.float64)
    probs_RV = _dense_rows(probs_RV)
    token_ids_R = torch.empty(num_rows, dtype=torch.int64, device=probs_RV.device)
    if num_rows:
        draw_kernel[(num_rows,)](
            *(token_ids_R, probs_RV, *(values_R.contiguous() for values_R in limits.values())),
            *(probs_RV.stride(0), vocab_size),
            BLOCK=DRAW_BLOCK,
            num_warps=DRAW_WARPS,
        )
    return token_ids_R


def configurations() -> Iterator[Configuration]:
    """Yield the kernels as they are for a vocabulary of 128 thousand; the sampler knows float32 only."""
    sizes = {"row_stride": "i32:16", "vocab_size": "i32:16"}
    parts = {"maxima_ptr": "*fp32", "sums_ptr": "*fp32", "num_parts": "i32"}
    softmax = {"logits_ptr": "*fp32", "temperature_ptr": "*fp32"} | parts | sizes
    logprobs = {"logits_ptr": "*fp32", "token_ids_ptr": "*i64", "num_above_ptr": "*i32"} | parts
    gathered = logprobs | {"logprobs_ptr": "*fp32", "ranks_ptr": "*i32", "row_stride": "i32:16"}
    numbers = {"out_ptr": "*fp64", "seed_ptr": "*i64", "position_ptr": "*i64", "purpose": "i32", "num_rows": "i32"}
    limits = {"top_k_ptr": "*i64", "top_p_ptr": "*fp64", "min_p_ptr": "*fp64", "uniform_ptr": "*fp64"}
    drawn = {"token_ids_ptr": "*i64", "probs_ptr": "*fp32"} | limits | sizes
    part: dict[str, object] = {"PART": PART}
    all_parts: dict[str, object] = {"PARTS": 32}
    uniform_block: dict[str, object] = {"BLOCK": UNIFORM_BLOCK}
    draw_block: dict[str, object] = {"BLOCK": DRAW_BLOCK}
    for kernel, signature, constexprs, num_warps in (
        (softmax_parts_kernel, softmax, part, PART_WARPS),
        (softmax_kernel, softmax | {"probs_ptr": "*fp32"}, part | all_parts, PART_WARPS),
        (logprob_parts_kernel, logprobs | sizes, part, PART_WARPS),
        (logprob_kernel, gathered, all_parts, 1),
        (uniform_kernel, numbers, uniform_block, 1),
        (draw_kernel, drawn, draw_block, DRAW_WARPS),
    ):
        yield Configuration(
            name=kernel.__name__.removesuffix("_kernel"),
            kernel=kernel,
            signature=signature,
            constexprs=constexprs,
            num_warps=num_warps,
            num_stages=1,
        )


def _dense_rows(x_RV: Tensor) -> Tensor:
    return x_RV if x_RV.stride(1) == 1 else x_RV.contiguous()


def _parts(logits_RV: Tensor, dtype: torch.dtype) -> Tensor:
    """Return room for one number a part."""
    num_rows, vocab_size = logits_RV.shape
    return torch.empty(num_rows, triton.cdiv(vocab_size, PART), dtype=dtype, device=logits_RV.device)
