"""Weights of few bits: how checkpoints store them, and how plain weights are rounded to few bits.

All formats become one form, `GroupwiseWeight`; no value changes. Their sizes, in bits a weight
(with groups of 128, where a checkpoint may choose; scales and offsets are float32 where float16 would lose something):

    AWQ, GPTQ with zero points        4.38        Q4_0                                4.5
    symmetric GPTQ                    4.13        Q4_1                                5
    symmetric GPTQ of 8 bits          8.13        Q5_0, Q8_0                          8.5
    rounded to int8                   8.13        Q5_1                                9
    rounded to int4                   4.25        Q4_K (its scales are products)      6
                                                  Q5_K, Q6_K (held in bytes)          10

compressed-tensors' pack-quantized takes what GPTQ does.

fp8 weights are multiplied by their scales at load, and held in the model's dtype.
"""

from octavo.executor.quantization.config import QUANTIZATIONS, Quantization, choose_rounding, read_quantization
from octavo.executor.quantization.rounding import round_weight

__all__ = ["QUANTIZATIONS", "Quantization", "choose_rounding", "read_quantization", "round_weight"]
