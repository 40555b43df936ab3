"""One rank's place among the ranks that share a model, and the values that they exchange."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, distributed

from octavo.executor.shards import Shard


class GroupLostError(Exception):
    """Another rank has ended; this rank cannot go on."""


@contextmanager
def _collective() -> Iterator[None]:
    """Turn torch's error about a closed connection into GroupLostError, without torch's guesses at the cause."""
    try:
        yield
    except RuntimeError as error:
        raise GroupLostError(f"another rank has ended: {str(error).partition('. This is')[0]}") from None


@dataclass(frozen=True, slots=True)
class TensorParallel:
    """This process's place among the ranks that share one model.

    Every exchange between ranks raises GroupLostError when one of them is gone.
    """

    rank: int = 0
    world_size: int = 1
    group: distributed.ProcessGroup | None = None

    def share(self, num: int, what: str) -> int:
        """Return this rank's share of `num`. Raises ValueError if the ranks do not divide `num`."""
        if num % self.world_size:
            raise ValueError(f"{what} ({num}) cannot be divided among {self.world_size} ranks")
        return num // self.world_size

    def shard(self, size: int, dim: int = 0) -> Shard:
        """Return this rank's part of a tensor that has `size` along `dim`."""
        return Shard(size, dim, self.rank, self.world_size)

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum of every rank's `x`; `x` may be overwritten. On the CPU a row's bits depend on the row alone.

        gloo's ring cuts a tensor by its length, so a row's bits would depend on the batch. On the CPU every rank
        therefore adds all parts in the order of ranks.
        """
        if self.world_size == 1:
            return x
        if x.device.type != "cpu":
            with _collective():
                distributed.all_reduce(x, group=self.group)
            return x
        parts = [torch.empty_like(x) for _ in range(self.world_size)]
        with _collective():
            distributed.all_gather(parts, x, group=self.group)
        for part in parts[1:]:
            parts[0] += part
        return parts[0]

    def gather(self, x: Tensor) -> Tensor:
        """Return, on rank 0, every rank's `x`, joined along the last dimension in the order of ranks.

        The other ranks get their own `x`.
        """
        if self.world_size == 1:
            return x
        parts = [torch.empty_like(x) for _ in range(self.world_size)] if self.rank == 0 else None
        with _collective():
            distributed.gather(x, parts, dst=0, group=self.group)
        return torch.cat(parts, dim=-1) if parts is not None else x

    def broadcast(self, x: Tensor) -> Tensor:
        """Return `x`, overwritten by rank 0's."""
        if self.world_size > 1:
            with _collective():
                distributed.broadcast(x, src=0, group=self.group)
        return x

    def wait(self) -> None:
        """Return once every rank is here."""
        self.least(0)

    def least(self, number: int) -> int:
        """Return the least of every rank's `number`, once every rank is here."""
        if self.world_size == 1:
            return number
        least = torch.tensor(number)
        with _collective():
            distributed.all_reduce(least, op=distributed.ReduceOp.MIN, group=self.group)
        return int(least)


ALONE = TensorParallel()
