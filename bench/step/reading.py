# Numba infers the types.
# mypy: allow-untyped-defs, allow-untyped-calls
"""The plainest reader of memory: every thread adds up its part of a buffer, and does nothing else."""

import numpy as np
from numba import prange

from kernels.cpu.jit import kernel
from kernels.cpu.lanes import LANES
from kernels.cpu.memory import load
from kernels.cpu.simd import splat, sum_of_lanes

STREAM = 4 * LANES  # elements read at once, for chains of additions that do not wait for one another

_ZERO = np.float32(0.0)


@kernel(parallel=True)
def read_all(memory, sums):
    """Add up `memory` (float32) in as many parts as `sums` (float32) has elements, each part in a thread of its own.

    Parts are whole numbers of STREAMs; what is left at the end is not read.
    """
    num_parts, num_streams = len(sums), len(memory) // STREAM
    for part in prange(num_parts):
        first, end = num_streams * part // num_parts, num_streams * (part + 1) // num_parts
        a, b, c, d = splat(_ZERO), splat(_ZERO), splat(_ZERO), splat(_ZERO)
        for start in range(first * STREAM, end * STREAM, STREAM):
            a = a + load(memory, start)
            b = b + load(memory, start + LANES)
            c = c + load(memory, start + 2 * LANES)
            d = d + load(memory, start + 3 * LANES)
        sums[part] = sum_of_lanes((a + b) + (c + d))
