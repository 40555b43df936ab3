"""The index beside a GGUF file: where each tensor lies, under its name in a Hugging Face checkpoint.

The resolver reads the file's own header, which takes seconds for a large vocabulary, and writes this index. The
executor maps the file by the index. A model directory has both under these names, and a config.json whose
`quantization_config` has the `quant_method` "gguf".
"""

from typing import Annotated

import msgspec

from octavo.protocol.model_files.bounded import LARGEST_LIST_BYTES

GGUF_FILE = "model.gguf"
GGUF_INDEX = "model.gguf.index.json"
# By type that can be read: the elements and the bytes of one block.
GGUF_TYPES = {
    "F32": (1, 4),
    "F16": (1, 2),
    "BF16": (1, 2),
    "Q4_0": (32, 18),
    "Q4_1": (32, 20),
    "Q5_0": (32, 22),
    "Q5_1": (32, 24),
    "Q8_0": (32, 34),
    "Q4_K": (256, 144),
    "Q5_K": (256, 176),
    "Q6_K": (256, 210),
}


Bytes = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
Size = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]


class GGUFTensor(msgspec.Struct, frozen=True, kw_only=True):
    type: str
    shape: list[Size]  # as in a checkpoint: outputs first
    offset_bytes: Bytes  # from the start of the file
    # llama.cpp stores the rows of a Llama's q and k in another order: two rows that are rotated together lie side by
    # side within each of this many heads.
    interleaved_heads: Size | None = None


class GGUFIndex(msgspec.Struct, frozen=True, kw_only=True):
    file_bytes: Bytes
    header_bytes: Annotated[int, msgspec.Meta(ge=0, le=2 * LARGEST_LIST_BYTES)]  # up to the first tensor's data
    header_sha256: str
    tensors: dict[str, GGUFTensor]  # by the checkpoint's names
