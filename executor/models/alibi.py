"""The slopes of ALiBi: what a head takes from a score for each token of distance."""

import math

import torch
from torch import Tensor


def alibi_slopes(num_heads: int) -> Tensor:
    """Return slopes_H, float32, of Press et al., "Train Short, Test Long" (arXiv:2108.12409).

    For H a power of 2 they are 2^(-8/H), 2^(-16/H), ...; otherwise those of the power below, then every second one of
    the power above.
    """
    below = 2 ** math.floor(math.log2(num_heads))
    slopes = _of_power(below) + _of_power(2 * below)[::2][: num_heads - below]
    return torch.tensor(slopes, dtype=torch.float32)


def _of_power(num_heads: int) -> list[float]:
    return [2.0 ** (-8.0 * (head + 1) / num_heads) for head in range(num_heads)]
