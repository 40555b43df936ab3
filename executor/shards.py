"""The part of a checkpoint's tensor that a rank has."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Shard:
    """Part `index` of `count` of a checkpoint's tensor, cut along `dim`. The whole tensor has `size` along `dim`."""

    size: int
    dim: int = 0
    index: int = 0
    count: int = 1

    @property
    def bounds(self) -> tuple[int, int]:
        """Return the part's (start, stop) along `dim`. The last parts may be shorter."""
        step = -(-self.size // self.count)
        return min(self.index * step, self.size), min((self.index + 1) * step, self.size)
