"""What the floor has to know of a model that is loaded."""

from collections.abc import Iterable, Iterator
from typing import Any, Protocol, cast

import torch
from torch import nn

from octavo.bench.step.floor import AttentionLayer, ModelWork, Product
from octavo.executor.models import Decoder, LoadedModel
from octavo.executor.models.decoder import Attention
from octavo.executor.models.layers import VocabParallelEmbedding
from octavo.kernels.backend import PackedLinear
from octavo.kernels.cpu.products import has_bfloat16


class SizedLinear(PackedLinear, Protocol):
    """What `kernels.cpu` packs."""

    num_inputs: int
    num_outputs: int


def model_work(model: LoadedModel, activation_dtype: torch.dtype, kv_dtype: torch.dtype) -> ModelWork:
    """Return the work of a model whose products are those of `kernels.cpu`.

    Not counted are experts of models of the second tier, which are no packed products.
    """
    names = product_names(model)
    products = [
        _product(names[id(packed)], cast(SizedLinear, packed), activation_dtype, model.vocab_size)
        for packed in model.products
    ]
    norms = [parameter for parameter in model.parameters() if parameter.dim() == 1]
    return ModelWork(products, list(_attention(model)), kv_dtype.itemsize, sum(norm.nbytes for norm in norms))


def product_names(model: LoadedModel) -> dict[int, str]:
    """Return what each packed weight is called, by its identity: the last part of its layer's path."""
    return {id(packed): path.rpartition(".")[-1] for path, packed in packed_of(cast(nn.Module, model))}


def packed_of(module: nn.Module) -> Iterator[tuple[str, PackedLinear]]:
    """Yield the packed weights below `module` with the paths of their layers; an embedding's only as the head's."""
    for path, layer in module.named_modules():
        if isinstance(layer, VocabParallelEmbedding):
            continue
        packed = getattr(layer, "packed", ())
        for one in packed if isinstance(packed, Iterable) else (packed,):
            yield path, one


def _product(name: str, packed: SizedLinear, activation_dtype: torch.dtype, vocab_size: int) -> Product:
    num_weights = packed.num_inputs * packed.num_outputs
    is_plain = packed.nbytes >= 2 * num_weights
    has_instructions = activation_dtype == torch.bfloat16 and has_bfloat16()
    dtype = "bfloat16" if is_plain and has_instructions else "float32"
    return Product(name, num_weights, packed.nbytes, dtype, only_sampled=packed.num_outputs >= vocab_size)


def _attention(model: LoadedModel) -> Iterator[AttentionLayer]:
    """Yield the layers' attention. Of transformers' code it is only known how many KV heads there are."""
    if isinstance(model, Decoder):
        for layer, shape in zip(model.model.layers, model.kv_shapes, strict=True):
            attention = cast(Attention, layer.self_attn)
            yield AttentionLayer(attention.num_heads, *shape, attention.sliding_window)
    else:
        for layer, shape in zip(model.layers, model.kv_shapes, strict=True):
            yield AttentionLayer(shape[0], *shape, cast(Any, layer).paged.sliding_window)
