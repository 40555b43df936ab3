"""The floor: the time that a step takes at least on a machine, by what it has to move and to multiply. Pure arithmetic.

A step is divided into parts: products by the name of their layer, attention, what lies between. A part's floor is
max(bytes / read bandwidth, operations / product rate); a step's floor is the sum over its parts. Counted are

* of a product its weights, once, in the form in which they are held, and two operations for each multiply-add;
* of attention the keys and values that each sequence sees, once, and two operations for each multiply-add of a query
  and a key, and of a weight and a value;
* of norms their weights, of the KV store what it writes.

Activations and logits are taken to stay in the caches, operations that are no multiply-adds to cost nothing: a floor
leaves out rather than adds.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

ATTENTION, KV_STORE, NORMS = "attention", "rotary, KV store", "norms"


class Ceilings(msgspec.Struct, frozen=True):
    """What a machine can do at best."""

    read_bytes_per_s: float
    flops_per_s: dict[str, float]  # of products, by the name of the dtype they are computed in


class Work(NamedTuple):
    """What a part of a step has to do at least."""

    num_bytes: int = 0  # that come from memory or go there, each once
    num_flops: int = 0  # two for a multiply-add
    dtype: str = "float32"  # in which is multiplied

    def plus(self, other: "Work") -> "Work":
        """Return the work of both; they are of one dtype."""
        assert self.dtype == other.dtype
        return Work(self.num_bytes + other.num_bytes, self.num_flops + other.num_flops, self.dtype)


class StepShape(NamedTuple):
    """A step of equal shares: each sequence computes its last `num_new_tokens` of `seq_len` and samples once."""

    num_seqs: int
    num_new_tokens: int
    seq_len: int

    @property
    def num_tokens(self) -> int:
        return self.num_seqs * self.num_new_tokens


class Product(NamedTuple):
    """A packed weight."""

    name: str
    num_weights: int
    num_bytes: int  # as it is held
    dtype: str  # in which it is multiplied
    only_sampled: bool  # it is the head: its rows are those that sample, not all tokens


class AttentionLayer(NamedTuple):
    num_heads: int
    num_kv_heads: int
    key_size: int
    value_size: int
    sliding_window: int | None

    @property
    def kv_elements(self) -> int:
        """Return how many numbers a token's key and value are."""
        return self.num_kv_heads * (self.key_size + self.value_size)


@dataclass(frozen=True)
class ModelWork:
    """What the parts of any step of a model follow from."""

    products: Sequence[Product]
    attention: Sequence[AttentionLayer]
    kv_itemsize: int  # bytes of a number in the KV cache
    norm_bytes: int

    def parts(self, step: StepShape) -> dict[str, Work]:
        """Return the work of each part, in the order of a forward pass, the head last."""
        found: dict[str, Work] = {}
        for layer in self.attention:
            _add(found, ATTENTION, attention_work(layer, step, self.kv_itemsize))
            _add(found, KV_STORE, Work(step.num_tokens * layer.kv_elements * self.kv_itemsize))
        found[NORMS] = Work(self.norm_bytes)
        for product in self.products:
            _add(found, product.name, product_work(product, step))
        return found


def product_work(product: Product, step: StepShape) -> Work:
    """Return the work of a product in a step."""
    num_rows = step.num_seqs if product.only_sampled else step.num_tokens
    return Work(product.num_bytes, 2 * num_rows * product.num_weights, product.dtype)


def attention_work(layer: AttentionLayer, step: StepShape, kv_itemsize: int) -> Work:
    """Return the work of one layer's attention in a step."""
    num_read = seen_tokens(step, layer.sliding_window)
    num_pairs = seen_pairs(step, layer.sliding_window)
    num_flops = 2 * num_pairs * layer.num_heads * (layer.key_size + layer.value_size)
    return Work(step.num_seqs * num_read * layer.kv_elements * kv_itemsize, step.num_seqs * num_flops)


def seen_tokens(step: StepShape, sliding_window: int | None) -> int:
    """Return how many tokens of a sequence the new ones see, themselves included."""
    if sliding_window is None:
        return step.seq_len
    return min(step.seq_len, sliding_window + step.num_new_tokens - 1)


def seen_pairs(step: StepShape, sliding_window: int | None) -> int:
    """Return how many pairs of a new token and one that it sees a sequence has."""
    window = step.seq_len if sliding_window is None else sliding_window
    first = step.seq_len - step.num_new_tokens + 1  # tokens that the first new one sees without a window
    num_growing = max(0, min(step.seq_len, window) - first + 1)  # new tokens before the window is full
    growing = num_growing * (2 * first + num_growing - 1) // 2
    return growing + (step.num_new_tokens - num_growing) * window


def part_floor_s(work: Work, ceilings: Ceilings) -> float:
    """Return the least seconds of a part."""
    return max(work.num_bytes / ceilings.read_bytes_per_s, work.num_flops / ceilings.flops_per_s[work.dtype])


def step_floor_s(parts: Mapping[str, Work], ceilings: Ceilings) -> float:
    """Return the least seconds of a step: the sum over its parts."""
    return sum(part_floor_s(work, ceilings) for work in parts.values())


def _add(parts: dict[str, Work], name: str, work: Work) -> None:
    parts[name] = parts[name].plus(work) if name in parts else work
