"""`python -m octavo.executor.start.precompile`: compile the kernels that the demo needs, at set-up."""

import sys

from octavo.kernels.choice import available_backends, choose_backend  # before torch

# isort: split
import torch

from octavo.executor.start.warm_up import compile_kernels


def main() -> int:
    """Fill the user's cache for this CPU. Kernels of another dtype are compiled when it is first used. Return 0."""
    backend = choose_backend(next(iter(available_backends()))).backend
    product = backend.pack_linear(torch.zeros(32, 32, dtype=torch.bfloat16))
    has_program = backend.program_of([product]) is not None
    compile_kernels(backend.compilation_for(torch.bfloat16, [product], has_program))
    return 0


if __name__ == "__main__":
    sys.exit(main())
