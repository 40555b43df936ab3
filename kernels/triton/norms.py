# Triton infers the types of what it compiles.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""RMSNorm, alone and with the residual: a program norms some whole rows, which it holds in registers.

R rows, E hidden size.
"""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.triton.checks import check_dtype, check_shape, dense_heads
from octavo.kernels.triton.configuration import Configuration

ELEMENTS = 2048  # at least as many for a program, so that short rows (a head) share one
ELEMENTS_PER_WARP = 512


@triton.jit(do_not_specialize=["num_rows"])
def rms_norm_kernel(
    out_ptr,
    x_ptr,
    weight_ptr,
    num_rows,
    rows_per_token,
    token_stride,
    size,
    eps,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Norm ROWS rows of `size` <= BLOCK elements; those of one token lie side by side."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    inside = (rows < num_rows)[:, None] & (columns < size)[None, :]
    starts = (rows // rows_per_token).to(tl.int64) * token_stride + (rows % rows_per_token) * size
    x = tl.load(x_ptr + starts[:, None] + columns[None, :], mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + columns, mask=columns < size, other=0.0).to(tl.float32)
    factor = tl.rsqrt(tl.sum(x * x, axis=1) / size + eps)
    out = x * factor[:, None] * weight[None, :]
    addresses = out_ptr + rows.to(tl.int64)[:, None] * size + columns[None, :]
    tl.store(addresses, out.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_rows"])
def add_rms_norm_kernel(
    out_ptr, x_ptr, residual_ptr, weight_ptr, num_rows, size, eps, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """Add ROWS contiguous rows to the residual (float32) and norm the sums."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    inside = (rows < num_rows)[:, None] & (columns < size)[None, :]
    places = rows.to(tl.int64)[:, None] * size + columns[None, :]
    x = tl.load(x_ptr + places, mask=inside, other=0.0).to(tl.float32)
    residual = tl.load(residual_ptr + places, mask=inside, other=0.0) + x
    tl.store(residual_ptr + places, residual, mask=inside)
    weight = tl.load(weight_ptr + columns, mask=columns < size, other=0.0).to(tl.float32)
    factor = tl.rsqrt(tl.sum(residual * residual, axis=1) / size + eps)
    out = residual * factor[:, None] * weight[None, :]
    tl.store(out_ptr + places, out.to(out_ptr.dtype.element_ty), mask=inside)


def rms_norm(x_TE: Tensor, weight_E: Tensor, eps: float) -> Tensor:
    """See `kernels.backend`."""
    size = x_TE.shape[-1]
    check_shape("weight", weight_E, (size,))
    check_dtype("weight", weight_E, x_TE.dtype)
    x_TE = dense_heads(x_TE) if x_TE.ndim == 3 else x_TE.contiguous()
    rows_per_token, token_stride = (x_TE.shape[1], x_TE.stride(0)) if x_TE.ndim == 3 else (1, size)
    out_TE = torch.empty(x_TE.shape, dtype=x_TE.dtype, device=x_TE.device)
    if num_rows := x_TE.numel() // size:
        rows, block, num_warps = _tile(size)
        rms_norm_kernel[(triton.cdiv(num_rows, rows),)](
            *(out_TE, x_TE, weight_E.contiguous(), num_rows, rows_per_token, token_stride, size, eps),
            ROWS=rows,
            BLOCK=block,
            num_warps=num_warps,
        )
    return out_TE


def add_rms_norm(x_TE: Tensor, residual_TE: Tensor, weight_E: Tensor, eps: float) -> Tensor:
    """See `kernels.backend`."""
    num_rows, size = x_TE.shape
    check_shape("weight", weight_E, (size,))
    check_shape("residual", residual_TE, (num_rows, size))
    check_dtype("weight", weight_E, x_TE.dtype)
    check_dtype("residual", residual_TE, torch.float32)
    if not residual_TE.is_contiguous():
        raise ValueError(f"the residual of shape {(num_rows, size)} is not contiguous")
    x_TE = x_TE.contiguous()
    out_TE = torch.empty_like(x_TE)
    if num_rows:
        rows, block, num_warps = _tile(size)
        add_rms_norm_kernel[(triton.cdiv(num_rows, rows),)](
            *(out_TE, x_TE, residual_TE, weight_E.contiguous(), num_rows, size, eps),
            ROWS=rows,
            BLOCK=block,
            num_warps=num_warps,
        )
    return out_TE


def configurations() -> Iterator[Configuration]:
    """Yield the forms that today's models need: heads of 128, hidden sizes of 4096 and 8192."""
    for dtype, size in (("bf16", 128), ("fp16", 4096), ("bf16", 8192)):
        signature = {"out_ptr": f"*{dtype}", "x_ptr": f"*{dtype}", "weight_ptr": f"*{dtype}", "num_rows": "i32"}
        strides = {"rows_per_token": "i32", "token_stride": "i32:16", "size": "i32:16"}
        yield _configuration("rms_norm", rms_norm_kernel, signature | strides, dtype, size)
        if size > 128:
            signature |= {"residual_ptr": "*fp32", "size": "i32:16"}
            yield _configuration("add_rms_norm", add_rms_norm_kernel, signature, dtype, size)


def _configuration(kind: str, kernel, signature: dict[str, str], dtype: str, size: int) -> Configuration:
    rows, block, num_warps = _tile(size)
    return Configuration(
        name=f"{kind} {dtype} size={size}",
        kernel=kernel,
        signature=signature | {"eps": "fp32"},
        constexprs={"ROWS": rows, "BLOCK": block},
        num_warps=num_warps,
        num_stages=1,
    )


def _tile(size: int) -> tuple[int, int, int]:
    """Return how many rows a program takes, to what power of two a row is filled up, and the number of warps."""
    block = triton.next_power_of_2(size)
    rows = max(1, ELEMENTS // block)
    return rows, block, min(16, max(4, rows * block // ELEMENTS_PER_WARP))
