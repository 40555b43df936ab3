"""A file of tensors that torch wrote (.bin), mapped. It is a pickle; only tensors are read from it."""

import re
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from octavo.protocol.model_files.torch_archive import damage

# safetensors' names of types
TYPE_OF_DTYPE = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
SAVE_IT = "Save the model as safetensors (save_pretrained does)"


class TorchFile:
    """The tensors of a file, as `safetensors.safe_open` would give them.

    Raises ValueError, naming it, if the file holds anything that is not a tensor, or is damaged. `weights_only` lets
    torch's own unpickler build tensors and nothing else: no code of the file runs.
    """

    def __init__(self, path: Path) -> None:
        if found := damage(path):
            raise ValueError(f"{path} {found}")
        try:
            content = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        except Exception as error:  # a forged pickle can raise anything
            raise ValueError(f"{path} {_cause(error)}") from None
        self._tensors = _checked(path, content)

    def __enter__(self) -> "TorchFile":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._tensors = {}

    def keys(self) -> list[str]:
        return list(self._tensors)

    def get_tensor(self, name: str) -> Tensor:
        return self._tensors[name]

    def get_slice(self, name: str) -> "TensorSlice":
        return TensorSlice(self._tensors[name])


class TensorSlice:
    """A tensor whose parts can be read."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def get_shape(self) -> list[int]:
        return list(self._tensor.shape)

    def get_dtype(self) -> str:
        return TYPE_OF_DTYPE.get(self._tensor.dtype, str(self._tensor.dtype))

    def __getitem__(self, index: Any) -> Tensor:
        return self._tensor[index]


def _cause(error: Exception) -> str:
    """Return why torch refuses a file, and what to do."""
    said = f"{error}"
    if "Weights only load failed" in said:
        named = re.search(r"GLOBAL (\S+)", said)
        return f"holds {named[1] if named else 'something'}, which is no tensor and could run code. {SAVE_IT}"
    return f"is damaged: {(said.splitlines() or [type(error).__name__])[0]}. Download it again"


def _checked(path: Path, content: object) -> dict[str, Tensor]:
    """Return a file's content. Raises ValueError unless it is tensors by name, each as large as its data."""
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds {_kind(content)} where tensors by name are expected. {SAVE_IT}")
    for name, value in content.items():
        if not isinstance(name, str) or not isinstance(value, Tensor) or value.layout != torch.strided:
            raise ValueError(f"{path} holds {repr(name)[:80]}, {_kind(value)} where a tensor is expected. {SAVE_IT}")
        if value.is_quantized or value.nbytes > value.untyped_storage().nbytes():
            raise ValueError(f"{path} holds {repr(name)[:80]}, a tensor without data of its own size. {SAVE_IT}")
    return {name: value.detach() for name, value in content.items()}


def _kind(value: object) -> str:
    kind = type(value).__name__
    return f"{'an' if kind[:1] in 'aeiou' else 'a'} {kind}"
