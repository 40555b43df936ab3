"""A GGUF file as a source of weights: mapped, by the index that was written beside it when the model was resolved."""

import hashlib
import math
from pathlib import Path

import msgspec
import numpy as np
import torch
from torch import Tensor

from octavo.executor.quantization.gguf_blocks import GROUP_SIZES, read_blocks
from octavo.executor.quantization.groups import whole_groups
from octavo.executor.shards import Shard
from octavo.kernels.groupwise import GroupwiseWeight
from octavo.protocol.model_files.bounded import LARGEST_LIST_BYTES, read_bounded
from octavo.protocol.model_files.gguf_index import GGUF_FILE, GGUF_INDEX, GGUF_TYPES, GGUFIndex, GGUFTensor

PLAIN_TYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

# N outputs (rows), K inputs, X bytes of a row


class GGUFWeights:
    """The tensors of a directory's GGUF file, under the names that a checkpoint has for them.

    Raises ValueError if the file is not the one that was indexed.
    """

    def __init__(self, directory: Path) -> None:
        self._path = directory / GGUF_FILE
        self._tensors = read_index(directory).tensors
        self._bytes = np.memmap(self._path, mode="r")

    def check(self, needed: set[str], unneeded: set[str]) -> None:
        """See `models.weights.Source`. The resolver refused a file with tensors that the model does not need."""
        if missing := sorted(needed - self._tensors.keys()):
            raise ValueError(f"the index of {self._path} lacks {len(missing)} tensors: {', '.join(missing[:5])}")

    def read(self, name: str, shard: Shard, part: Tensor) -> None:
        shape = [shard.size if dim == shard.dim else size for dim, size in enumerate(part.shape)]
        tensor = self._tensor(name, shape)
        if tensor.type in PLAIN_TYPES:
            rows = self._rows(tensor, shard).view(PLAIN_TYPES[tensor.type])
            part.copy_(rows[:, slice(*shard.bounds)] if shard.dim == 1 else rows.reshape(part.shape))
        else:
            part.copy_(self._blocks(name, tensor, shard).dequantize().reshape(part.shape))

    def read_groupwise(self, name: str, shard: Shard, shape: list[int]) -> GroupwiseWeight | None:
        tensor = self._tensor(name, shape)
        return None if tensor.type in PLAIN_TYPES else self._blocks(name, tensor, shard)

    def _tensor(self, name: str, shape: list[int]) -> GGUFTensor:
        tensor = self._tensors[name]
        if tensor.type not in GGUF_TYPES:
            raise ValueError(
                f"{name} of {self._path} has type {tensor.type}, which is not supported; supported:"
                f" {', '.join(GGUF_TYPES)}"
            )
        if tensor.shape != shape:
            raise ValueError(f"{name} of {self._path} has shape {tensor.shape}, but config.json asks for {shape}")
        return tensor

    def _blocks(self, name: str, tensor: GGUFTensor, shard: Shard) -> GroupwiseWeight:
        try:
            inputs = whole_groups(shard, GROUP_SIZES[tensor.type]) if shard.dim == 1 else (0, tensor.shape[-1])
        except ValueError as error:
            raise ValueError(f"{name} ({tensor.type}) of {self._path}: {error}") from None
        return read_blocks(tensor.type, self._rows(tensor, shard), inputs)

    def _rows(self, tensor: GGUFTensor, shard: Shard) -> Tensor:
        """Return bytes_NX of a shard's rows, in the checkpoint's order; those of a vector are one element each."""
        num_rows, row_elements = tensor.shape[0], tensor.shape[1] if len(tensor.shape) > 1 else 1
        block_elements, block_bytes = GGUF_TYPES[tensor.type]
        row_bytes = row_elements // block_elements * block_bytes
        rows_NX = self._bytes[tensor.offset_bytes :][: num_rows * row_bytes].reshape(num_rows, row_bytes)
        start, stop = shard.bounds if shard.dim == 0 else (0, num_rows)
        if tensor.interleaved_heads is None:
            return torch.from_numpy(np.array(rows_NX[start:stop]))  # a copy: the file is read-only
        return torch.from_numpy(rows_NX[deinterleaved_rows(num_rows, tensor.interleaved_heads)[start:stop]])


def deinterleaved_rows(num_rows: int, num_heads: int) -> np.ndarray:
    """Return where in llama.cpp's order of q's or k's rows each row of a checkpoint lies.

    Llama's checkpoints rotate row i with row i + head_dim/2 of a head; llama.cpp rotates neighbours, so its converter
    (`LlamaModel.permute` in convert_hf_to_gguf.py) has moved the pairs together.
    """
    return np.arange(num_rows).reshape(num_heads, -1, 2).swapaxes(1, 2).reshape(-1)


def read_index(directory: Path) -> GGUFIndex:
    """Return a directory's index. Raises ValueError if the file beside it is missing or another one."""
    path, index_path = directory / GGUF_FILE, directory / GGUF_INDEX
    try:
        index = msgspec.json.decode(read_bounded(index_path, LARGEST_LIST_BYTES), type=GGUFIndex)
        with path.open("rb") as file:
            header = file.read(index.header_bytes)
        size_bytes = path.stat().st_size
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ValueError(f"{index_path} is not an index of a GGUF file: {error}") from None
    except FileNotFoundError as error:
        raise ValueError(f"{error.filename} is missing: resolve the .gguf file again") from None
    if size_bytes != index.file_bytes or hashlib.sha256(header).hexdigest() != index.header_sha256:
        raise ValueError(f"{path.resolve()} is damaged, or not the file that {index_path} was made of")
    for name, tensor in index.tensors.items():
        if tensor.type in GGUF_TYPES and tensor.offset_bytes + _num_bytes(tensor) > index.file_bytes:
            raise ValueError(f"{index_path} is not an index of a GGUF file: {name} lies beyond the file")
    return index


def _num_bytes(tensor: GGUFTensor) -> int:
    block_elements, block_bytes = GGUF_TYPES[tensor.type]
    return math.prod(tensor.shape) // block_elements * block_bytes
