# torch does not say the types of its events.
# mypy: allow-untyped-calls
"""What a GPU can do at best, measured, and how long a call takes on it."""

import statistics
from collections.abc import Callable
from typing import NamedTuple

import torch

NUM_WARM_UPS, NUM_TIMES = 3, 20
# Written before each timed call: nothing of its inputs is in a cache then, and the host gets ahead of the device.
FLUSH_BYTES = 512 << 20
COPY_BYTES = 2 << 30  # read and written, half of it each
PRODUCT_SIZE = 8192


class Roofline(NamedTuple):
    """What a plain copy and a plain product of bfloat16 reach on this device."""

    bytes_per_s: float
    flops_per_s: float

    def least_s(self, num_bytes: int, num_flops: int) -> float:
        """Return the time that moving the bytes and doing the operations takes at least, at once."""
        return max(num_bytes / self.bytes_per_s, num_flops / self.flops_per_s)


def measure_roofline(device: torch.device) -> Roofline:
    half = torch.zeros(2, COPY_BYTES // 2, dtype=torch.uint8, device=device)
    copy_s = time_call(lambda: half[0].copy_(half[1]), device)
    square = torch.randn(PRODUCT_SIZE, PRODUCT_SIZE, dtype=torch.bfloat16, device=device)
    product_s = time_call(lambda: square @ square, device)
    return Roofline(COPY_BYTES / copy_s, 2 * PRODUCT_SIZE**3 / product_s)


def time_call(call: Callable[[], object], device: torch.device) -> float:
    """Return the median seconds that the device takes for a call, or the host, where that is slower to launch it."""
    flushed = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=device)
    for _ in range(NUM_WARM_UPS):
        call()
    pairs = []
    for _ in range(NUM_TIMES):
        flushed.zero_()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        pairs.append((start, end))
    torch.cuda.synchronize(device)
    return float(statistics.median(start.elapsed_time(end) for start, end in pairs)) / 1000
