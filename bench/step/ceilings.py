"""What this machine can do at best: how fast it reads memory, how fast it multiplies. Measured, on all threads in use.

Read bandwidth: 512 MiB of float32, far more than any cache of a core, are read once, by
`bench.step.reading` and by torch's sum, several times each; the fastest reading counts. Nothing is written.

Product rate: a product of two square matrices, with a prepacked weight by oneDNN and without by torch's matmul, of some
sizes and several times each; the fastest counts. Always in float32, and in bfloat16 where the processor has
instructions for it. A weight of few bits is multiplied in float32.

The clock of a processor and the neighbours of a virtual machine change by the minute: measure before and after what is
compared with it, and take the better of both.
"""

import time
from collections.abc import Callable, Sequence

import numpy as np
import torch

from octavo.bench.step.floor import Ceilings
from octavo.bench.step.reading import read_all
from octavo.executor.dtypes import DTYPES
from octavo.kernels.cpu.products import has_bfloat16

NUM_READ_BYTES = 512 << 20
SQUARES = (1024, 1536, 2048)  # rows and columns of the matrices
NUM_TRIES = 6


def measure_ceilings(num_bytes: int = NUM_READ_BYTES, squares: Sequence[int] = SQUARES) -> Ceilings:
    """Measure this machine with as many threads as torch has been told to use; it takes a second or two."""
    names = ["float32", "bfloat16"] if has_bfloat16() else ["float32"]
    rates = {name: max(_flops_per_s(square, DTYPES[name]) for square in squares) for name in names}
    return Ceilings(_read_bytes_per_s(num_bytes), rates)


def better_of(first: Ceilings, second: Ceilings) -> Ceilings:
    """Return the higher of each ceiling."""
    rates = {name: max(rate, second.flops_per_s[name]) for name, rate in first.flops_per_s.items()}
    return Ceilings(max(first.read_bytes_per_s, second.read_bytes_per_s), rates)


def _read_bytes_per_s(num_bytes: int) -> float:
    buffer = torch.ones(num_bytes // 4)
    memory, sums = buffer.numpy(), np.zeros(torch.get_num_threads(), np.float32)
    return buffer.nbytes / min(_least_s(lambda: read_all(memory, sums)), _least_s(buffer.sum))


@torch.inference_mode()
def _flops_per_s(square: int, dtype: torch.dtype) -> float:
    left, right = torch.randn(2, square, square).to(dtype)
    packed = torch.ops.mkldnn._reorder_linear_weight(right, square)

    def prepacked() -> object:
        return torch.ops.mkldnn._linear_pointwise(left, packed, None, "none", [], "")

    return 2 * square**3 / min(_least_s(prepacked), _least_s(lambda: left @ right))


def _least_s(run: Callable[[], object]) -> float:
    """Return the least time that a call takes, the first one left out: it may compile or touch memory."""
    run()
    times_s = []
    for _ in range(NUM_TRIES):
        started_s = time.perf_counter()
        run()
        times_s.append(time.perf_counter() - started_s)
    return min(times_s)
