# Triton infers the types of what it compiles.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""What parameters of a request change of a row's logits: one program a row, which looks at each entry once.

S rows, R of them edited, N entries, V vocabulary.
"""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels import backend
from octavo.kernels.triton.checks import check_dtype, check_shape
from octavo.kernels.triton.configuration import Configuration

BLOCK, NUM_WARPS = 1024, 8  # entries of a row at a time
MASKED_LOGIT = tl.constexpr(backend.MASKED_LOGIT)


@triton.jit
def _entries(token_ids_ptr, values_ptr, start, end, vocab_size, BLOCK: tl.constexpr):
    """Return a block's token ids and numbers, and which of them are entries of tokens that the vocabulary has."""
    at = start + tl.arange(0, BLOCK)
    token_ids = tl.load(token_ids_ptr + at, mask=at < end, other=-1)
    return token_ids, tl.load(values_ptr + at, mask=at < end, other=0.0), (token_ids >= 0) & (token_ids < vocab_size)


@triton.jit
def edit_logits_kernel(
    logits_ptr,
    row_ptr,
    bounds_ptr,
    penalties_ptr,
    token_ids_ptr,
    values_ptr,
    row_stride,
    vocab_size,
    BLOCK: tl.constexpr,
):
    """Edit one row. Threads meet between two kinds of entries: what one has written another may read."""
    edited = tl.program_id(0)
    logits_ptr += tl.load(row_ptr + edited) * row_stride
    masked, biased = tl.load(bounds_ptr + 4 * edited), tl.load(bounds_ptr + 4 * edited + 1)
    counted, end = tl.load(bounds_ptr + 4 * edited + 2), tl.load(bounds_ptr + 4 * edited + 3)
    for start in range(biased, counted, BLOCK):
        token_ids, added, is_inside = _entries(token_ids_ptr, values_ptr, start, counted, vocab_size, BLOCK)
        logits = tl.load(logits_ptr + token_ids, mask=is_inside, other=0.0)
        tl.store(logits_ptr + token_ids, logits + added, mask=is_inside)
    tl.debug_barrier()
    for start in range(masked, biased, BLOCK):
        token_ids, _, is_inside = _entries(token_ids_ptr, values_ptr, start, biased, vocab_size, BLOCK)
        tl.store(logits_ptr + token_ids, tl.full((BLOCK,), MASKED_LOGIT, tl.float32), mask=is_inside)
    tl.debug_barrier()
    repetition = tl.load(penalties_ptr + 3 * edited)
    frequency, presence = tl.load(penalties_ptr + 3 * edited + 1), tl.load(penalties_ptr + 3 * edited + 2)
    for start in range(counted, end, BLOCK):
        token_ids, counts, is_inside = _entries(token_ids_ptr, values_ptr, start, end, vocab_size, BLOCK)
        logits = tl.load(logits_ptr + token_ids, mask=is_inside, other=0.0)
        logits = tl.where(logits > 0.0, tl.div_rn(logits, repetition), logits * repetition)
        logits -= frequency * counts
        tl.store(logits_ptr + token_ids, logits - presence * (counts > 0.0).to(tl.float32), mask=is_inside)


def edit_logits(
    logits_SV: Tensor, row_R: Tensor, bounds_R4: Tensor, penalties_R3: Tensor, token_id_N: Tensor, value_N: Tensor
) -> None:
    """See `kernels.backend`."""
    num_rows = len(row_R)
    check_dtype("logits", logits_SV, torch.float32)
    for name, tensor, shape, dtype in (
        ("row", row_R, (num_rows,), torch.int64),
        ("bounds", bounds_R4, (num_rows, 4), torch.int64),
        ("penalties", penalties_R3, (num_rows, 3), torch.float32),
        ("token_id", token_id_N, (len(value_N),), torch.int32),
        ("value", value_N, (len(value_N),), torch.float32),
    ):
        check_shape(name, tensor, shape)
        check_dtype(name, tensor, dtype)
    if logits_SV.stride(1) != 1:
        raise ValueError(f"the logits of a row do not lie side by side: strides {logits_SV.stride()}")
    if num_rows:
        given = (tensor.contiguous() for tensor in (row_R, bounds_R4, penalties_R3, token_id_N, value_N))
        edit_logits_kernel[(num_rows,)](
            logits_SV, *given, logits_SV.stride(0), logits_SV.shape[1], BLOCK=BLOCK, num_warps=NUM_WARPS
        )


def configurations() -> Iterator[Configuration]:
    """Yield the kernel as it is for a vocabulary of a multiple of 16, as most are."""
    pointers = {"logits_ptr": "*fp32", "row_ptr": "*i64", "bounds_ptr": "*i64", "penalties_ptr": "*fp32"}
    entries = {"token_ids_ptr": "*i32", "values_ptr": "*fp32"}
    yield Configuration(
        name="edit_logits",
        kernel=edit_logits_kernel,
        signature=pointers | entries | {"row_stride": "i32:16", "vocab_size": "i32:16"},
        constexprs={"BLOCK": BLOCK},
        num_warps=NUM_WARPS,
        num_stages=1,
    )
