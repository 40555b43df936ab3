"""`python -m executor.precompile`: compile what the demo needs ahead of its first start, as a set-up does."""

import sys

import kernels  # before torch

# isort: split
import torch

from executor.warm_up import compile_kernels


def main() -> int:
    """Fill the user's cache for this CPU; what another dtype needs is left to its first start. Return 0."""
    best_backend = next(iter(kernels.available_backends()))
    if best_backend == "cpu":
        compile_kernels(torch.bfloat16, has_panels=True, has_program=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
