"""The form in which weights of few bits are held, as far as it is known before they are read."""

from typing import NamedTuple

import torch

from octavo.executor.quantization.config import Quantization
from octavo.executor.quantization.gguf_blocks import GROUPWISE
from octavo.executor.quantization.packed import longest_group
from octavo.executor.quantization.rounding import rounded_group
from octavo.protocol.model_files.gguf_index import GGUF_TYPES

# A scale fits float16; its product with a zero point seldom does. What rounding chooses fits, mostly.
SCALE_BITS, PRODUCT_BITS, ROUNDED_OFFSET_BITS = 16, 32, 16


class HeldForm(NamedTuple):
    """A weight of few bits: codes, and a scale and an offset for each group of inputs."""

    bits: int
    group_size: int
    group_bits: int  # of a group's scale and offset

    @property
    def bits_per_weight(self) -> float:
        return self.bits + self.group_bits / self.group_size


def packed_form(quantization: Quantization, num_inputs: int) -> HeldForm | None:
    """Return the form of a quantized weight of safetensors; None if it is multiplied out."""
    if quantization.bits is None:
        return None
    group_size = quantization.group_size or longest_group(num_inputs)
    return HeldForm(quantization.bits, group_size, SCALE_BITS + quantization.has_zero_points * PRODUCT_BITS)


def rounded_form(bits: int, num_inputs: int) -> HeldForm | None:
    """Return the form of a plain weight that is rounded to 8 or 4 bits at load; None if it stays plain."""
    group_size = rounded_group(num_inputs)
    offset_bits = 0 if bits == 8 else ROUNDED_OFFSET_BITS
    return None if group_size is None else HeldForm(bits, group_size, SCALE_BITS + offset_bits)


def gguf_form(kind: str) -> HeldForm | None:
    """Return the form of a GGUF file's tensor of a type, one of GGUF_TYPES; None of a plain one."""
    if kind not in GROUPWISE:
        return None
    _, block_bytes = GGUF_TYPES[kind]
    block = GROUPWISE[kind](torch.zeros(1, 1, block_bytes, dtype=torch.uint8))
    num_groups = block.num_inputs // block.group_size
    return HeldForm(block.bits, block.group_size, 8 * (block.nbytes - block.codes_NB.nbytes) // num_groups)
