"""Weights of older checkpoints under the names of the Llama family: renamed, split, and brought to one convention."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from torch import Tensor
from torch.nn import functional

from octavo.executor.models.config import ModelConfig
from octavo.executor.models.weights import NamedSource
from octavo.executor.shards import Shard
from octavo.kernels.groupwise import GroupwiseWeight

LAYERS = "model.layers."  # ours


@dataclass(frozen=True, slots=True, kw_only=True)
class Renaming:
    """An architecture's names of modules, by our names. Several of our modules with one name of theirs are stacked
    there, in the order of this mapping, the first on top.
    """

    layers: str = LAYERS
    of_layer: Mapping[str, str] = field(default_factory=dict)
    around: Mapping[str, str] = field(default_factory=dict)
    unneeded: frozenset[str] = frozenset()
    # In the rotary part of a head, component 2i is paired with 2i + 1, and not i with i + R / 2.
    interleaved_rotary: bool = False


RENAMINGS = {
    "baichuan": Renaming(
        of_layer={
            "self_attn.q_proj": "self_attn.W_pack",
            "self_attn.k_proj": "self_attn.W_pack",
            "self_attn.v_proj": "self_attn.W_pack",
        },
    ),
    "chatglm": Renaming(
        layers="transformer.encoder.layers.",
        of_layer={
            "self_attn.q_proj": "self_attention.query_key_value",
            "self_attn.k_proj": "self_attention.query_key_value",
            "self_attn.v_proj": "self_attention.query_key_value",
            "self_attn.o_proj": "self_attention.dense",
            "mlp.gate_proj": "mlp.dense_h_to_4h",
            "mlp.up_proj": "mlp.dense_h_to_4h",
            "mlp.down_proj": "mlp.dense_4h_to_h",
        },
        around={
            "model.embed_tokens": "transformer.embedding.word_embeddings",
            "model.norm": "transformer.encoder.final_layernorm",
            "lm_head": "transformer.output_layer",
        },
        unneeded=frozenset({"transformer.rotary_pos_emb.inv_freq"}),
        interleaved_rotary=True,
    ),
    "qwen": Renaming(
        layers="transformer.h.",
        of_layer={
            "input_layernorm": "ln_1",
            "post_attention_layernorm": "ln_2",
            "self_attn.q_proj": "attn.c_attn",
            "self_attn.k_proj": "attn.c_attn",
            "self_attn.v_proj": "attn.c_attn",
            "self_attn.o_proj": "attn.c_proj",
            "mlp.gate_proj": "mlp.w2",
            "mlp.up_proj": "mlp.w1",
            "mlp.down_proj": "mlp.c_proj",
        },
        around={"model.embed_tokens": "transformer.wte", "model.norm": "transformer.ln_f"},
    ),
}


@dataclass(frozen=True, slots=True)
class StackedShard(Shard):
    """A shard of `own_size` rows that begin at `offset` of a tensor of `size`."""

    offset: int = 0
    own_size: int = 0

    @property
    def bounds(self) -> tuple[int, int]:
        start, stop = Shard(self.own_size, self.dim, self.index, self.count).bounds
        return self.offset + start, self.offset + stop


class RenamedSource:
    """A Source that answers under our names from a checkpoint with theirs."""

    def __init__(self, source: NamedSource, renaming: Renaming, config: ModelConfig) -> None:
        self._source = source
        self._renaming = renaming
        self._config = config
        heads, kv_heads = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self._num_rows = {"self_attn.q_proj": heads, "self_attn.k_proj": kv_heads, "self_attn.v_proj": kv_heads}
        self._num_rows |= dict.fromkeys(("mlp.gate_proj", "mlp.up_proj"), config.intermediate_size)

    def check(self, needed: set[str], unneeded: set[str]) -> None:
        theirs = {self._theirs(name) for name in unneeded} | self._renaming.unneeded
        self._source.check({self._theirs(name) for name in needed}, theirs)

    def has(self, name: str) -> bool:
        return self._source.has(self._theirs(name))

    def equal(self, name: str, other: str) -> bool:
        return self._source.equal(self._theirs(name), self._theirs(other))

    def read(self, name: str, shard: Shard, part: Tensor) -> None:
        module = _module(name)
        self._source.read(self._theirs(name), self._stacked(module, shard), part)
        if self._is_interleaved(module):
            part.copy_(self._half_split(part))
        if self._config.normalized_head and name == "lm_head.weight":
            part.copy_(functional.normalize(part.float()))

    def read_groupwise(self, name: str, shard: Shard, shape: list[int]) -> GroupwiseWeight | None:
        module = _module(name)
        where = self._stacked(module, shard)
        stored_shape = [where.size if dim == where.dim else size for dim, size in enumerate(shape)]
        weight = self._source.read_groupwise(self._theirs(name), where, stored_shape)
        if weight is None:
            return None
        if self._config.normalized_head and name == "lm_head.weight":
            raise ValueError(f"{self._theirs(name)} is quantized, but its rows are to be normalized: not supported")
        return self._half_split_groupwise(weight) if self._is_interleaved(module) else weight

    def _is_interleaved(self, module: str) -> bool:
        return self._renaming.interleaved_rotary and module in ("self_attn.q_proj", "self_attn.k_proj")

    def _half_split(self, rows: Tensor) -> Tensor:
        return half_split(rows, self._config.head_dim, self._config.rotary_dim)

    def _half_split_groupwise(self, weight: GroupwiseWeight) -> GroupwiseWeight:
        offsets_NG = weight.offsets_NG
        return replace(
            weight,
            codes_NB=self._half_split(weight.codes_NB),
            scales_NG=self._half_split(weight.scales_NG),
            offsets_NG=None if offsets_NG is None else self._half_split(offsets_NG),
        )

    def _theirs(self, name: str) -> str:
        path, leaf = name.rsplit(".", 1)
        if not path.startswith(LAYERS):
            return f"{self._renaming.around.get(path, path)}.{leaf}"
        layer, module = path.removeprefix(LAYERS).split(".", 1)
        return f"{self._renaming.layers}{layer}.{self._renaming.of_layer.get(module, module)}.{leaf}"

    def _stacked(self, module: str, shard: Shard) -> Shard:
        """Return where the shard of one of our modules lies in their tensor."""
        of_layer = self._renaming.of_layer
        stack = [ours for ours, theirs in of_layer.items() if theirs == of_layer.get(module)]
        if len(stack) < 2:
            return shard
        sizes = [self._num_rows[ours] for ours in stack]
        offset = sum(sizes[: stack.index(module)])
        return StackedShard(sum(sizes), shard.dim, shard.index, shard.count, offset, shard.size)


def renamed(source: NamedSource, config: ModelConfig) -> NamedSource:
    """Return `source` under our names, whatever the checkpoint's architecture calls its weights."""
    return source if config.renaming is None else RenamedSource(source, RENAMINGS[config.renaming], config)


def half_split(rows: Tensor, head_dim: int, rotary_dim: int) -> Tensor:
    """Return the output rows of some heads, in each the first `rotary_dim` reordered: first the even, then the odd.

    A rotation that pairs component i with i + rotary_dim / 2 then does what one of neighbours did before; a product of
    queries and keys, both reordered, is the same.
    """
    order = [*range(0, rotary_dim, 2), *range(1, rotary_dim, 2), *range(rotary_dim, head_dim)]
    return rows.view(-1, head_dim, *rows.shape[1:])[:, order].flatten(0, 1)


def _module(name: str) -> str:
    """Return which module of its layer a parameter belongs to, such as self_attn.q_proj; "" around the layers."""
    return name.removeprefix(LAYERS).split(".", 1)[1].rsplit(".", 1)[0] if name.startswith(LAYERS) else ""
