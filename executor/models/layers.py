"""Layers that carry tensor parallelism in their type, so that a model contains no collective.

Parameters are born on the meta device with this rank's shape; `executor.weights` fills them. A layer says which part of
a checkpoint's tensor each of its parameters is (`shards`); it does not load.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, distributed, nn

from executor.models.split import num_kv_heads_of_rank
from kernels import Backend

# T tokens of this step, E hidden size, N output features of this rank, V vocabulary


@dataclass(frozen=True, slots=True)
class Shard:
    """Part `index` of `count` of a checkpoint's tensor, cut along `dim`, where the whole tensor has `size`."""

    size: int
    dim: int = 0
    index: int = 0
    count: int = 1

    @property
    def bounds(self) -> tuple[int, int]:
        """Return the part's (start, stop) along `dim`; the last parts may be shorter than the others."""
        step = -(-self.size // self.count)
        return min(self.index * step, self.size), min((self.index + 1) * step, self.size)


@dataclass(frozen=True, slots=True)
class TensorParallel:
    """This process's place among those that share one model."""

    rank: int = 0
    world_size: int = 1
    group: distributed.ProcessGroup | None = None

    def share(self, num: int, what: str) -> int:
        """Return this rank's share of `num`. Raises ValueError if it does not divide."""
        if num % self.world_size:
            raise ValueError(f"{what} ({num}) cannot be divided among {self.world_size} ranks")
        return num // self.world_size

    def shard(self, size: int, dim: int = 0) -> Shard:
        """Return this rank's part of a tensor that has `size` along `dim`."""
        return Shard(size, dim, self.rank, self.world_size)

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum of every rank's `x`, which it may overwrite; on the CPU its bits depend on nothing else.

        The ring that gloo sums along cuts a tensor by its length, so that a row's bits would depend on the batch:
        there every rank adds all parts in the order of ranks.
        """
        if self.world_size == 1:
            return x
        if x.device.type != "cpu":
            distributed.all_reduce(x, group=self.group)
            return x
        parts = [torch.empty_like(x) for _ in range(self.world_size)]
        distributed.all_gather(parts, x, group=self.group)
        for part in parts[1:]:
            parts[0] += part
        return parts[0]

    def gather(self, x: Tensor) -> Tensor:
        """Return every rank's `x`, joined along the last dimension in the order of ranks; only rank 0 gets more than
        its own."""
        if self.world_size == 1:
            return x
        parts = [torch.empty_like(x) for _ in range(self.world_size)] if self.rank == 0 else None
        distributed.gather(x, parts, dst=0, group=self.group)
        return torch.cat(parts, dim=-1) if parts is not None else x

    def broadcast(self, x: Tensor) -> Tensor:
        """Return `x`, overwritten by rank 0's."""
        if self.world_size > 1:
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
        distributed.all_reduce(least, op=distributed.ReduceOp.MIN, group=self.group)
        return int(least)


ALONE = TensorParallel()


class Module(nn.Module):
    """A module that returns one tensor."""

    __call__: Callable[..., Tensor]


class Layer(Module):
    """A module with parameters of its own."""

    weight: Tensor

    def shards(self, leaf: str) -> tuple[Shard, ...]:
        """Return which part of the checkpoint parameter `leaf` is: one Shard for each layer it is fused from."""
        raise NotImplementedError

    def finish_loading(self) -> None:
        """Turn the loaded parameters into the form that runs."""


class RMSNorm(Layer):
    def __init__(self, size: int, eps: float, backend: Backend) -> None:
        super().__init__()
        self.backend = backend
        self.weight = _parameter(size)
        self.eps = eps

    def shards(self, leaf: str) -> tuple[Shard, ...]:
        return (Shard(len(self.weight)),)

    def forward(self, x: Tensor) -> Tensor:
        """Return `x`, normalized along its last dimension."""
        return self.backend.rms_norm(x, self.weight, self.eps)

    def add(self, x_TE: Tensor, residual_TE: Tensor) -> Tensor:
        """Add `x` to the float32 residual in place and return the sum, normalized, in x's dtype."""
        return self.backend.add_rms_norm(x_TE, residual_TE, self.weight, self.eps)


class Linear(Layer):
    """A product with a weight that is packed once it is loaded; the raw weight is then let go."""

    bias: Tensor | None
    packed: Any  # what the backend makes of weight and bias

    def __init__(self, in_features: int, out_features: int, bias: bool, backend: Backend) -> None:
        super().__init__()
        self.backend = backend
        self.weight = _parameter(out_features, in_features)
        self.bias = _parameter(out_features) if bias else None

    def finish_loading(self) -> None:
        self.packed = self.backend.pack_linear(self.weight, self._own_bias())
        del self.weight, self.bias

    def forward(self, x_TE: Tensor) -> Tensor:
        return self.backend.linear(x_TE, self.packed)

    def _own_bias(self) -> Tensor | None:
        return self.bias


class ColumnParallelLinear(Linear):
    """Each rank has its share of the output features; several layers of equal split may be fused into one."""

    def __init__(
        self, in_features: int, out_features: tuple[int, ...], bias: bool, parallel: TensorParallel, backend: Backend
    ) -> None:
        share = sum(parallel.share(features, "output features") for features in out_features)
        super().__init__(in_features, share, bias, backend)
        self._shards = tuple(parallel.shard(features) for features in out_features)

    def shards(self, leaf: str) -> tuple[Shard, ...]:
        return self._shards


class QKVParallelLinear(Linear):
    """Queries, keys and values of this rank's heads; with fewer KV heads than ranks, several ranks hold one."""

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        bias: bool,
        parallel: TensorParallel,
        backend: Backend,
    ) -> None:
        self.num_heads = parallel.share(num_heads, "num_attention_heads")
        self.num_kv_heads = num_kv_heads_of_rank(num_kv_heads, parallel.world_size)
        num_kv_shards = num_kv_heads // self.num_kv_heads
        super().__init__(hidden_size, (self.num_heads + 2 * self.num_kv_heads) * head_dim, bias, backend)
        kv_index = parallel.rank * num_kv_shards // parallel.world_size
        kv_shard = Shard(num_kv_heads * head_dim, 0, kv_index, num_kv_shards)
        self._shards = (parallel.shard(num_heads * head_dim), kv_shard, kv_shard)

    def shards(self, leaf: str) -> tuple[Shard, ...]:
        return self._shards


class RowParallelLinear(Linear):
    """Each rank has its share of the input features; the ranks' products are summed."""

    def __init__(
        self, in_features: int, out_features: int, bias: bool, parallel: TensorParallel, backend: Backend
    ) -> None:
        super().__init__(parallel.share(in_features, "input features"), out_features, bias, backend)
        self._shards = {"weight": parallel.shard(in_features, dim=1), "bias": Shard(out_features)}
        self.parallel = parallel

    def shards(self, leaf: str) -> tuple[Shard, ...]:
        return (self._shards[leaf],)

    def forward(self, x_TE: Tensor) -> Tensor:
        return self.parallel.sum(self.backend.linear(x_TE, self.packed))

    def _own_bias(self) -> Tensor | None:
        # The sum over ranks must hold the bias once.
        return self.bias if self.parallel.rank == 0 else None


class VocabParallelEmbedding(Layer):
    """Each rank has its share of the vocabulary's rows, the last one filled up with zeros."""

    def __init__(self, vocab_size: int, hidden_size: int, parallel: TensorParallel) -> None:
        super().__init__()
        self.weight = _parameter(-(-vocab_size // parallel.world_size), hidden_size)
        self.vocab_size = vocab_size
        self.parallel = parallel

    def shards(self, leaf: str) -> tuple[Shard, ...]:
        return (self.parallel.shard(self.vocab_size),)

    def forward(self, token_ids_T: Tensor) -> Tensor:
        if self.parallel.world_size == 1:
            return nn.functional.embedding(token_ids_T, self.weight)
        num_rows = len(self.weight)
        rows_T = token_ids_T - self.parallel.rank * num_rows
        absent_T = (rows_T < 0) | (rows_T >= num_rows)
        own_TE = nn.functional.embedding(rows_T.masked_fill(absent_T, 0), self.weight)
        return self.parallel.sum(own_TE.masked_fill_(absent_T[:, None], 0))


class LMHead(Linear):
    """Logits of the whole vocabulary, float32, on rank 0; each rank computes those of its rows and gives them to it."""

    def __init__(self, hidden_size: int, vocab_size: int, parallel: TensorParallel, backend: Backend) -> None:
        super().__init__(hidden_size, -(-vocab_size // parallel.world_size), bias=False, backend=backend)
        self.vocab_size = vocab_size
        self.parallel = parallel

    def shards(self, leaf: str) -> tuple[Shard, ...]:
        return (self.parallel.shard(self.vocab_size),)

    def forward(self, x_TE: Tensor) -> Tensor:
        logits_TN = self.backend.linear(x_TE, self.packed, torch.float32)
        return self.parallel.gather(logits_TN)[:, : self.vocab_size]


def _parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, device="meta"), requires_grad=False)
