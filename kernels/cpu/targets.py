"""What kernels are compiled for: a few kinds of x86-64 CPU, so that one compilation serves every CPU of a kind.

Code for just the CPU at hand would serve few others: each model has its own name and list of features. On a CPU of no
kind here (Arm, or an x86-64 without AVX2) kernels are compiled for that CPU.
"""

from collections.abc import Mapping
from typing import NamedTuple

# x86-64-v3 and v4 as the psABI has them, by LLVM's names.
_V3 = (
    *("cx16", "sahf", "popcnt", "crc32", "sse3", "ssse3", "sse4.1", "sse4.2"),
    *("avx", "avx2", "bmi", "bmi2", "f16c", "fma", "lzcnt", "movbe", "xsave"),
)
_V4 = (*_V3, "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl")


class Target(NamedTuple):
    """A kind of CPU."""

    cpu: str  # LLVM's name: code is tuned for it, and it has no features but these
    features: tuple[str, ...]  # what code may use, and a CPU of this kind has

    @property
    def flags(self) -> str:
        """The features as LLVM takes them."""
        return ",".join(f"+{name}" for name in self.features)


# The best first. They differ in what the kernels' own code asks for (`lanes.py`, `multiply_add.py`).
TARGETS = (
    Target("x86-64-v4", (*_V4, "avx512vnni", "avx512bf16")),
    Target("x86-64-v4", (*_V4, "avx512vnni")),
    Target("x86-64-v4", _V4),
    Target("x86-64-v3", (*_V3, "avxvnni")),
    Target("x86-64-v3", _V3),
)


def target_for(features: Mapping[str, bool]) -> Target | None:
    """Return the best target for a CPU with `features`, if there is one."""
    return next((target for target in TARGETS if all(features.get(name) for name in target.features)), None)


def parse_flags(flags: str) -> dict[str, bool]:
    """Return the features that LLVM's flags turn on or off."""
    return {flag[1:]: flag[0] == "+" for flag in flags.split(",") if flag}
