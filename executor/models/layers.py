"""Layers that carry tensor parallelism in their type, so that a model contains no collective."""

from dataclasses import dataclass

from torch import distributed


@dataclass(frozen=True, slots=True)
class TensorParallel:
    """This process's place among those that share one model."""

    rank: int = 0
    world_size: int = 1
    group: distributed.ProcessGroup | None = None
