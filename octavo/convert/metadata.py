"""What a GGUF file says about itself. Keys are described in ggml's docs/gguf.md."""

import logging
from pathlib import Path
from typing import Annotated, Any

import msgspec

from octavo.errors import ModelError

logger = logging.getLogger(__name__)

MAGIC = b"GGUF"

# What a value has to be: whoever wrote the file may have been a stranger.
Count = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
Positive = Annotated[float, msgspec.Meta(gt=0, le=1e30)]


class GGUFFile:
    """A GGUF file, mapped: metadata by key and tensors by name. Raises ModelError if it is not a whole one."""

    def __init__(self, path: Path) -> None:
        from gguf import GGUFReader

        self.path = path
        try:
            reader = GGUFReader(path)
        except (ValueError, IndexError, KeyError, OverflowError, RecursionError) as error:
            raise ModelError(_cause(path)) from error
        except OSError as error:
            raise ModelError(f"{path} cannot be read: {error.strerror}.") from error
        if reader.byte_order != "I":
            raise ModelError(f"{path} is a GGUF file for machines of the other byte order.")
        self.tensors = {tensor.name: tensor for tensor in reader.tensors}
        self._fields = reader.fields
        if self.get("split.count", int, 1) > 1:
            raise ModelError(
                f"{path} is one part of a split GGUF file. Join the parts first: "
                f"llama-gguf-split --merge {path} OUT.gguf"
            )
        self.architecture: str = self.require("general.architecture", str)

    def get(self, key: str, kind: Any, default: Any = None) -> Any:
        """The value of a metadata key, of the type `kind`. Raises ModelError if it is there and is none of those."""
        field = self._fields.get(key)
        if field is None:
            return default
        try:
            value = field.contents()
            return msgspec.convert(shortest_float(value) if isinstance(value, float) else value, kind)
        except (ValueError, IndexError) as error:
            raise ModelError(f"{self.path} has a GGUF key {key!r} that cannot be used: {error}.") from error

    def require(self, key: str, kind: Any) -> Any:
        """The value of a key that every usable file has."""
        value = self.get(key, kind)
        if value is None:
            raise ModelError(f"{self.path} lacks the GGUF key {key!r}, so it cannot be served.")
        return value

    def token_id(self, name: str) -> int | None:
        """The id of a special token: bos, eos, eot, eom, unknown, padding.

        One that the vocabulary lacks counts as none, as for llama.cpp: files with such an id for padding are common.
        """
        key = f"tokenizer.ggml.{name}_token_id"
        token_id: int | None = self.get(key, int)
        tokens = self._fields.get("tokenizer.ggml.tokens")
        num_tokens = 0 if tokens is None else len(tokens.data)
        if token_id is not None and not 0 <= token_id < num_tokens:
            logger.warning("%s: %s is %d, but there are %d tokens: not used", self.path, key, token_id, num_tokens)
            return None
        return token_id


def _cause(path: Path) -> str:
    """Return why a file cannot be read as a GGUF file, and what helps: a reader speaks of arrays."""
    with path.open("rb") as file:
        magic, version = file.read(4), int.from_bytes(file.read(4), "little")
    if version == 1 and magic == MAGIC:
        return f"{path} is of version 1 of the GGUF format, which is not read. Take a newer file of the model."
    if magic == MAGIC:
        cause = f"its {path.stat().st_size} bytes end before what its header announces, or are damaged"
    else:
        cause = "it does not begin as one"
    return f"{path} is not a whole GGUF file: {cause}. Download it again."


def shortest_float(value: float) -> float:
    """The number that was meant by a float32 which was widened: 9.999999747378752e-06 is 1e-05."""
    import numpy as np

    return float(str(np.float32(value)))
