# Triton infers the types of what it compiles.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""SiLU of one half of a projection, times the other half.

T tokens, I intermediate size.
"""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.triton.configuration import Configuration

BLOCK = 1024
NUM_WARPS = 4


@triton.jit
def silu_and_mul_kernel(out_ptr, gate_up_ptr, token_stride, size, BLOCK: tl.constexpr):
    """Compute BLOCK of the `size` outputs of one token."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < size
    gate_ptr = gate_up_ptr + token * token_stride
    gate = tl.load(gate_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_ptr + size + columns, mask=inside, other=0.0).to(tl.float32)
    # sigmoid(g) of e = exp(-|g|), which cannot overflow: 1 / (1 + e) for g >= 0, e / (1 + e) below
    e = tl.exp(-tl.abs(gate))
    out = gate * tl.where(gate >= 0, 1.0, e) / (1.0 + e) * up
    tl.store(out_ptr + token * size + columns, out.to(out_ptr.dtype.element_ty), mask=inside)


def silu_and_mul(gate_up_T2I: Tensor) -> Tensor:
    """See `kernels.backend`."""
    num_tokens, double_size = gate_up_T2I.shape
    if double_size % 2:
        raise ValueError(f"gate and up have {double_size} columns together, an even number is needed")
    if gate_up_T2I.stride(1) != 1:
        gate_up_T2I = gate_up_T2I.contiguous()
    size = double_size // 2
    out_TI = torch.empty(num_tokens, size, dtype=gate_up_T2I.dtype, device=gate_up_T2I.device)
    if num_tokens:
        silu_and_mul_kernel[(num_tokens, triton.cdiv(size, BLOCK))](
            out_TI, gate_up_T2I, gate_up_T2I.stride(0), size, BLOCK=BLOCK, num_warps=NUM_WARPS
        )
    return out_TI


def configurations() -> Iterator[Configuration]:
    for dtype in ("fp16", "bf16"):
        yield Configuration(
            name=f"silu_and_mul {dtype}",
            kernel=silu_and_mul_kernel,
            signature={"out_ptr": f"*{dtype}", "gate_up_ptr": f"*{dtype}", "token_stride": "i32:16", "size": "i32:16"},
            constexprs={"BLOCK": BLOCK},
            num_warps=NUM_WARPS,
            num_stages=1,
        )
