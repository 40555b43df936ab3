# Triton infers the types of what it compiles.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""The sampler on the device: softmax and random numbers; `drawing`, `edits` and `masks` have the rest.

Nothing here waits for the device or depends on what its memory holds, so that a CUDA graph can hold all of it. Every
sum is in a fixed order, within a row: what comes out for a row does not depend on the others.

R rows, V vocabulary, P parts of a row.
"""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels import philox
from octavo.kernels.triton.checks import check_dtype, check_shape, dense_rows
from octavo.kernels.triton.configuration import Configuration

PART = 4096  # tokens: a row of 128 thousand is 32 programs, so that one row alone keeps a device busy
PART_WARPS = 8
UNIFORM_BLOCK = 32  # rows

MULTIPLIER = tl.constexpr(philox.MULTIPLIER)
KEY_STEP = tl.constexpr(philox.KEY_STEP)
NUM_ROUNDS = tl.constexpr(philox.NUM_ROUNDS)


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
    columns = part * PART + tl.arange(0, PART)
    logits = tl.load(logits_ptr + row * row_stride + columns, mask=columns < vocab_size, other=-float("inf"))
    x = logits / tl.load(temperature_ptr + row)
    largest = tl.max(x, axis=0)
    shift = tl.where(largest == -float("inf"), 0.0, largest)  # a part may be masked whole
    tl.store(maxima_ptr + row * num_parts + part, largest)
    tl.store(sums_ptr + row * num_parts + part, tl.sum(tl.exp(x - shift), axis=0))


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


def scale_to_probs(logits_RV: Tensor, temperature_R: Tensor) -> Tensor:
    """See `kernels.backend`."""
    num_rows, vocab_size = logits_RV.shape
    check_dtype("logits", logits_RV, torch.float32)
    check_shape("temperature", temperature_R, (num_rows,))
    logits_RV, temperature_R = dense_rows(logits_RV), temperature_R.float().contiguous()
    probs_RV = torch.empty(num_rows, vocab_size, dtype=torch.float32, device=logits_RV.device)
    if num_rows == 0:
        return probs_RV
    maxima_RP, sums_RP = _parts(logits_RV), _parts(logits_RV)
    num_parts = maxima_RP.shape[1]
    given = (logits_RV, temperature_R, maxima_RP, sums_RP, logits_RV.stride(0), vocab_size, num_parts)
    softmax_parts_kernel[(num_rows, num_parts)](*given, PART=PART, num_warps=PART_WARPS)
    softmax_kernel[(num_rows, num_parts)](
        probs_RV, *given, PART=PART, PARTS=triton.next_power_of_2(num_parts), num_warps=PART_WARPS
    )
    return probs_RV


def uniform(seed_R: Tensor, position_R: Tensor, purpose: int) -> Tensor:
    """See `kernels.backend`."""
    num_rows = len(seed_R)
    check_shape("position", position_R, (num_rows,))
    check_dtype("seed", seed_R, torch.int64)
    check_dtype("position", position_R, torch.int64)
    out_R = torch.empty(num_rows, dtype=torch.float64, device=seed_R.device)
    if num_rows:
        uniform_kernel[(triton.cdiv(num_rows, UNIFORM_BLOCK),)](
            *(out_R, seed_R.contiguous(), position_R.contiguous(), int(purpose), num_rows),
            BLOCK=UNIFORM_BLOCK,
            num_warps=1,
        )
    return out_R


def configurations() -> Iterator[Configuration]:
    """Yield the kernels as they are for a vocabulary of 128 thousand; the sampler knows float32 only."""
    sizes = {"row_stride": "i32:16", "vocab_size": "i32:16"}
    parts = {"maxima_ptr": "*fp32", "sums_ptr": "*fp32", "num_parts": "i32"}
    softmax = {"logits_ptr": "*fp32", "temperature_ptr": "*fp32"} | parts | sizes
    numbers = {"out_ptr": "*fp64", "seed_ptr": "*i64", "position_ptr": "*i64", "purpose": "i32", "num_rows": "i32"}
    part: dict[str, object] = {"PART": PART}
    all_parts: dict[str, object] = {"PARTS": 32}
    uniform_block: dict[str, object] = {"BLOCK": UNIFORM_BLOCK}
    for kernel, signature, constexprs, num_warps in (
        (softmax_parts_kernel, softmax, part, PART_WARPS),
        (softmax_kernel, softmax | {"probs_ptr": "*fp32"}, part | all_parts, PART_WARPS),
        (uniform_kernel, numbers, uniform_block, 1),
    ):
        yield Configuration(
            name=kernel.__name__.removesuffix("_kernel"),
            kernel=kernel,
            signature=signature,
            constexprs=constexprs,
            num_warps=num_warps,
            num_stages=1,
        )


def _parts(logits_RV: Tensor) -> Tensor:
    """Return room for one number a part."""
    num_rows, vocab_size = logits_RV.shape
    return torch.empty(num_rows, triton.cdiv(vocab_size, PART), dtype=torch.float32, device=logits_RV.device)
