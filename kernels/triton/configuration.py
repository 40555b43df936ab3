"""A kernel as it is shipped: what the ahead-of-time compile compiles and checks for spills."""

from dataclasses import dataclass
from typing import Any

import torch

from octavo.kernels.triton.checks import DTYPES, FLOAT8

SHIPPED_DTYPES = [(dtype, dtype) for dtype in DTYPES] + [(torch.float16, FLOAT8), (torch.bfloat16, FLOAT8)]  # of caches


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """One compiled variant of one kernel."""

    kernel: Any  # a triton.JITFunction
    # Argument name -> Triton type: "*bf16", "i32", "fp32"; "i32:16" if it is a multiple of 16, as pointers always are.
    # Constexprs are left out.
    signature: dict[str, str]
    constexprs: dict[str, object]
    num_warps: int
    num_stages: int
    name: str  # unique, for a person


def triton_type(dtype: torch.dtype) -> str:
    """Return Triton's name of a dtype."""
    names = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", FLOAT8: "fp8e4nv"}
    return names[dtype]
