"""Where a GGUF file's tensors lie, for the executor that maps the file."""

import hashlib

from octavo.errors import ModelError
from octavo.models.convert.metadata import GGUFFile
from octavo.models.convert.weights import Weight
from octavo.protocol.model_files.gguf_index import GGUF_TYPES, GGUFIndex, GGUFTensor

# the dtype of computation, by the type of a plain embedding; most quantized models were trained in bfloat16
PLAIN_DTYPES = {"F32": "float32", "F16": "float16"}


def computing_dtype(file: GGUFFile) -> str:
    """Return the dtype for config.json: the dtype of the weights that are not quantized."""
    return PLAIN_DTYPES.get(file.tensors["token_embd.weight"].type, "bfloat16")


def build_index(file: GGUFFile, weights: list[Weight]) -> GGUFIndex:
    """Return the index of `weights`. Raises ModelError if one has a type that cannot be run."""
    for weight in weights:
        if (kind := weight.source.type) not in GGUF_TYPES:
            raise ModelError(
                f"{file.path} stores {weight.source.name} as {kind}, which is not supported; supported: "
                f"{', '.join(GGUF_TYPES)}. Choose a file of another type, such as Q4_K_M or Q8_0."
            )
    header_bytes = min(weight.source.offset_bytes for weight in weights)
    with file.path.open("rb") as opened:
        header = opened.read(header_bytes)
    return GGUFIndex(
        file_bytes=file.path.stat().st_size,
        header_bytes=header_bytes,
        header_sha256=hashlib.sha256(header).hexdigest(),
        tensors={weight.name: _tensor(weight) for weight in weights},
    )


def _tensor(weight: Weight) -> GGUFTensor:
    return GGUFTensor(
        type=weight.source.type,
        shape=list(weight.shape),
        offset_bytes=weight.source.offset_bytes,
        interleaved_heads=weight.interleaved_heads,
    )
