"""What a model takes, counted from its config.json: its modules on the meta device, without a weight."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from executor.memory import KVShape
from executor.models import Decoder, ModelConfig, TensorParallel
from executor.models.layers import ALONE, Layer, Linear, LMHead
from kernels import Backend

MOST_RANKS = 256  # for which a split is counted
ROUNDED_GROUP_SIZE = 128  # inputs that share a scale where `--quantization` rounds
SCALE_BITS, OFFSET_BITS = 16, 32  # of a group in a checkpoint; rounding makes offsets of 16


class WeightForm(NamedTuple):
    """How the weights of products are held, if not plainly."""

    name: str
    bits: float  # a weight, its share of scales and offsets included


@dataclass(frozen=True, slots=True)
class Footprint:
    """Weights and KV cache of one rank."""

    num_parameters: int  # a tied one once
    num_plain: int  # weights that are held in the model's dtype; a tied head is packed, and so held once more
    num_products: int  # weights that may be held in fewer bits
    kv_shapes: list[KVShape]

    def weight_bytes(self, dtype: torch.dtype, form: WeightForm | None = None) -> int:
        """Return the memory of the weights; those of products are held in `form`, if there is one."""
        product_bits = 8 * dtype.itemsize if form is None else form.bits
        return self.num_plain * dtype.itemsize + round(self.num_products * product_bits / 8)

    def kv_bytes(self, dtype: torch.dtype) -> int:
        """Return the bytes of one token's keys and values in all layers."""
        return dtype.itemsize * sum(heads * (key_size + value_size) for heads, key_size, value_size in self.kv_shapes)


def native_footprint(config: ModelConfig, backend: Backend, parallel: TensorParallel = ALONE) -> Footprint:
    """Count a model of `executor.models`. Raises ValueError if it cannot be divided among that many ranks."""
    model = Decoder(config, torch.empty(0, device="meta"), backend, parallel)
    held = num_products = num_tied = 0
    for path, layer in model.named_modules():
        if isinstance(layer, Layer):
            sizes = {f"{path}.{leaf}": parameter.numel() for leaf, parameter in layer.named_parameters()}
            held += sum(sizes.values())
            num_tied += sum(size for name, size in sizes.items() if name in model.tied)
            if isinstance(layer, Linear) and not isinstance(layer, LMHead):
                num_products += layer.weight.numel()
    return Footprint(held - num_tied, held - num_products, num_products, model.kv_shapes)


def native_footprints(config: ModelConfig, backend: Backend) -> dict[int, Footprint]:
    """Return what the first rank holds, for each number of ranks among which the model can be divided."""
    found = {}
    for world_size in range(1, min(config.num_heads, MOST_RANKS) + 1):
        try:
            found[world_size] = native_footprint(config, backend, TensorParallel(0, world_size))
        except ValueError:
            continue
    return found


def weight_form(quantization_config: Mapping[str, Any] | None, requested: str = "auto") -> WeightForm | None:
    """Return how the weights of products are held: as the checkpoint stores them, or as `requested` at load.

    None is the model's dtype, which 8-bit floats are brought to. Raises ValueError for a method that is not known.
    """
    if requested in ("int8", "int4"):
        bits, offset_bits = (8, 0) if requested == "int8" else (4, 16)
        return WeightForm(requested, bits + (SCALE_BITS + offset_bits) / ROUNDED_GROUP_SIZE)
    said = quantization_config or {}
    if not isinstance(said, Mapping):
        raise ValueError(f"quantization_config is no object but {said!r}")
    method = said.get("quant_method", "unnamed")
    match method:
        case "awq" | "gptq":
            bits = said.get("bits", said.get("w_bit", 4))
            group_size = said.get("group_size", said.get("q_group_size", 128))
            if not (isinstance(bits, int) and isinstance(group_size, int)):
                raise ValueError(f"quantization_config of {method} has bits {bits!r} and group_size {group_size!r}")
            has_offsets = said.get("zero_point", True) if method == "awq" else not said.get("sym", True)
            group_bits = SCALE_BITS + (OFFSET_BITS if has_offsets else 0)
            return WeightForm(f"{method} of {bits} bits", bits + (group_bits / group_size if group_size > 0 else 0))
        case "fp8" | "compressed-tensors":
            return None
        case _ if not said:
            return None
    raise ValueError(f"quantization_config has a quant_method {method!r}, which is not known")


class TransformersModel(NamedTuple):
    """An architecture that only transformers has, as far as its memory goes."""

    architecture: str
    dtype: torch.dtype
    max_position_embeddings: int
    footprint: Footprint


def read_transformers_model(directory: Path, *, trust_remote_code: bool) -> TransformersModel:
    """Count a model of transformers. Raises ValueError if it does not know the architecture."""
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(directory, trust_remote_code=trust_remote_code, local_files_only=True)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ValueError(f"{directory / 'config.json'}: transformers cannot build it: {error}") from None
    text = config.get_text_config()
    head = model.get_output_embeddings()
    unique = {id(parameter): parameter.numel() for parameter in model.parameters()}
    linears = {id(module.weight): module for module in model.modules() if type(module) is nn.Linear}
    num_products = sum(module.weight.numel() for module in linears.values() if module is not head)
    tied = head.weight.numel() if head is not None and text.tie_word_embeddings else 0
    num_parameters = sum(unique.values())
    footprint = Footprint(num_parameters, num_parameters + tied - num_products, num_products, _kv_shapes(text))
    dtype = text.dtype or torch.float32
    return TransformersModel(type(model).__name__, dtype, text.max_position_embeddings, footprint)


def _kv_shapes(config: Any) -> list[KVShape]:
    """Return each layer's heads and their sizes; compressed attention (DeepSeek's) keeps those of all its heads."""
    num_layers, num_heads = config.num_hidden_layers, config.num_attention_heads
    if getattr(config, "kv_lora_rank", None):
        return [(num_heads, config.qk_nope_head_dim + config.qk_rope_head_dim, config.v_head_dim)] * num_layers
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // num_heads
    return [(getattr(config, "num_key_value_heads", None) or num_heads, head_dim, head_dim)] * num_layers
