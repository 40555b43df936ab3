# Triton infers the types of what it compiles.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Which tokens a grammar allows: one program for a block of tokens of a row.

S rows, R of them masked, W words of 32 tokens, V vocabulary.
"""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels import backend
from octavo.kernels.triton.checks import check_dtype, check_shape
from octavo.kernels.triton.configuration import Configuration

BLOCK, NUM_WARPS = 4096, 8  # tokens
MASKED_LOGIT = tl.constexpr(backend.MASKED_LOGIT)


@triton.jit
def allow_tokens_kernel(logits_ptr, row_ptr, allowed_ptr, row_stride, num_words, vocab_size, BLOCK: tl.constexpr):
    masked = tl.program_id(0)
    logits_ptr += tl.load(row_ptr + masked) * row_stride
    token_ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_inside = token_ids < vocab_size
    words = tl.load(allowed_ptr + masked * num_words + token_ids // 32, mask=is_inside, other=-1)
    is_forbidden = (words >> (token_ids % 32)) & 1 == 0
    logits = tl.load(logits_ptr + token_ids, mask=is_inside, other=0.0)
    logits = tl.where(is_forbidden, float("-inf"), tl.maximum(logits, MASKED_LOGIT))
    tl.store(logits_ptr + token_ids, logits, mask=is_inside)


def allow_tokens(logits_SV: Tensor, row_R: Tensor, allowed_RW: Tensor) -> None:
    """See `kernels.backend`."""
    num_rows, vocab_size = len(row_R), logits_SV.shape[1]
    num_words = -(-vocab_size // 32)
    for name, tensor, shape, dtype in (
        ("logits", logits_SV, tuple(logits_SV.shape), torch.float32),
        ("row", row_R, (num_rows,), torch.int64),
        ("allowed", allowed_RW, (num_rows, num_words), torch.int32),
    ):
        check_shape(name, tensor, shape)
        check_dtype(name, tensor, dtype)
    if logits_SV.stride(1) != 1:
        raise ValueError(f"the logits of a row do not lie side by side: strides {logits_SV.stride()}")
    if num_rows:
        allow_tokens_kernel[(num_rows, triton.cdiv(vocab_size, BLOCK))](
            logits_SV,
            row_R.contiguous(),
            allowed_RW.contiguous(),
            logits_SV.stride(0),
            num_words,
            vocab_size,
            BLOCK=BLOCK,
            num_warps=NUM_WARPS,
        )


def configurations() -> Iterator[Configuration]:
    """Yield the kernel as it is for a vocabulary of a multiple of 512, as most are."""
    yield Configuration(
        name="allow_tokens",
        kernel=allow_tokens_kernel,
        signature={
            "logits_ptr": "*fp32",
            "row_ptr": "*i64",
            "allowed_ptr": "*i32",
            "row_stride": "i32:16",
            "num_words": "i32:16",
            "vocab_size": "i32:16",
        },
        constexprs={"BLOCK": BLOCK},
        num_warps=NUM_WARPS,
        num_stages=1,
    )
