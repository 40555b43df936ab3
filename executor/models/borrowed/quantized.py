"""A quantized checkpoint for transformers' modelling code: 8-bit floats are multiplied out, packed weights stay so.

transformers loads what is plain (it renames and fuses tensors), each tensor read when it asks for it. In the place of
packed weights it gets stand-ins without memory; the linear layers that have them are then replaced.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers.pytorch_utils import Conv1D

from octavo.executor.checkpoints.checkpoint import Checkpoint, listed
from octavo.executor.models.borrowed.attention import CurrentStep, UnsupportedModelError
from octavo.executor.models.borrowed.decoder import is_product, packed_linear
from octavo.executor.quantization.groups import to_device
from octavo.executor.shards import Shard


class StoredTensor:
    """A tensor of a checkpoint that is read when all of it is asked for, as transformers does."""

    def __init__(self, checkpoint: Checkpoint, name: str) -> None:
        self._checkpoint = checkpoint
        self._name = name

    def __getitem__(self, everything: object) -> Tensor:
        return self._checkpoint.read_whole(self._name)


def find_packed(checkpoint: Checkpoint, model: Any) -> dict[str, str]:
    """Return the names of a checkpoint's packed weights, and the path of the linear layer of `model` that each is.

    Raises UnsupportedModelError if one is anything else there, such as a part of stacked experts.
    """
    layers = {name: _layer_path(model, name) for name in checkpoint.names() if checkpoint.is_packed(name)}
    if strays := {name for name, path in layers.items() if path is None}:
        raise UnsupportedModelError(
            f"{type(model).__name__} is not supported with these weights packed, which are no linear layers of their"
            f" own in transformers' modelling code (it stacks a layer's experts): {listed(strays)}"
        )
    return {name: path for name, path in layers.items() if path is not None}


def state_to_load(
    checkpoint: Checkpoint, packed: Mapping[str, str], model: Any, dtype: torch.dtype
) -> dict[str, Tensor | StoredTensor]:
    """Return what transformers is to load into a model like `model`, which may be on the meta device."""
    state: dict[str, Tensor | StoredTensor] = {}
    without_bias = {name.replace(".weight", ".bias") for name, path in packed.items() if _lacks_bias(model, path)}
    for name in checkpoint.names():
        if name in packed:
            weight = model.get_submodule(packed[name]).weight
            state[name] = torch.zeros((), dtype=dtype).expand(weight.shape)
        elif not (name in without_bias and checkpoint.is_empty_bias(name)):
            state[name] = StoredTensor(checkpoint, name)
    return state


def pack_stored(
    model: Any,
    checkpoint: Checkpoint,
    packed: Mapping[str, str],
    current: CurrentStep,
    device: torch.device,
    progress: Callable[[], None],
) -> None:
    """Replace the linear layers that `packed` names by products of what the checkpoint stores, on `device`.

    `progress` is called after each layer. Raises ValueError as `Checkpoint.read_groupwise` does.
    """
    head = model.get_output_embeddings()
    for name, path in packed.items():
        linear = model.get_submodule(path)
        shape = list(linear.weight.shape)
        if type(linear) is Conv1D:
            shape.reverse()
        weight = checkpoint.read_groupwise(name, Shard(shape[0]), shape)
        assert weight is not None
        model.set_submodule(path, packed_linear(linear, to_device(weight, device), current, is_head=linear is head))
        progress()


def _layer_path(model: Any, name: str) -> str | None:
    """Return the path of the linear layer that a weight belongs to; checkpoints of the body alone lack its prefix."""
    stem = name.removesuffix(".weight")
    for path in (stem, f"{model.base_model_prefix}.{stem}"):
        try:
            module = model.get_submodule(path)
        except AttributeError:
            continue
        if is_product(module):
            return path
    return None


def _lacks_bias(model: Any, path: str) -> bool:
    return model.get_submodule(path).bias is None
