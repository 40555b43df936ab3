"""Decode steps as CUDA graphs: a step's kernels are recorded once and launched together.

A graph has fixed shapes and fixed addresses. So one graph is recorded for each of a few batch sizes and widths of the
block table, over static inputs. A step is padded to the next size and width; the padding's results are dropped.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from octavo.executor.models.inputs import StepInputs
from octavo.executor.step.device import Captured, Device, place
from octavo.executor.step.packing import StepArrays, pad

# T tokens of this step, S sequences, M blocks of a block table, E hidden size

MAX_GRAPH_SEQS = 512  # a larger batch keeps the device busy enough for the host to stay ahead
FIRST_TABLE_TOKENS = 2048  # of the narrowest block table
TABLE_GROWTH = 4

Run = Callable[[StepInputs], Tensor]
Key = tuple[int, int]  # sequences, blocks of a block table


def batch_sizes(max_num_seqs: int) -> list[int]:
    """Return the sizes to record: powers of two up to 16, then steps of 16, from 128 on of 64, and the largest."""
    largest = min(max_num_seqs, MAX_GRAPH_SEQS)
    sizes = [1, 2, 4, 8, *range(16, 128, 16), *range(128, MAX_GRAPH_SEQS + 1, 64)]
    return [*(size for size in sizes if size < largest), largest]


def table_widths(max_model_len: int, block_size: int) -> list[int]:
    """Return the widths of block tables to record. A graph divides attention's work for the longest that fits."""
    largest = -(-max_model_len // block_size)
    widths, width = [], -(-FIRST_TABLE_TOKENS // block_size)
    while width < largest:
        widths.append(width)
        width *= TABLE_GROWTH
    return [*widths, largest]


def at_least(choices: Sequence[int], needed: int) -> int | None:
    """Return the least of the ascending choices that is at least `needed`."""
    index = bisect_left(choices, needed)
    return choices[index] if index < len(choices) else None


class DecodeGraphs:
    """The recorded steps of one model: `run` is its forward pass, over its KV caches."""

    def __init__(self, run: Run, device: Device, sizes: Sequence[int], widths: Sequence[int]) -> None:
        """`sizes` and `widths` are ascending; nothing is recorded yet."""
        self._run = run
        self._device = device
        self._sizes = sizes
        self._widths = widths
        self._graphs: dict[Key, tuple[StepInputs, Captured]] = {}
        _, num_bytes = place(_padding(sizes[-1], widths[-1]))
        self._memory = torch.empty(num_bytes, dtype=torch.uint8, device=device.torch_device)
        self._hidden_SE = torch.empty(0)  # of the largest size

    def __len__(self) -> int:
        return len(self._sizes) * len(self._widths)

    @torch.inference_mode()
    def can_be_recorded(self) -> bool:
        """Do a step of padding; return whether the model's code never waits for the device."""
        inputs = self._padded_inputs(self._sizes[0], self._widths[0])
        return not self._device.waits(lambda: self._run(inputs))

    def capture(self) -> Iterator[Key]:
        """Record every graph and yield its size and width. The largest comes first: the others share its memory."""
        for size in reversed(self._sizes):
            for width in reversed(self._widths):
                self._capture(size, width)
                yield size, width

    def find(self, num_seqs: int, table_blocks: int) -> Key | None:
        """Return the recorded size and width that a decode step fits into, if there is one."""
        size, width = at_least(self._sizes, num_seqs), at_least(self._widths, table_blocks)
        return None if size is None or width is None or (size, width) not in self._graphs else (size, width)

    def load(self, key: Key, arrays: StepArrays) -> StepInputs:
        """Copy a decode step into the graph's inputs, and return them.

        The copy is queued behind the last step, which still reads its own inputs.
        """
        self._device.upload(pad(arrays, *key), self._memory)
        return self._graphs[key][0]

    def replay(self, key: Key, num_seqs: int) -> Tensor:
        """Return hidden_SE of the loaded step.

        The next replay overwrites this memory. The replay is queued behind everything that was launched before it, and
        the sampler, which reads these rows, is launched before the next step.
        """
        self._graphs[key][1].replay()
        return self._hidden_SE[:num_seqs]

    @torch.inference_mode()
    def _capture(self, size: int, width: int) -> None:
        inputs = self._padded_inputs(size, width)
        hidden_SE = self._run(inputs)  # compiles the kernels, which a graph cannot record
        if not self._graphs:
            self._hidden_SE = torch.empty_like(hidden_SE)

        def step() -> None:
            self._hidden_SE[:size].copy_(self._run(inputs))

        self._graphs[size, width] = inputs, self._device.capture(step)

    def _padded_inputs(self, size: int, width: int) -> StepInputs:
        return StepInputs(*self._device.upload(_padding(size, width), self._memory))


def _padding(size: int, width: int) -> StepArrays:
    """Return a step of padding alone."""
    nothing = np.zeros(0, np.int64), np.zeros(0, np.int32)
    no_tables = np.zeros((0, width), np.int32)
    return pad(StepArrays(nothing[0], nothing[0], nothing[0], nothing[1], nothing[1], no_tables), size, width)
