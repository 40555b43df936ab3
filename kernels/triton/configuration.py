"""A kernel as it is shipped: what the ahead-of-time compile compiles and checks for spills."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """One compiled variant of one kernel."""

    kernel: Any  # a triton.JITFunction
    signature: dict[str, str]  # argument name -> Triton type: "*bf16", "i32", "fp32"; constexprs are left out
    constexprs: dict[str, object]
    num_warps: int
    num_stages: int
    name: str  # unique, for a person
