"""What a GGUF file says about itself. Keys are described in ggml's docs/gguf.md."""

import logging
from pathlib import Path
from typing import Annotated, Any

import msgspec

from octavo.errors import ModelError
from octavo.models.convert.header import read_header

logger = logging.getLogger(__name__)

# The types that values must have: a stranger may have written the file.
Count = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
Positive = Annotated[float, msgspec.Meta(gt=0, le=1e30)]

SENTENCEPIECE_IDS = {"unknown": 0, "bos": 1, "eos": 2}


class GGUFFile:
    """A GGUF file's metadata by key and tensors by name. Raises ModelError if the file is not whole."""

    def __init__(self, path: Path) -> None:
        self.path = path
        header = read_header(path)
        self.tensors = header.tensors
        self._values = header.values
        if self.get("split.count", int, 1) > 1:
            raise ModelError(
                f"{path} is one part of a split GGUF file. Join the parts first: "
                f"llama-gguf-split --merge {path} OUT.gguf"
            )
        self.architecture: str = self.require("general.architecture", str)

    def get(self, key: str, kind: Any, default: Any = None) -> Any:
        """Return the value of a metadata key, of the type `kind`. Raises ModelError for a value of another type."""
        if key not in self._values:
            return default
        try:
            return msgspec.convert(_decoded(self._values[key]), kind)
        except ValueError as error:
            raise ModelError(f"{self.path} has a GGUF key {key!r} that cannot be used: {error}.") from error

    @property
    def keys(self) -> list[str]:
        return list(self._values)

    def require(self, key: str, kind: Any) -> Any:
        """The value of a key that every usable file has."""
        value = self.get(key, kind)
        if value is None:
            raise ModelError(f"{self.path} lacks the GGUF key {key!r}, so it cannot be served.")
        return value

    def token_id(self, name: str) -> int | None:
        """The id of a special token: bos, eos, unknown, padding, eot, eom, fim_pad, fim_rep, fim_sep.

        SentencePiece's vocabularies have bos, eos and unknown where Llama's has them, unless the file says otherwise.
        An id outside the vocabulary counts as absent, as in llama.cpp: files with such an id for padding are common.
        """
        key = f"tokenizer.ggml.{name}_token_id"
        usual = SENTENCEPIECE_IDS.get(name) if self.get("tokenizer.ggml.model", str) == "llama" else None
        token_id: int | None = self.get(key, int, usual)
        tokens = self._values.get("tokenizer.ggml.tokens")
        num_tokens = len(tokens) if isinstance(tokens, list) else 0
        if token_id is not None and not 0 <= token_id < num_tokens:
            logger.warning("%s: %s is %d, but there are %d tokens: not used", self.path, key, token_id, num_tokens)
            return None
        return token_id


def _decoded(value: Any) -> Any:
    """Return a value with its strings as text. Raises ValueError if one is not UTF-8."""
    if isinstance(value, list):
        return [_decoded(element) for element in value] if value and isinstance(value[0], bytes) else value
    return value.decode() if isinstance(value, bytes) else value
