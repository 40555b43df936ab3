"""GGUF's block formats as groups: the same scales and codes, in another order.

The formats are those of ggml-quants.c and of the `gguf` package's quants.py: a row is a sequence of blocks, each of
which has scales and then codes.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from octavo.executor.quantization.groups import cut_inputs
from octavo.kernels.groupwise import GroupwiseWeight, concatenate, pack_codes
from octavo.protocol.model_files.gguf_index import GGUF_TYPES

# N outputs, B blocks of a row, Y bytes of a block, K inputs, G groups of inputs

CHUNK_ELEMENTS = 2**24  # converted at once: codes take a byte each meanwhile


def read_blocks(kind: str, bytes_NX: Tensor, inputs: tuple[int, int]) -> GroupwiseWeight:
    """Return the inputs from `inputs[0]` to `inputs[1]`, whole groups, of rows of blocks (uint8) of a type."""
    block_elements, block_bytes = GGUF_TYPES[kind]
    first, last = inputs[0] // block_elements, -(-inputs[1] // block_elements)
    blocks_NBY = bytes_NX.view(len(bytes_NX), -1, block_bytes)[:, first:last]
    num_rows = max(1, CHUNK_ELEMENTS // ((last - first) * block_elements))
    weight = concatenate([GROUPWISE[kind](chunk) for chunk in torch.split(blocks_NBY, num_rows)])
    start, stop = inputs[0] - first * block_elements, inputs[1] - first * block_elements
    return weight if (start, stop) == (0, weight.num_inputs) else cut_inputs(weight, start, stop)


def _q4_0(blocks_NBY: Tensor) -> GroupwiseWeight:
    return _weight(_halves(blocks_NBY[..., 2:]), 4, 32, _float16(blocks_NBY[..., :2]), None)


def _q4_1(blocks_NBY: Tensor) -> GroupwiseWeight:
    scales_NG, offsets_NG = _float16(blocks_NBY[..., :2]), _float16(blocks_NBY[..., 2:4])
    return _weight(_halves(blocks_NBY[..., 4:]), 4, 32, scales_NG, offsets_NG)


def _q5_0(blocks_NBY: Tensor) -> GroupwiseWeight:
    codes = _halves(blocks_NBY[..., 6:]) | (_single_bits(blocks_NBY[..., 2:6]) << 4)
    return _weight(codes + (128 - 16), 8, 32, _float16(blocks_NBY[..., :2]), None)


def _q5_1(blocks_NBY: Tensor) -> GroupwiseWeight:
    codes = _halves(blocks_NBY[..., 8:]) | (_single_bits(blocks_NBY[..., 4:8]) << 4)
    return _weight(codes, 8, 32, _float16(blocks_NBY[..., :2]), _float16(blocks_NBY[..., 2:4]))


def _q8_0(blocks_NBY: Tensor) -> GroupwiseWeight:
    return _weight(blocks_NBY[..., 2:] ^ 128, 8, 32, _float16(blocks_NBY[..., :2]), None)  # int8 + 128


def _q4_k(blocks_NBY: Tensor) -> GroupwiseWeight:
    scales_NG, offsets_NG = _k_scales(blocks_NBY)
    return _weight(_k_nibbles(blocks_NBY[..., 16:]), 4, 32, scales_NG, offsets_NG)


def _q5_k(blocks_NBY: Tensor) -> GroupwiseWeight:
    scales_NG, offsets_NG = _k_scales(blocks_NBY)
    # Byte i of 32 has the fifth bit of element i of each of the 8 groups, the first group's lowest.
    high = (blocks_NBY[..., None, 16:48] >> torch.arange(8, dtype=torch.uint8)[:, None]) & 1
    codes = _k_nibbles(blocks_NBY[..., 48:]) | (high.flatten(2) << 4)
    return _weight(codes, 8, 32, scales_NG, offsets_NG)


def _q6_k(blocks_NBY: Tensor) -> GroupwiseWeight:
    # Each half block has 64 bytes of nibbles, low ones before high ones, and 32 bytes of two more bits for four runs.
    nibbles = _split(blocks_NBY[..., :128], 2, 64)
    low = torch.stack([nibbles & 15, nibbles >> 4], dim=-2).flatten(2)
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8)[:, None]
    high = ((_split(blocks_NBY[..., 128:192], 2, 1, 32) >> shifts) & 3).flatten(2)
    steps = blocks_NBY[..., 192:208].contiguous().view(torch.int8).float()
    scales_NG = (_float16(blocks_NBY[..., 208:]).float()[..., None] * steps).flatten(1)
    return _weight((low | (high << 4)) + (128 - 32), 8, 16, scales_NG, None)


GROUPWISE: dict[str, Callable[[Tensor], GroupwiseWeight]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
GROUP_SIZES = dict.fromkeys(GROUPWISE, 32) | {"Q6_K": 16}


def _weight(
    codes_NBC: Tensor, bits: int, group_size: int, scales_NG: Tensor, offsets_NG: Tensor | None
) -> GroupwiseWeight:
    return GroupwiseWeight(pack_codes(codes_NBC.flatten(1), bits), bits, group_size, scales_NG, offsets_NG)


def _split(bytes_NBX: Tensor, *sizes: int) -> Tensor:
    return bytes_NBX.reshape(*bytes_NBX.shape[:-1], *sizes)


def _float16(bytes_NB2: Tensor) -> Tensor:
    return bytes_NB2.contiguous().view(torch.float16).squeeze(-1)


def _halves(nibbles: Tensor) -> Tensor:
    """Return the codes of a block of 32: its low nibbles, then its high ones."""
    return torch.cat([nibbles & 15, nibbles >> 4], dim=-1)


def _single_bits(bytes_NB4: Tensor) -> Tensor:
    """Return the 32 bits of four bytes, lowest first."""
    return ((bytes_NB4.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8)) & 1).flatten(2)


def _k_nibbles(nibbles: Tensor) -> Tensor:
    """Return the codes of a block of 256: of each 32 bytes the low nibbles, then the high ones."""
    runs = _split(nibbles, 4, 32)
    return torch.stack([runs & 15, runs >> 4], dim=-2).flatten(2)


def _k_scales(blocks_NBY: Tensor) -> tuple[Tensor, Tensor]:
    """Return the scales_NG and offsets_NG, float32, of blocks of 256 with 8 groups, each product of two numbers.

    12 bytes hold 8 scales and 8 minima of 6 bits: bytes 0 to 3 and 4 to 7 the first four of each, with two bits of the
    last four above them; the nibbles of bytes 8 to 11 the rest of those.
    """
    scale_NB, minimum_NB = _float16(blocks_NBY[..., :2]).float(), _float16(blocks_NBY[..., 2:4]).float()
    first, second, third = _split(blocks_NBY[..., 4:16], 3, 4).unbind(-2)
    scales = torch.cat([first & 63, (third & 15) | ((first >> 2) & 48)], dim=-1)
    minima = torch.cat([second & 63, (third >> 4) | ((second >> 2) & 48)], dim=-1)
    scales_NG = (scale_NB[..., None] * scales.float()).flatten(1)
    return scales_NG, -(minimum_NB[..., None] * minima.float()).flatten(1)
