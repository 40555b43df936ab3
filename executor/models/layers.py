"""Layers that carry tensor parallelism in their type, so that a model contains no collective.

Parameters are born on the meta device with this rank's shape; `models.weights` fills them. A layer says which part of
a checkpoint's tensor each of its parameters is (`shards`); it does not load.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from octavo.executor.models.inputs import StepInputs
from octavo.executor.models.split import num_kv_heads_of_rank
from octavo.executor.parallel import TensorParallel
from octavo.executor.shards import Shard
from octavo.kernels.backend import Backend, PackedLinear
from octavo.kernels.groupwise import GroupwiseWeight

# T tokens of this step, E hidden size, N output features of this rank, V vocabulary

# What a parameter is made of: one tensor, or parts of different forms, one after the other.
Parts = Sequence[Tensor | GroupwiseWeight]


class Module(nn.Module):
    """A module that returns one tensor."""

    __call__: Callable[..., Tensor]


class WeightModule(Module):
    """A module with parameters of its own."""

    weight: Tensor
    can_be_quantized = False  # whether `fill` is to be given a weight's groupwise parts as they are
    can_be_rounded = False  # whether a plain weight may be rounded to few bits where that is asked for

    def shards(self, leaf: str) -> tuple[Shard, ...]:
        """Return which part of the checkpoint parameter `leaf` is: one Shard for each layer it is fused from."""
        raise NotImplementedError

    def fill(self, parameters: Mapping[str, Parts], dtype: torch.dtype) -> None:
        """Take all parameters, in the form that runs with activations of `dtype`."""
        for leaf, parts in parameters.items():
            setattr(self, leaf, nn.Parameter(_plain(parts), requires_grad=False))

    def tie(self, owner: "WeightModule") -> bool:
        """Share the packed weight of `owner`, which is this layer's weight too. Return whether `owner` has one."""
        return False


class RMSNorm(WeightModule):
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


class Linear(WeightModule):
    """A product with a weight that is packed once it is loaded; the raw weight is then let go.

    Parts of a fused weight that differ in form, such as a plain one among quantized ones, are products of their own.
    """

    can_be_quantized = True
    can_be_rounded = True

    bias: Tensor | None
    packed: list[PackedLinear]  # of each part and its bias

    def __init__(self, in_features: int, out_features: int, bias: bool, backend: Backend) -> None:
        super().__init__()
        self.backend = backend
        self.out_features = out_features  # of this rank
        self.weight = _parameter(out_features, in_features)
        self.bias = _parameter(out_features) if bias else None
        self.adds_bias = bias

    def fill(self, parameters: Mapping[str, Parts], dtype: torch.dtype) -> None:
        weights = parameters["weight"]
        sizes = [num_outputs(weight) for weight in weights]
        biases = torch.split(_plain(parameters["bias"]), sizes) if self.adds_bias else [None] * len(sizes)
        self.packed = [self.backend.pack_linear(weight, own) for weight, own in zip(weights, biases, strict=True)]
        del self.weight, self.bias

    def _product(self, x_TE: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
        products = [self.backend.linear(x_TE, packed, out_dtype) for packed in self.packed]
        return products[0] if len(products) == 1 else torch.cat(products, dim=-1)


class StepLinear(Linear):
    """A product with all rows of a step: row i of its input belongs to token i."""

    def forward(self, x_TE: Tensor, inputs: StepInputs) -> Tensor:
        return self._product_of_step(x_TE, inputs)

    def _product_of_step(self, x_TE: Tensor, inputs: StepInputs) -> Tensor:
        """Return the product. `inputs` says whose row each is, for terms that differ by row."""
        inputs.require_rows(x_TE)
        return self._product(x_TE)


class ColumnParallelLinear(StepLinear):
    """Each rank has its share of the output features; several layers of equal split may be fused into one."""

    def __init__(
        self, in_features: int, out_features: tuple[int, ...], bias: bool, parallel: TensorParallel, backend: Backend
    ) -> None:
        share = sum(parallel.share(features, "output features") for features in out_features)
        super().__init__(in_features, share, bias, backend)
        self._shards = tuple(parallel.shard(features) for features in out_features)

    def shards(self, leaf: str) -> tuple[Shard, ...]:
        return self._shards


class QKVParallelLinear(StepLinear):
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


class RowParallelLinear(StepLinear):
    """Each rank has its share of the input features; the ranks' products are summed."""

    def __init__(
        self, in_features: int, out_features: int, bias: bool, parallel: TensorParallel, backend: Backend
    ) -> None:
        super().__init__(parallel.share(in_features, "input features"), out_features, bias, backend)
        self._shards = {"weight": parallel.shard(in_features, dim=1), "bias": Shard(out_features)}
        self.parallel = parallel
        self.adds_bias = bias and parallel.rank == 0  # the sum over ranks must hold it once

    def shards(self, leaf: str) -> tuple[Shard, ...]:
        return (self._shards[leaf],)

    def forward(self, x_TE: Tensor, inputs: StepInputs) -> Tensor:
        return self.parallel.sum(self._product_of_step(x_TE, inputs))


class VocabParallelEmbedding(WeightModule):
    """Each rank has its share of the vocabulary's rows, the last one filled up with zeros.

    A quantized weight is packed, so that the head may share it; its rows come out in the dtype of the other weights.
    """

    can_be_quantized = True

    packed: PackedLinear | None  # of a quantized weight; None for a plain one
    dtype: torch.dtype

    def __init__(self, vocab_size: int, hidden_size: int, parallel: TensorParallel, backend: Backend) -> None:
        super().__init__()
        self.backend = backend
        self.num_rows = -(-vocab_size // parallel.world_size)
        self.weight = _parameter(self.num_rows, hidden_size)
        self.packed = None
        self.vocab_size = vocab_size
        self.parallel = parallel

    def shards(self, leaf: str) -> tuple[Shard, ...]:
        return (self.parallel.shard(self.vocab_size),)

    def fill(self, parameters: Mapping[str, Parts], dtype: torch.dtype) -> None:
        self.dtype = dtype
        [weight] = parameters["weight"]
        if isinstance(weight, GroupwiseWeight):
            self.packed = self.backend.pack_linear(weight)
            del self.weight
        else:
            super().fill(parameters, dtype)

    def forward(self, token_ids_T: Tensor) -> Tensor:
        if self.parallel.world_size == 1:
            return self._rows(token_ids_T)
        rows_T = token_ids_T - self.parallel.rank * self.num_rows
        absent_T = (rows_T < 0) | (rows_T >= self.num_rows)
        own_TE = self._rows(rows_T.masked_fill(absent_T, 0))
        return self.parallel.sum(own_TE.masked_fill_(absent_T[:, None], 0))

    def _rows(self, rows_T: Tensor) -> Tensor:
        if self.packed is None:
            return nn.functional.embedding(rows_T, self.weight)
        return self.backend.embedding(rows_T, self.packed, self.dtype)


class LMHead(Linear):
    """Logits of the whole vocabulary, float32, on rank 0; each rank computes those of its rows and gives them to it."""

    can_be_rounded = False

    def __init__(self, hidden_size: int, vocab_size: int, parallel: TensorParallel, backend: Backend) -> None:
        super().__init__(hidden_size, -(-vocab_size // parallel.world_size), bias=False, backend=backend)
        self.vocab_size = vocab_size
        self.parallel = parallel

    def shards(self, leaf: str) -> tuple[Shard, ...]:
        return (self.parallel.shard(self.vocab_size),)

    def tie(self, owner: WeightModule) -> bool:
        if not isinstance(owner, VocabParallelEmbedding) or owner.packed is None:
            return False
        self.packed = [owner.packed]
        del self.weight, self.bias
        return True

    def forward(self, x_TE: Tensor) -> Tensor:
        logits_TV = self.parallel.gather(self._product(x_TE, torch.float32))
        return logits_TV if logits_TV.shape[1] == self.vocab_size else logits_TV[:, : self.vocab_size]


def packed_weights(model: nn.Module) -> list[PackedLinear]:
    """Return what the backend made of weights, each once: a head may share the embedding's."""
    products = [packed for layer in model.modules() if isinstance(layer, Linear) for packed in layer.packed]
    embeddings = [layer.packed for layer in model.modules() if isinstance(layer, VocabParallelEmbedding)]
    return list({id(packed): packed for packed in (*products, *embeddings) if packed is not None}.values())


def num_outputs(weight: Tensor | GroupwiseWeight) -> int:
    return weight.num_outputs if isinstance(weight, GroupwiseWeight) else len(weight)


def _plain(parts: Parts) -> Tensor:
    """Return what is one plain tensor."""
    [whole] = parts
    assert isinstance(whole, Tensor)
    return whole


def _parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, device="meta"), requires_grad=False)
