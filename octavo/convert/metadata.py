"""What a GGUF file says about itself. Keys are described in ggml's docs/gguf.md."""

from pathlib import Path
from typing import Any

import numpy as np

from octavo.errors import ModelError


class GGUFFile:
    """A GGUF file, mapped: metadata by key and tensors by name. Raises ModelError if it is not a whole one."""

    def __init__(self, path: Path) -> None:
        from gguf import GGUFReader

        self.path = path
        try:
            reader = GGUFReader(path)
        except (ValueError, IndexError, KeyError) as error:
            raise ModelError(f"{path} is not a whole GGUF file ({error}). Download it again.") from error
        except OSError as error:
            raise ModelError(f"{path} cannot be read: {error.strerror}.") from error
        if reader.byte_order != "I":
            raise ModelError(f"{path} is a GGUF file for machines of the other byte order.")
        self.tensors = {tensor.name: tensor for tensor in reader.tensors}
        self._fields = reader.fields
        if (self.get("split.count") or 1) > 1:
            raise ModelError(
                f"{path} is one part of a split GGUF file. Join the parts first: "
                f"llama-gguf-split --merge {path} OUT.gguf"
            )
        self.architecture: str = self.require("general.architecture")

    def get(self, key: str, default: Any = None) -> Any:
        """The value of a metadata key, as Python's int, float, bool, str or list."""
        field = self._fields.get(key)
        if field is None:
            return default
        value = field.contents()
        return shortest_float(value) if isinstance(value, float) else value

    def require(self, key: str) -> Any:
        """The value of a key that every usable file has."""
        value = self.get(key)
        if value is None:
            raise ModelError(f"{self.path} lacks the GGUF key {key!r}, so it cannot be served.")
        return value

    def token_id(self, name: str) -> int | None:
        """The id of a special token: bos, eos, eot, eom, unknown, padding."""
        token_id: int | None = self.get(f"tokenizer.ggml.{name}_token_id")
        return token_id


def shortest_float(value: float) -> float:
    """The number that was meant by a float32 which was widened: 9.999999747378752e-06 is 1e-05."""
    return float(str(np.float32(value)))
