"""How much memory a model takes, counted without reading a weight.

Its modules are built on the meta device; each weight counts in the form in which it is held.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch import nn

from octavo.executor.checkpoints.gguf import read_index
from octavo.executor.models import Decoder, ModelConfig, ModelDescription, TensorParallel
from octavo.executor.models.kv_caches import KVShape
from octavo.executor.models.layers import LMHead, VocabParallelEmbedding, WeightModule
from octavo.executor.models.plan import rounded_bits
from octavo.executor.models.weights import source_names
from octavo.executor.parallel import ALONE
from octavo.executor.quantization.groups import whole_groups
from octavo.executor.quantization.held import HeldForm, gguf_form, packed_form, rounded_form
from octavo.executor.shards import Shard
from octavo.kernels.backend import Backend
from octavo.protocol.config import Config

Kind = Literal["embedding", "projection", "head", "tied head", "router"]
MOST_RANKS = 256  # splits among more ranks are not counted


@dataclass(frozen=True, slots=True)
class Footprint:
    """Weights and KV cache of one rank. A plain tied weight is held twice, a packed one once; both count as held."""

    num_parameters: int  # a tied one once
    num_plain: int  # norms, biases, a plain embedding
    num_products: int  # plain weights of products, the head among them
    num_quantized: int  # quantized weights
    quantized_bytes: int  # of the quantized weights, with their scales and offsets
    kv_shapes: list[KVShape]

    @property
    def quantized_bits(self) -> float:
        """Return the bits of a quantized weight, on the average. There must be at least one."""
        return 8 * self.quantized_bytes / self.num_quantized

    def weight_bytes(self, dtype: torch.dtype) -> int:
        """Return the memory of the weights; plain weights have `dtype`."""
        return (self.num_plain + self.num_products) * dtype.itemsize + self.quantized_bytes

    def kv_bytes(self, dtype: torch.dtype) -> int:
        """Return the bytes of one token's keys and values in all layers, in `dtype`."""
        return dtype.itemsize * sum(heads * (key_size + value_size) for heads, key_size, value_size in self.kv_shapes)


class Weight(NamedTuple):
    """A matrix of the checkpoint, or a rank's part of it."""

    name: str  # a tied head has the embedding's name
    num_outputs: int
    num_inputs: int
    shard: Shard
    kind: Kind


class WeightForms(NamedTuple):
    """Which weights are quantized, and how."""

    description: str
    form_of: Callable[[Weight], HeldForm | None]


PLAIN = WeightForms("plain", lambda weight: None)


def choose_forms(directory: Path, model: ModelDescription, config: Config) -> WeightForms:
    """Return the forms in which `load_model` would hold the weights. Raises ValueError if it would refuse."""
    found = model.quantization
    bits = rounded_bits(config.load_format, config.quantization, found)
    if bits is not None:
        return _projections(f"rounded to int{bits}", lambda size: rounded_form(bits, size))
    if found is None or config.load_format == "dummy":
        return PLAIN
    if found.method == "gguf":
        kinds = {name: tensor.type for name, tensor in read_index(directory).tensors.items()}
        # A missing tensor is an error at load.
        return WeightForms("weights as the GGUF file has them", lambda weight: gguf_form(kinds.get(weight.name, "")))
    return _projections(f"in {found.method}", lambda size: packed_form(found, size))


def _projections(how: str, form_of: Callable[[int], HeldForm | None]) -> WeightForms:
    """Return forms for projections, by their number of inputs; embedding and head stay plain."""

    def form_of_weight(weight: Weight) -> HeldForm | None:
        return form_of(weight.num_inputs) if weight.kind == "projection" else None

    return WeightForms(f"projections {how}", form_of_weight)


def native_footprint(
    config: ModelConfig, backend: Backend, parallel: TensorParallel = ALONE, forms: WeightForms = PLAIN
) -> Footprint:
    """Count a model of `executor.models`. Raises ValueError if it cannot be divided among the ranks."""
    model = Decoder(config, torch.empty(0, device="meta"), backend, parallel)
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    num_parameters = sum(size for name, size in sizes.items() if name not in model.tied)
    return _footprint(num_parameters, sum(sizes.values()), _native_weights(model), forms, model.kv_shapes)


def native_footprints(config: ModelConfig, backend: Backend, forms: WeightForms = PLAIN) -> dict[int, Footprint]:
    """Return what the first rank holds, for each possible number of ranks."""
    found = {}
    for world_size in range(1, min(config.num_heads, MOST_RANKS) + 1):
        try:
            found[world_size] = native_footprint(config, backend, TensorParallel(0, world_size), forms)
        except ValueError:
            continue
    return found


def borrowed_footprint(config: ModelDescription, forms: WeightForms = PLAIN) -> Footprint:
    """Count a model of `executor.models.borrowed`; such a model cannot be divided."""
    from octavo.executor.models.borrowed import BorrowedConfig, EncoderConfig
    from octavo.executor.models.borrowed.decoder import is_product, may_choose_experts

    assert isinstance(config, BorrowedConfig | EncoderConfig)
    model = config.build("meta", config.dtype)
    model.tie_weights()
    sizes = {id(parameter): parameter.numel() for parameter in model.parameters()}
    products = {id(module.weight): (path, module) for path, module in model.named_modules() if is_product(module)}
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    num_tied = sum(sizes[product] for product in products.keys() & embeddings)
    head = model.get_output_embeddings()
    weights = []
    for path, module in products.values():
        num_outputs, num_inputs = module.weight.shape if isinstance(module, nn.Linear) else module.weight.T.shape
        kind: Kind = "head" if module is head else "projection"
        if may_choose_experts(path, num_outputs):
            kind = "router"
        weights.append(Weight("", num_outputs, num_inputs, Shard(num_outputs), kind))
    num_parameters = sum(sizes.values())
    return _footprint(num_parameters, num_parameters + num_tied, weights, forms, config.kv_shapes)


def _native_weights(model: Decoder) -> Iterator[Weight]:
    for path, layer in model.named_modules():
        if isinstance(layer, WeightModule) and layer.can_be_quantized:
            num_outputs, num_inputs = layer.weight.shape
            names, shards = source_names(f"{path}.weight"), layer.shards("weight")
            bounds = [shard.bounds for shard in shards]
            rows = [stop - start for start, stop in bounds] if len(shards) > 1 else [num_outputs]
            for name, shard, num_rows in zip(names, shards, rows, strict=True):
                kind = _kind(layer, is_tied=name in model.tied)
                yield Weight(model.tied.get(name, name), num_rows, num_inputs, shard, kind)


def _kind(layer: WeightModule, is_tied: bool) -> Kind:
    if isinstance(layer, VocabParallelEmbedding):
        return "embedding"
    if isinstance(layer, LMHead):
        return "tied head" if is_tied else "head"
    return "projection"


def _footprint(
    num_parameters: int, num_held: int, weights: Iterable[Weight], forms: WeightForms, kv_shapes: list[KVShape]
) -> Footprint:
    """Return the Footprint of `num_held` numbers in all; `weights` are some of them."""
    num_plain, num_products, num_quantized, quantized_bits = num_held, 0, 0, 0.0
    for weight in weights:
        form, size = forms.form_of(weight), weight.num_outputs * weight.num_inputs
        if form is None and weight.kind == "embedding":
            continue
        num_plain -= size
        if form is None:
            num_products += size
        elif weight.kind != "tied head":  # a tied head shares the codes of the embedding
            if weight.shard.dim == 1:
                whole_groups(weight.shard, form.group_size)
            num_quantized += size
            quantized_bits += size * form.bits_per_weight
    return Footprint(num_parameters, num_plain, num_products, num_quantized, round(quantized_bits / 8), kv_shapes)
