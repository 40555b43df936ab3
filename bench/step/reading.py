# Numba infers the types.
# mypy: allow-untyped-defs, allow-untyped-calls
"""The plainest reader of memory: every thread adds up its part of a buffer, and does nothing else.

A thread reads both halves of its part at once: two streams come faster than one from many a memory.
"""

import numpy as np
from numba import prange

from octavo.kernels.cpu.jit import kernel
from octavo.kernels.cpu.lanes import LANES
from octavo.kernels.cpu.memory import load
from octavo.kernels.cpu.simd import splat, sum_of_lanes

LINE = 2 * LANES  # elements read at once of each half, for chains of additions that do not wait for one another

_ZERO = np.float32(0.0)


@kernel(parallel=True)
def read_all(memory, sums):
    """Add up `memory` (float32) in as many parts as `sums` (float32) has elements, each part in a thread of its own.

    Halves of parts are whole numbers of LINEs; what is left at the end is not read.
    """
    num_parts = len(sums)
    half = len(memory) // (2 * num_parts * LINE) * LINE
    for part in prange(num_parts):
        first = 2 * part * half
        a, b, c, d = splat(_ZERO), splat(_ZERO), splat(_ZERO), splat(_ZERO)
        for start in range(first, first + half, LINE):
            a = a + load(memory, start)
            b = b + load(memory, start + LANES)
            c = c + load(memory, start + half)
            d = d + load(memory, start + half + LANES)
        sums[part] = sum_of_lanes((a + b) + (c + d))
