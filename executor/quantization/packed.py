"""Codes and zero points that are packed into int32, and scales: AWQ's, GPTQ's and compressed-tensors' layouts.

N outputs, K inputs, G groups of inputs, B bytes of a row's codes. A weight is scale * (code - zero).
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from octavo.executor.quantization.config import Quantization
from octavo.executor.quantization.groups import smallest_float, whole_groups
from octavo.executor.shards import Shard
from octavo.kernels.groupwise import GroupwiseWeight

# Which of 8 outputs each nibble of an int32 of AWQ's "gemm" has, from the lowest; and the nibble of each output.
AWQ_OUTPUTS = [0, 2, 4, 6, 1, 3, 5, 7]
AWQ_NIBBLES = [0, 4, 1, 5, 2, 6, 3, 7]
FLOATS = ("F16", "BF16", "F32")
LONGEST_GROUP = 128  # a scale for all inputs of a row is held as one for each group of so many, all equal

OpenSlice = Callable[[str], Any]  # the safetensors slice of a part such as "qweight"; None without it


def read_packed(open_part: OpenSlice, quantization: Quantization, shard: Shard, shape: list[int]) -> GroupwiseWeight:
    """Return a shard of a weight, which as a whole has `shape` (outputs, inputs).

    Raises ValueError if a part is missing, has another shape or type, or inputs are in another order (act-order).
    """
    assert quantization.bits is not None
    num_outputs, num_inputs = shape
    group_size = quantization.group_size or num_inputs
    if num_inputs % group_size:
        raise ValueError(f"{num_inputs} inputs do not divide into groups of {group_size}")
    inputs = _input_bounds(shard, quantization, num_inputs)
    outputs = shard.bounds if shard.dim == 0 else (0, num_outputs)
    groups = slice(inputs[0] // group_size, -(-inputs[1] // group_size))
    parts = LAYOUTS[quantization.method](open_part, quantization.bits, num_outputs, num_inputs, group_size)
    parts.refuse_act_order()
    codes_NB, scales_NG = parts.codes(inputs, outputs), parts.scales(groups, outputs)
    zeros_NG, middle = parts.zeros(groups, outputs) + quantization.zero_shift, 2 ** (quantization.bits - 1)
    offsets_NG = None if bool((zeros_NG == middle).all()) else smallest_float(-zeros_NG * scales_NG.float())
    if quantization.group_size is None:
        group_size = longest_group(inputs[1] - inputs[0])
        num_groups = (inputs[1] - inputs[0]) // group_size
        scales_NG = scales_NG.expand(-1, num_groups).contiguous()
        offsets_NG = None if offsets_NG is None else offsets_NG.expand(-1, num_groups).contiguous()
    return GroupwiseWeight(codes_NB, quantization.bits, group_size, scales_NG, offsets_NG)


class _Layout:
    """The tensors of one weight, each checked before any of it is read. Bounds are (start, stop)."""

    group_indices = "g_idx"

    def __init__(self, open_part: OpenSlice, bits: int, num_outputs: int, num_inputs: int, group_size: int) -> None:
        self._open = open_part
        self._bits, self._per_word = bits, 32 // bits
        self._num_outputs, self._num_inputs, self._group_size = num_outputs, num_inputs, group_size
        self._num_groups = num_inputs // group_size

    def codes(self, inputs: tuple[int, int], outputs: tuple[int, int]) -> Tensor:
        """Return codes_NB, as a GroupwiseWeight has them."""
        raise NotImplementedError

    def zeros(self, groups: slice, outputs: tuple[int, int]) -> Tensor:
        """Return zeros_NG, int32, as they are stored."""
        words = self._opened("qzeros", [self._num_groups, self._num_outputs // self._per_word], "I32")
        columns, kept = self._words(outputs)
        return self._spread(words[groups, columns])[:, kept].T.int()

    def scales(self, groups: slice, outputs: tuple[int, int]) -> Tensor:
        """Return scales_NG."""
        scales = self._opened("scales", [self._num_groups, self._num_outputs], *FLOATS)
        return smallest_float(scales[groups, slice(*outputs)].T.clone())  # a slice is the file's memory

    def refuse_act_order(self) -> None:
        if self._open(self.group_indices) is None:
            return
        written = self._opened(self.group_indices, [self._num_inputs], "I32")[:]
        if not torch.equal(written, torch.arange(self._num_inputs, dtype=torch.int32) // self._group_size):
            raise ValueError("inputs that are grouped out of order (desc_act, act-order) are not supported")

    def _spread(self, words_RW: Tensor) -> Tensor:
        """Return the numbers in each int32, lowest bits first, as uint8."""
        bytes_RB = words_RW.contiguous().view(torch.uint8)
        if self._bits == 8:
            return bytes_RB
        return torch.stack([bytes_RB & 15, bytes_RB >> 4], dim=-1).flatten(1)

    def _words(self, bounds: tuple[int, int]) -> tuple[slice, slice]:
        """Return the words that hold the numbers between `bounds`, and what to keep of them."""
        first = bounds[0] // self._per_word
        kept = slice(bounds[0] - first * self._per_word, bounds[1] - first * self._per_word)
        return slice(first, -(-bounds[1] // self._per_word)), kept

    def _opened(self, part: str, shape: list[int], *types: str) -> Any:
        found = self._open(part)
        if found is None:
            raise ValueError(f"{part} is missing")
        if list(found.get_shape()) != shape or found.get_dtype() not in types:
            raise ValueError(
                f"{part} has shape {list(found.get_shape())} and type {found.get_dtype()}, but {shape} of"
                f" {' or '.join(types)} is expected for {self._num_outputs} outputs of {self._num_inputs} inputs with"
                f" {self._bits} bits in groups of {self._group_size}"
            )
        return found


class _AWQ(_Layout):
    """AutoAWQ's "gemm": outputs side by side in a word, in an order of their own."""

    def codes(self, inputs: tuple[int, int], outputs: tuple[int, int]) -> Tensor:
        words = self._opened("qweight", [self._num_inputs, self._num_outputs // self._per_word], "I32")
        columns, kept = self._words(outputs)
        return _transposed_awq(words[slice(*inputs), columns])[kept].contiguous()

    def _spread(self, words_RW: Tensor) -> Tensor:
        nibbles_RW8 = super()._spread(words_RW).view(*words_RW.shape, self._per_word)
        return nibbles_RW8[..., AWQ_NIBBLES].flatten(1)


class _GPTQ(_Layout):
    """AutoGPTQ's: inputs side by side in a word, the first in its lowest bits, as in the bytes of a GroupwiseWeight."""

    def codes(self, inputs: tuple[int, int], outputs: tuple[int, int]) -> Tensor:
        words = self._opened("qweight", [self._num_inputs // self._per_word, self._num_outputs], "I32")
        rows, _ = self._words(inputs)
        codes_NB: Tensor = words[rows, slice(*outputs)].T.contiguous().view(torch.uint8)
        return codes_NB


class _CompressedTensors(_Layout):
    """compressed-tensors' "pack-quantized": as GPTQ's, outputs first; no zero points where all are the middle code."""

    group_indices = "weight_g_idx"

    def codes(self, inputs: tuple[int, int], outputs: tuple[int, int]) -> Tensor:
        words = self._opened("weight_packed", [self._num_outputs, self._num_inputs // self._per_word], "I32")
        columns, _ = self._words(inputs)
        codes_NB: Tensor = (
            words[slice(*outputs), columns].clone(memory_format=torch.contiguous_format).view(torch.uint8)
        )
        return codes_NB

    def zeros(self, groups: slice, outputs: tuple[int, int]) -> Tensor:
        if self._open("weight_zero_point") is None:
            return torch.full((outputs[1] - outputs[0], groups.stop - groups.start), 2 ** (self._bits - 1))
        shape = [-(-self._num_outputs // self._per_word), self._num_groups]
        words = self._opened("weight_zero_point", shape, "I32")
        rows, kept = self._words(outputs)
        return self._spread(words[rows, groups].T)[:, kept].T.int()

    def scales(self, groups: slice, outputs: tuple[int, int]) -> Tensor:
        scales = self._opened("weight_scale", [self._num_outputs, self._num_groups], *FLOATS)
        return smallest_float(scales[slice(*outputs), groups].clone())


LAYOUTS = {"awq": _AWQ, "gptq": _GPTQ, "compressed-tensors": _CompressedTensors}
# What a layout stores in place of a `weight`; the first of them is there for every weight that it packed.
PACKED_PARTS = (
    ("qweight", "qzeros", "scales", "g_idx"),
    ("weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx"),
)


def _input_bounds(shard: Shard, quantization: Quantization, num_inputs: int) -> tuple[int, int]:
    if shard.dim == 0:
        return 0, num_inputs
    return whole_groups(shard, quantization.group_size or longest_group(num_inputs))


def longest_group(num_inputs: int) -> int:
    """Return the inputs of a group where all of a row share a scale. Raises ValueError if there is no such group."""
    size = next((size for size in range(LONGEST_GROUP, 15, -16) if num_inputs % size == 0), None)
    if size is None:
        raise ValueError(f"{num_inputs} inputs do not divide into groups of a multiple of 16")
    return size


def _transposed_awq(words_KW: Tensor) -> Tensor:
    """Return codes_NB of 4 bits: of each two inputs, the codes of an output in one byte."""
    num_inputs, num_words = words_KW.shape
    bytes_KW4 = words_KW.contiguous().view(torch.uint8).view(num_inputs, num_words, 4)
    even, odd = bytes_KW4[::2], bytes_KW4[1::2]
    codes_W8B = torch.empty(num_words, 8, num_inputs // 2, dtype=torch.uint8)
    for place in range(4):
        low, high = AWQ_OUTPUTS[2 * place : 2 * place + 2]
        codes_W8B[:, low] = ((even[..., place] & 15) | (odd[..., place] << 4)).T
        codes_W8B[:, high] = ((even[..., place] >> 4) | (odd[..., place] & 240)).T
    return codes_W8B.flatten(0, 1)
