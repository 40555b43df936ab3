"""Rotary frequencies of transformers' models, made independent of what is in a batch.

transformers computes "dynamic" and "longrope" frequencies anew from the largest position of a forward pass: here they
are those of `max_model_len`, once and for all.
"""

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

STATIC = "default"  # what transformers does not update


def make_rotary_static(model: nn.Module, max_model_len: int) -> None:
    """Give each rotary module of `model` the frequencies for sequences of `max_model_len` tokens, and keep them."""
    for module in _rotary_modules(model):
        if isinstance(module.rope_type, dict):
            for layer_type, rope_type in module.rope_type.items():
                _set_frequencies(module, rope_type, max_model_len, f"{layer_type}_", layer_type=layer_type)
            module.rope_type = dict.fromkeys(module.rope_type, STATIC)
        else:
            _set_frequencies(module, module.rope_type, max_model_len, "")
            module.rope_type = STATIC


def rotary_frequencies(model: nn.Module, max_model_len: int) -> str:
    """Return the model's frequencies at `max_model_len`, as text: equal frequencies give equal text."""
    frequencies = []
    for module in _rotary_modules(model):
        types = module.rope_type if isinstance(module.rope_type, dict) else {None: module.rope_type}
        for layer_type, rope_type in types.items():
            if _follows_length(rope_type):
                inv_freq, scaling = _frequencies(module, rope_type, max_model_len, "cpu", layer_type)
                frequencies.append((layer_type, inv_freq.tolist(), scaling))
    return repr(frequencies)


def stretched_tokens(config: Any, trained_tokens: int) -> tuple[int, int]:
    """Return the longest sequence that the model can be made to serve, and the longest without being asked.

    As in `executor.models.config.ModelConfig`: yarn says how far it reaches; checkpoints with linear or dynamic scaling
    do not say whether `max_position_embeddings` is the length before or after it, so both are allowed.
    """
    parameters = getattr(config, "rope_parameters", None) or {}
    rope_type, factor = parameters.get("rope_type"), parameters.get("factor") or 1.0
    original = parameters.get("original_max_position_embeddings") or trained_tokens
    if rope_type == "yarn":
        reach = max(trained_tokens, int(original * factor))
        return reach, reach
    if rope_type in ("linear", "dynamic"):
        return max(trained_tokens, int(trained_tokens * factor)), trained_tokens
    return trained_tokens, trained_tokens


def _rotary_modules(model: nn.Module) -> Iterator[Any]:
    for module in model.modules():
        if isinstance(getattr(module, "rope_type", None), (str, dict)):
            yield module


def _follows_length(rope_type: str) -> bool:
    return "dynamic" in rope_type or rope_type == "longrope"


def _frequencies(
    module: Any, rope_type: str, max_model_len: int, device: Any, layer_type: str | None
) -> tuple[Tensor, float]:
    keywords = {} if layer_type is None else {"layer_type": layer_type}
    inv_freq, scaling = ROPE_INIT_FUNCTIONS[rope_type](module.config, device, seq_len=max_model_len, **keywords)
    return inv_freq, float(scaling)


def _set_frequencies(
    module: Any, rope_type: str, max_model_len: int, prefix: str, layer_type: str | None = None
) -> None:
    if not _follows_length(rope_type):
        return
    device = getattr(module, f"{prefix}inv_freq").device
    inv_freq, scaling = _frequencies(module, rope_type, max_model_len, device, layer_type)
    setattr(module, f"{prefix}inv_freq", inv_freq)
    setattr(module, f"{prefix}attention_scaling", scaling)
