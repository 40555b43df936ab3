"""A device that computes later than it is told, as far as the host can see: a GPU's part, played by the CPU."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from octavo.executor.step.device import Captured, stage, views


class LookedError(AssertionError):
    """Something asked for a value that a device that computes later does not have yet."""


@dataclass
class LazyDownload:
    number: int
    device: "LazyDevice"
    arrays: list[np.ndarray]

    def is_done(self) -> bool:
        return self.number < self.device.num_done

    def wait(self) -> list[np.ndarray]:
        """Be the host that waits: the device ends its steps up to this one."""
        self.device.events.append(f"waited for {self.number}")
        self.device.num_done = max(self.device.num_done, self.number + 1)
        if self.number == self.device.fails_at:
            raise ArithmeticError("the device failed")
        return self.arrays


@dataclass
class LazyDevice:
    """Steps are numbered from 0 by their downloads; one is done when `num_done` says so, or once it is waited for.

    `events` is what happened in order; a recording is not run before it is replayed.
    """

    num_done: int = 0
    fails_at: int | None = None  # the step whose values are never had
    events: list[str] = field(default_factory=list)
    num_replays: int = 0
    num_recorded: int = 0
    peak: int = 0  # bytes that any run takes for a while
    torch_device = torch.device("cpu")
    is_lazy = True

    def upload(self, arrays: Sequence[np.ndarray], into: Tensor | None = None) -> list[Tensor]:
        staged = stage(arrays, is_pinned=False)
        if into is None:
            return views(staged, arrays)
        into[: len(staged)] = staged
        return views(into, arrays)

    def download(self, tensors: Sequence[Tensor]) -> LazyDownload:
        number = sum(event.startswith("launched") for event in self.events)
        self.events.append(f"launched {number}")
        return LazyDownload(number, self, [tensor.clone().numpy() for tensor in tensors])

    def capture(self, run: Callable[[], None]) -> Captured:
        self.num_recorded += 1

        def replay() -> None:
            self.num_replays += 1
            run()

        return Captured(replay)

    def waits(self, run: Callable[[], object]) -> bool:
        try:
            with NoLooks():
                run()
        except LookedError:
            return True
        return False

    def peak_bytes(self, run: Callable[[], object]) -> int:
        run()
        return self.peak


class NoLooks(TorchDispatchMode):
    """While it is entered, an operation of torch whose result the host must wait for is an error.

    Copies to the CPU are not seen: here they are none.
    """

    LOOKS = (
        "_local_scalar_dense", "item", "nonzero", "is_nonzero", "masked_select", "equal", "allclose", "bincount",
        "unique_consecutive", "unique_dim", "_unique", "_unique2",
    )  # fmt: skip
    INDEXINGS = ("index", "index_put", "index_put_", "_index_put_impl_")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        name, _, overload = func.__name__.partition(".")
        is_look = name in self.LOOKS or (name == "repeat_interleave" and "Tensor" in overload)
        if name in self.INDEXINGS:  # a mask is turned into indexes, whose number is a value
            is_look = any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
        if is_look:
            raise LookedError(f"{func} would wait for the device")
        return func(*args, **(kwargs or {}))
