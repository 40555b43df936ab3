"""How values get to the computing device and back, and whether the device computes at once or later.

A CPU computes before a call returns. A GPU queues work and does it later, in order (in one stream). Between a GPU's
steps the host must neither read a value nor wait for a copy: the device would idle until the host has caught up.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

ALIGNMENT_BYTES = 16  # of each array in one upload


class Download(Protocol):
    """Values on their way to the host."""

    def is_done(self) -> bool:
        """Return whether the values have arrived."""

    def wait(self) -> list[np.ndarray]:
        """Return the values once they have arrived. Raises the error of the device's computation."""


class Captured(NamedTuple):
    """Recorded work: `replay` does it again, on the same memory."""

    replay: Callable[[], None]


class Device(Protocol):
    """Where the model's tensors are."""

    torch_device: torch.device
    is_lazy: bool  # a call may return before its work is done; reading a value then waits

    def upload(self, arrays: Sequence[np.ndarray], into: Tensor | None = None) -> list[Tensor]:
        """Return the arrays as tensors on the device. The caller may change the arrays after this call.

        `into` is memory of the device (uint8) that takes them, side by side as `place` says.
        """

    def download(self, tensors: Sequence[Tensor]) -> Download:
        """Begin to copy the tensors' present values to the host."""

    def capture(self, run: Callable[[], None]) -> Captured:
        """Record the device's work for `run`. The caller has called `run` before, so its kernels are compiled."""

    def waits(self, run: Callable[[], object]) -> bool:
        """Call `run`; return whether it waits for the device, which cannot be recorded. `run` is broken off there."""

    def peak_bytes(self, run: Callable[[], object]) -> int:
        """Return how much device memory `run` takes for a while; 0 on the host, whose memory is not measured."""


class Arrived(NamedTuple):
    """A Download that needs no time."""

    arrays: list[np.ndarray]

    def is_done(self) -> bool:
        return True

    def wait(self) -> list[np.ndarray]:
        return self.arrays


class CpuDevice:
    """The host itself."""

    torch_device = torch.device("cpu")
    is_lazy = False

    def upload(self, arrays: Sequence[np.ndarray], into: Tensor | None = None) -> list[Tensor]:
        if into is None:
            return [torch.from_numpy(array) for array in arrays]
        staged = stage(arrays, is_pinned=False)
        into[: len(staged)] = staged
        return views(into, arrays)

    def download(self, tensors: Sequence[Tensor]) -> Download:
        return Arrived([tensor.numpy() for tensor in tensors])

    def capture(self, run: Callable[[], None]) -> Captured:
        return Captured(run)  # a recording gains nothing on a CPU

    def waits(self, run: Callable[[], object]) -> bool:
        run()
        return False

    def peak_bytes(self, run: Callable[[], object]) -> int:
        return 0


class CudaDownload:
    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._copies = [torch.empty(t.shape, dtype=t.dtype, pin_memory=True) for t in tensors]
        for copy, tensor in zip(self._copies, tensors, strict=True):
            copy.copy_(tensor, non_blocking=True)
        self._done = torch.cuda.current_stream().record_event()

    def is_done(self) -> bool:
        return bool(self._done.query())

    def wait(self) -> list[np.ndarray]:
        self._done.synchronize()
        return [copy.numpy() for copy in self._copies]


class CudaDevice:
    """A GPU, of CUDA or ROCm; everything goes to its current stream."""

    is_lazy = True

    def __init__(self, torch_device: torch.device) -> None:
        self.torch_device = torch_device
        self._graph_pool = torch.cuda.graph_pool_handle()

    def upload(self, arrays: Sequence[np.ndarray], into: Tensor | None = None) -> list[Tensor]:
        # torch's allocator of pinned memory does not reuse the staging buffer before the copy is done.
        staged = stage(arrays, is_pinned=True)
        buffer = torch.empty_like(staged, device=self.torch_device) if into is None else into[: len(staged)]
        buffer.copy_(staged, non_blocking=True)
        return views(buffer, arrays)

    def download(self, tensors: Sequence[Tensor]) -> Download:
        return CudaDownload(tensors)

    def capture(self, run: Callable[[], None]) -> Captured:
        torch.cuda.synchronize(self.torch_device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._graph_pool):
            run()
        return Captured(graph.replay)

    def waits(self, run: Callable[[], object]) -> bool:
        mode = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            run()
        except RuntimeError as error:
            if "synchronizing" not in str(error):
                raise
            return True
        finally:
            torch.cuda.set_sync_debug_mode(mode)
        return False

    def peak_bytes(self, run: Callable[[], object]) -> int:
        torch.cuda.synchronize(self.torch_device)
        torch.cuda.reset_peak_memory_stats(self.torch_device)
        before = torch.cuda.memory_allocated(self.torch_device)
        run()
        torch.cuda.synchronize(self.torch_device)
        peak = torch.cuda.max_memory_allocated(self.torch_device)
        torch.cuda.empty_cache()  # so that the pool can have all memory that is free afterwards
        return peak - before


def device_of(torch_device: torch.device) -> Device:
    """Return the Device that holds a model's tensors."""
    return CudaDevice(torch_device) if torch_device.type == "cuda" else CpuDevice()


def place(arrays: Sequence[np.ndarray]) -> tuple[list[int], int]:
    """Return the offset of each array if all lie side by side, and the number of bytes of all."""
    offsets, end = [], 0
    for array in arrays:
        offsets.append(end)
        end += -(-array.nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    return offsets, end


def stage(arrays: Sequence[np.ndarray], *, is_pinned: bool) -> Tensor:
    """Return host memory (uint8) with the arrays side by side, so that one copy takes them all."""
    offsets, num_bytes = place(arrays)
    staged = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=is_pinned)
    for offset, array in zip(offsets, arrays, strict=True):
        staged.numpy()[offset : offset + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return staged


def views(buffer: Tensor, arrays: Sequence[np.ndarray]) -> list[Tensor]:
    """Return the tensors of the arrays that lie side by side in `buffer`."""
    return [
        buffer[offset : offset + array.nbytes].view(torch.from_numpy(array[:0]).dtype).view(array.shape)
        for offset, array in zip(place(arrays)[0], arrays, strict=True)
    ]
