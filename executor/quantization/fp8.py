"""Weights of 8-bit floats with scales, which become plain ones at load."""

from typing import Any

import torch
from torch import Tensor

from octavo.executor.shards import Shard

# N outputs, K inputs


def read_fp8(weight: Any, scale: Tensor, block_shape: tuple[int, int] | None, shard: Shard) -> Tensor:
    """Return the shard of weight * scale, float32.

    `weight` is a safetensors slice of float8_e4m3fn; `scale` has one value for all, for each output, or for each block
    of `block_shape` (outputs, inputs), the last of which may be cut short. Raises ValueError for another shape.
    """
    num_outputs, num_inputs = weight.get_shape()
    rows, columns = slice(0, num_outputs), slice(0, num_inputs)
    if shard.dim == 0:
        rows = slice(*shard.bounds)
    else:
        columns = slice(*shard.bounds)
    values_NK: Tensor = weight[rows, columns].float()
    scale = scale.float()
    if scale.numel() == 1:
        return values_NK * scale.reshape(())
    if scale.numel() == num_outputs and scale.shape[0] == num_outputs:
        return values_NK * scale.reshape(-1, 1)[rows]
    if block_shape is None or list(scale.shape) != _num_blocks(num_outputs, num_inputs, block_shape):
        raise ValueError(
            f"scales have shape {list(scale.shape)} for {num_outputs} outputs of {num_inputs} inputs"
            f" in blocks of {list(block_shape) if block_shape else 'no size'}"
        )
    row_blocks = torch.arange(rows.start, rows.stop) // block_shape[0]
    column_blocks = torch.arange(columns.start, columns.stop) // block_shape[1]
    return values_NK * scale[row_blocks][:, column_blocks]


def _num_blocks(num_outputs: int, num_inputs: int, block_shape: tuple[int, int]) -> list[int]:
    return [-(-num_outputs // block_shape[0]), -(-num_inputs // block_shape[1])]
