"""From the hidden states of a prompt to its vector.

A checkpoint of sentence-transformers says how in files of its own (`modules.json` names them); any other decoder's
vector is the hidden state of the last token. Vectors have length 1 unless modules.json says otherwise.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from octavo.protocol.model_files.bounded import read_bounded

# C tokens of a chunk of one prompt, E hidden size, O numbers of a vector

PoolingKind = Literal["last", "mean", "cls"]
MODULES = "modules.json"
NORMALIZE, DENSE, POOLING, TRANSFORMER = "Normalize", "Dense", "Pooling", "Transformer"
# Keys of 1_Pooling/config.json that are true for what a checkpoint does.
KINDS: dict[str, PoolingKind] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "last",
}
NAMES: dict[str, PoolingKind] = {"cls": "cls", "mean": "mean", "lasttoken": "last"}  # values of "pooling_mode"
ACTIVATIONS = {
    "torch.nn.modules.linear.Identity": nn.Identity,
    "torch.nn.modules.activation.Tanh": nn.Tanh,
    "torch.nn.modules.activation.GELU": nn.GELU,
    "torch.nn.modules.activation.ReLU": nn.ReLU,
}


@dataclass(frozen=True, slots=True)
class DenseLayer:
    """A linear layer after pooling, float32."""

    weight_OE: Tensor
    bias_O: Tensor | None
    activation: nn.Module

    def __call__(self, vector_E: Tensor) -> Tensor:
        vector_O: Tensor = self.activation(nn.functional.linear(vector_E, self.weight_OE, self.bias_O))
        return vector_O


@dataclass(frozen=True, slots=True)
class Pooling:
    """How a checkpoint makes a vector of a prompt."""

    kind: PoolingKind = "last"
    layers: tuple[DenseLayer, ...] = ()
    normalizes: bool = True

    @property
    def needs_all_tokens(self) -> bool:
        """Whether the hidden state of each token counts, or that of the first one: none may come from a cache."""
        return self.kind != "last"

    def size(self, hidden_size: int) -> int:
        """Return how many numbers a vector has."""
        return len(self.layers[-1].weight_OE) if self.layers else hidden_size

    def add(self, collected_E: Tensor | None, hidden_CE: Tensor) -> Tensor:
        """Return what is kept of a prompt after its next chunk; `collected_E` is what was kept before, or None."""
        if self.kind == "last":
            return hidden_CE[-1].to(torch.float32, copy=True)  # a CUDA graph writes its rows again
        if self.kind == "cls":
            return hidden_CE[0].to(torch.float32, copy=True) if collected_E is None else collected_E
        sum_E = hidden_CE.float().sum(0)
        return sum_E if collected_E is None else collected_E + sum_E

    def vector(self, collected_E: Tensor, num_tokens: int) -> Tensor:
        """Return the vector of a prompt of `num_tokens` whose last chunk was added, float32."""
        vector_E = collected_E / num_tokens if self.kind == "mean" else collected_E
        for layer in self.layers:
            vector_E = layer(vector_E)
        return nn.functional.normalize(vector_E, dim=0) if self.normalizes else vector_E


TAKES_LAST = Pooling()


def read_pooling(directory: Path, asked: PoolingKind | Literal["auto"], device: torch.device) -> Pooling:
    """Return how the checkpoint pools; `asked` replaces the kind that the checkpoint names.

    Raises ValueError, which names the file, for a module that is not supported.
    """
    pooling = _read_modules(directory, device) if (directory / MODULES).is_file() else Pooling()
    if asked == "auto":
        return pooling
    return Pooling(asked, pooling.layers, pooling.normalizes)


def max_seq_length(directory: Path) -> int | None:
    """Return the longest prompt, in tokens, that a checkpoint of sentence-transformers says it is made for."""
    path = directory / "sentence_bert_config.json"
    length = _read(path).get("max_seq_length") if path.is_file() else None
    return length if isinstance(length, int) and length > 0 else None


def _read_modules(directory: Path, device: torch.device) -> Pooling:
    path = directory / MODULES
    kind: PoolingKind | None = None
    layers: list[DenseLayer] = []
    normalizes = False
    for name, folder in _modules(path):
        if name == POOLING:
            kind = _kind(directory / folder / "config.json")
        elif name == DENSE:
            layers.append(_dense(directory / folder, device))
        elif name == NORMALIZE:
            normalizes = True
        elif name != TRANSFORMER:
            raise ValueError(f"{path}: the module {name!r} is not supported")
    return Pooling(kind or "last", tuple(layers), normalizes)


def _modules(path: Path) -> list[tuple[str, str]]:
    """Return the name of each module's class, and its folder, which lies in the checkpoint."""
    listed = _read(path)
    try:
        modules = [(str(each["type"]).rpartition(".")[2], str(each.get("path", ""))) for each in listed]
    except (TypeError, KeyError, AttributeError):
        raise ValueError(f"{path} is not a list of modules. Download the model again") from None
    for _, folder in modules:
        if Path(folder).is_absolute() or ".." in Path(folder).parts:
            raise ValueError(f"{path}: the path {folder!r} leads out of the model's directory")
    return modules


def _kind(path: Path) -> PoolingKind:
    said = _read(path)
    if isinstance(name := said.get("pooling_mode"), str):
        asked = [name]
    else:
        asked = [key for key, value in said.items() if key.startswith("pooling_mode_") and value is True]
    known = NAMES | KINDS
    if len(asked) == 1 and asked[0] in known:
        return known[asked[0]]
    raise ValueError(f"{path}: pooling by {', '.join(asked) or 'nothing'} is not supported: set --pooling")


def _dense(folder: Path, device: torch.device) -> DenseLayer:
    said = _read(folder / "config.json")
    name = str(said.get("activation_function", "torch.nn.modules.activation.Tanh"))
    if name not in ACTIVATIONS:
        raise ValueError(f"{folder / 'config.json'}: the activation {name} is not supported")
    path = folder / "model.safetensors"
    if not path.is_file():
        raise ValueError(f"{path} does not exist: a Dense module without safetensors is not supported")
    tensors = {key: tensor.float().to(device) for key, tensor in load_file(path).items()}
    if "linear.weight" not in tensors:
        raise ValueError(f"{path} lacks linear.weight. Download the model again")
    return DenseLayer(tensors["linear.weight"], tensors.get("linear.bias"), ACTIVATIONS[name]())


def _read(path: Path) -> Any:
    try:
        return json.loads(read_bounded(path))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read: {error}. Download the model again") from None
