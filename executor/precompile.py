"""`python -m executor.precompile`: compile the kernels that the demo needs, as a set-up does before its first start."""

import sys

from kernels.choice import available_backends  # before torch

# isort: split
import torch

from executor.warm_up import compile_kernels


def main() -> int:
    """Fill the user's cache for this CPU; what another dtype needs is left to its first start. Return 0."""
    best_backend = next(iter(available_backends()))
    if best_backend == "cpu":
        compile_kernels(torch.bfloat16, has_panels=True, has_program=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
