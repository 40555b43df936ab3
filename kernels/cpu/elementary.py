# Numba infers the types.
# mypy: allow-untyped-defs, allow-untyped-calls, allow-subclassing-any
"""Elementary functions of vectors of 16 float32 lanes."""

import numpy as np
from numba.extending import intrinsic

from octavo.kernels.cpu.jit import routine
from octavo.kernels.cpu.lanes import FLOATS, constants, integers
from octavo.kernels.cpu.simd import choose_below, copy_sign, fma, maximum, minimum, splat, vector


@intrinsic
def _scale_by_power_of_two(typingctx, value, exponent_plus_magic):
    """Return value * 2**n, where n (-126 to 127) stands in the low bits of n + _ROUND_MAGIC."""

    def generate(context, builder, signature, args):
        biased = builder.add(builder.bitcast(args[1], integers(32)), constants(32, 127))
        return builder.fmul(args[0], builder.bitcast(builder.shl(biased, constants(32, 23)), FLOATS))

    return vector(vector, vector), generate


_ROUND_MAGIC = np.float32(1.5 * 2**23)  # adding it rounds to a whole number
_LOG2_E = np.float32(1.44269504088896341)
_MINUS_LN_2_HIGH = np.float32(-0.693359375)
_MINUS_LN_2_LOW = np.float32(2.12194440e-4)
_LEAST = np.float32(-87.0)
_MOST = np.float32(88.0)
_P5, _P4, _P3 = np.float32(1.9875691500e-4), np.float32(1.3981999507e-3), np.float32(8.3334519073e-3)
_P2, _P1, _P0 = np.float32(4.1665795894e-2), np.float32(1.6666665459e-1), np.float32(5.0000001201e-1)
_ZERO, _ONE, _TWO = np.float32(0.0), np.float32(1.0), np.float32(2.0)
_SMALL = np.float32(0.625)
_T4, _T3, _T2 = np.float32(-5.70498872745e-3), np.float32(2.06390887954e-2), np.float32(-5.37397155531e-2)
_T1, _T0 = np.float32(1.33314422036e-1), np.float32(-3.33332819422e-1)


@routine(forceinline=True)
def exp(x):
    """Return e**x for each lane, x clamped to -87..88; exp(0) is exactly 1. The polynomial is Cephes' expf."""
    x = minimum(splat(_MOST), maximum(splat(_LEAST), x))
    shifted = fma(x, splat(_LOG2_E), splat(_ROUND_MAGIC))
    whole = shifted - splat(_ROUND_MAGIC)
    rest = fma(whole, splat(_MINUS_LN_2_LOW), fma(whole, splat(_MINUS_LN_2_HIGH), x))
    value = fma(splat(_P5), rest, splat(_P4))
    value = fma(value, rest, splat(_P3))
    value = fma(value, rest, splat(_P2))
    value = fma(value, rest, splat(_P1))
    value = fma(value, rest, splat(_P0))
    return _scale_by_power_of_two(fma(value, rest * rest, rest) + splat(_ONE), shifted)


@routine(forceinline=True)
def tanh(x):
    """Return tanh(x) for each lane, less than 1.5 units in the last place off. The algorithm is Cephes' tanhf."""
    size = copy_sign(x, splat(_ONE))
    square = x * x
    value = fma(splat(_T4), square, splat(_T3))
    value = fma(value, square, splat(_T2))
    value = fma(value, square, splat(_T1))
    value = fma(value, square, splat(_T0))
    small = fma(value, square * x, x)
    large = splat(_ONE) - splat(_TWO) / (exp(size + size) + splat(_ONE))
    return choose_below(size, splat(_SMALL), small, copy_sign(large, x))
