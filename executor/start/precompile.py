"""`python -m octavo.executor.start.precompile`: compile kernels ahead, at set-up or when an image is built."""

import argparse
import os
import platform
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

from octavo.kernels.choice import available_backends, choose_backend  # before torch

# isort: split
import torch

from octavo.executor.start.warm_up import compile_kernels
from octavo.kernels.backend import Backend, Compilation
from octavo.kernels.cpu.targets import TARGETS, Target
from octavo.kernels.cpu.warm_up import compiling_calls
from octavo.kernels.groupwise import GroupwiseWeight

MODULE = "octavo.executor.start.precompile"


def main() -> int:
    """Fill the user's cache with what the demo needs, or as the flags say. Return 0, or 1 if a compilation failed.

    Kernels of another dtype are compiled when the dtype is first used.
    """
    parser = argparse.ArgumentParser(prog=f"python -m {MODULE}", description="Compile kernels ahead.")
    parser.add_argument("--all-kernels", action="store_true", help="for every model and dtype, not the demo alone")
    parser.add_argument("--every-cpu", action="store_true", help="all kernels for every kind of x86-64, not this CPU's")
    flags = parser.parse_args()
    if flags.every_cpu and platform.machine() == "x86_64":
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            return max(pool.map(_compile_for, TARGETS))
    if flags.all_kernels or flags.every_cpu:
        for dtype in (torch.bfloat16, torch.float32):
            for has_program in (True, False):
                calls = list(compiling_calls(dtype, has_panels=True, has_program=has_program))
                compile_kernels(Compilation(calls, is_first=False))
        return 0
    compile_kernels(compilation_for_demo(choose_backend(next(iter(available_backends()))).backend))
    return 0


def compilation_for_demo(backend: Backend, dtype: torch.dtype = torch.bfloat16) -> Compilation:
    """Return what the demo needs. Its weights have 4 bits; a backend may multiply them unlike weights of `dtype`."""
    weight = GroupwiseWeight(torch.zeros(32, 16, dtype=torch.uint8), 4, 32, torch.ones(32, 1), None)
    product = backend.pack_linear(weight)
    return backend.compilation_for(dtype, [product], has_program=backend.program_of([product]) is not None)


def _compile_for(target: Target) -> int:
    """Compile all kernels for one kind of CPU, in a process of its own. Return 0, or 1 if that failed."""
    environ = os.environ | {"NUMBA_CPU_NAME": target.cpu, "NUMBA_CPU_FEATURES": target.flags}
    command = [sys.executable, "-P", "-m", MODULE, "--all-kernels"]
    return int(subprocess.run(command, env=environ, check=False).returncode != 0)


if __name__ == "__main__":
    sys.exit(main())
