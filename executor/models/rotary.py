"""Rotary frequencies, chosen once at load: default, linear, dynamic, yarn and llama3 scaling.

The formulas are those of transformers' `modeling_rope_utils`, in the same order of operations and in float32, except
that dynamic frequencies do not follow the longest sequence of a batch: they are those of `max_model_len`, so that a
sequence's tokens do not depend on what runs beside it.
"""

import math
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import msgspec
import torch
from torch import Tensor

Positive = Annotated[float, msgspec.Meta(gt=0)]

# P positions, R rotary size (mostly the head size): R / 2 cosines, then R / 2 sines


class Rope(msgspec.Struct, frozen=True, kw_only=True):
    """Rotary parameters of a checkpoint, with the defaults of config.json resolved."""

    rope_type: str
    rope_theta: Annotated[float, msgspec.Meta(gt=1)]
    max_position_embeddings: int
    # tokens of the training before it was stretched
    original_max_position_embeddings: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
    factor: Annotated[float, msgspec.Meta(gt=0, le=1e6)] | None = None
    attention_factor: float | None = None
    beta_fast: Positive | None = None
    beta_slow: Positive | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    low_freq_factor: Positive | None = None
    high_freq_factor: Positive | None = None

    def check(self) -> None:
        """Raise ValueError if the type is not supported or lacks a parameter."""
        if self.rope_type not in FREQUENCIES:
            raise ValueError(f"rope_type {self.rope_type!r} is not supported; supported: {', '.join(FREQUENCIES)}")
        for name in REQUIRED.get(self.rope_type, ()):
            if getattr(self, name) is None:
                raise ValueError(f"rope_type {self.rope_type!r} needs {name}")
        if self.rope_type == "llama3" and not (self.high_freq_factor or 0) > (self.low_freq_factor or 0):
            raise ValueError(
                f"rope_type 'llama3' needs a high_freq_factor ({self.high_freq_factor}) above low_freq_factor"
                f" ({self.low_freq_factor})"
            )

    @property
    def stretched_tokens(self) -> int:
        """Return how far the scaling may reach, in tokens; 0 where the checkpoint's own length says that."""
        if self.rope_type == "yarn":
            return int(self.original_max_position_embeddings * self.yarn_factor)
        if self.rope_type in ("linear", "dynamic"):
            return int(self.max_position_embeddings * (self.factor or 1.0))
        return 0

    @property
    def yarn_factor(self) -> float:
        return self.factor or self.max_position_embeddings / self.original_max_position_embeddings


def without_effect(parameters: Mapping[str, Any]) -> str:
    """Return, as a sentence, which of a checkpoint's rotary parameters have no effect; "" if all have an effect.

    Those of one layer type may stand in an object of their own.
    """
    nested = [without_effect(value) for value in parameters.values() if isinstance(value, dict)]
    named = parameters.get("rope_type", parameters.get("type"))
    rope_type = named or "default"
    if any(nested) or not isinstance(rope_type, str) or rope_type not in USED:
        return next(filter(None, nested), "")
    used = (*USED[rope_type], *ANY)
    unused = [name for name, value in parameters.items() if name not in used and not isinstance(value, dict | None)]
    if not unused:
        return ""
    which = "no rope_type is named, and the default" if named is None else f"rope_type {named!r}"
    return f"{which} has no {', '.join(map(str, unused))}: no effect, as in transformers; a type scales positions"


def rotary_table(rope: Rope, rotary_dim: int, max_model_len: int) -> Tensor:
    """Return cos_sin_PR, float32: the cosines and sines of every position below `max_model_len`."""
    inv_freq, attention_factor = rotary_frequencies(rope, rotary_dim, max_model_len)
    angles = torch.arange(max_model_len, dtype=torch.float32)[:, None] * inv_freq
    return torch.cat([angles.cos() * attention_factor, angles.sin() * attention_factor], dim=-1)


def rotary_frequencies(rope: Rope, rotary_dim: int, max_model_len: int) -> tuple[Tensor, float]:
    """Return the rotary_dim / 2 inverse frequencies, float32, and the factor on cosines and sines."""
    return FREQUENCIES[rope.rope_type](rope, rotary_dim, max_model_len)


def _exponents(head_dim: int) -> Tensor:
    return torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim


def _default(rope: Rope, head_dim: int, max_model_len: int) -> tuple[Tensor, float]:
    return 1.0 / rope.rope_theta ** _exponents(head_dim), 1.0


def _linear(rope: Rope, head_dim: int, max_model_len: int) -> tuple[Tensor, float]:
    assert rope.factor is not None
    return _default(rope, head_dim, max_model_len)[0] / rope.factor, 1.0


def _dynamic(rope: Rope, head_dim: int, max_model_len: int) -> tuple[Tensor, float]:
    assert rope.factor is not None
    stretch = rope.factor * max(max_model_len, rope.max_position_embeddings) / rope.max_position_embeddings
    base = rope.rope_theta * (stretch - (rope.factor - 1)) ** (head_dim / (head_dim - 2))
    return 1.0 / base ** _exponents(head_dim), 1.0


def _yarn(rope: Rope, head_dim: int, max_model_len: int) -> tuple[Tensor, float]:
    """Peng et al., "YaRN: Efficient Context Window Extension of Large Language Models" (arXiv:2309.00071)."""
    period = rope.rope_theta ** _exponents(head_dim)
    extrapolated, interpolated = 1.0 / period, 1.0 / (rope.yarn_factor * period)
    low, high = _yarn_correction_range(rope, head_dim)
    ramp = (torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)
    kept = 1 - ramp.clamp(0, 1)
    return interpolated * (1 - kept) + extrapolated * kept, _yarn_attention_factor(rope)


def _yarn_correction_range(rope: Rope, head_dim: int) -> tuple[float, float]:
    """Return the dimensions between which frequencies go over from extrapolation to interpolation."""

    def dimension(num_rotations: float) -> float:
        turns = rope.original_max_position_embeddings / (num_rotations * 2 * math.pi)
        return (head_dim * math.log(turns)) / (2 * math.log(rope.rope_theta))

    low, high = dimension(rope.beta_fast or 32), dimension(rope.beta_slow or 1)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    return low, high + 0.001 if low == high else high


def _yarn_attention_factor(rope: Rope) -> float:
    def scale(mscale: float) -> float:
        return 0.1 * mscale * math.log(rope.yarn_factor) + 1.0 if rope.yarn_factor > 1 else 1.0

    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return scale(rope.mscale) / scale(rope.mscale_all_dim)
    return scale(1.0)


def _llama3(rope: Rope, head_dim: int, max_model_len: int) -> tuple[Tensor, float]:
    assert rope.factor is not None
    assert rope.low_freq_factor is not None
    assert rope.high_freq_factor is not None
    inv_freq, _ = _default(rope, head_dim, max_model_len)
    trained_tokens = rope.original_max_position_embeddings
    wavelength = 2 * math.pi / inv_freq
    long = wavelength > trained_tokens / rope.low_freq_factor
    short = wavelength < trained_tokens / rope.high_freq_factor
    scaled = torch.where(long, inv_freq / rope.factor, inv_freq)
    smooth = (trained_tokens / wavelength - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    between = (1 - smooth) * scaled / rope.factor + smooth * scaled
    return torch.where(~long & ~short, between, scaled), 1.0


FREQUENCIES: dict[str, Callable[[Rope, int, int], tuple[Tensor, float]]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "yarn": _yarn,
    "llama3": _llama3,
}
# The keys that each type reads beside ANY, by transformers' `modeling_rope_utils`. Other types are not known here.
USED = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}
ANY = ("rope_type", "type", "rope_theta", "partial_rotary_factor", "original_max_position_embeddings")
REQUIRED = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}
