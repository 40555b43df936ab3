# Numba infers the types.
# mypy: allow-untyped-defs, allow-untyped-calls, allow-subclassing-any
"""Vectors of 16 float32 lanes for Numba.

Every operation is one IEEE operation per lane, in the order written: a result has the same bits in every loop that
computes it, and on every machine. The compiler maps a vector to two AVX2 registers or one AVX-512 register.

Some operations take a vector's 512 bits as 16 integers; their names end in `_i32`.
"""

import operator
from collections.abc import Callable
from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.core.datamodel import models
from numba.extending import intrinsic, overload, register_model

from octavo.kernels.cpu.jit import FEATURES
from octavo.kernels.cpu.lanes import (
    FLOATS,
    INT32,
    LANES,
    REGISTER_LANES,
    broadcast,
    constants,
    elements,
    fused_multiply_add,
    integers,
)


class VectorType(types.Type):
    """Numba's type of 16 float32 lanes."""

    def __init__(self) -> None:
        super().__init__(name="vector_of_16_float32")


vector = VectorType()


@register_model(VectorType)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, dmm: Any, fe_type: types.Type) -> None:
        super().__init__(dmm, fe_type, FLOATS)


def _operation(emit: Callable[[ir.IRBuilder, ir.Value, ir.Value], ir.Value]) -> Any:
    """Return an intrinsic that combines two vectors lane by lane."""

    @intrinsic
    def combine(typingctx, left, right):
        def generate(context, builder, signature, args):
            return emit(builder, *args)

        return vector(vector, vector), generate

    return combine


def _emit_maximum(builder: ir.IRBuilder, left: ir.Value, right: ir.Value) -> ir.Value:
    return builder.select(builder.fcmp_ordered(">", left, right), left, right)


def _emit_minimum(builder: ir.IRBuilder, left: ir.Value, right: ir.Value) -> ir.Value:
    return builder.select(builder.fcmp_ordered("<", left, right), left, right)


maximum = _operation(_emit_maximum)  # the right one where either is NaN
minimum = _operation(_emit_minimum)


def _overload_operator(symbol: Any, emit: Callable[[ir.IRBuilder, ir.Value, ir.Value], ir.Value]) -> None:
    combine = _operation(emit)

    @overload(symbol)
    def choose(left, right):
        if isinstance(left, VectorType) and isinstance(right, VectorType):
            return lambda left, right: combine(left, right)
        return None


_overload_operator(operator.add, lambda builder, left, right: builder.fadd(left, right))
_overload_operator(operator.sub, lambda builder, left, right: builder.fsub(left, right))
_overload_operator(operator.mul, lambda builder, left, right: builder.fmul(left, right))
_overload_operator(operator.truediv, lambda builder, left, right: builder.fdiv(left, right))


@intrinsic
def splat(typingctx, scalar):
    """Return a vector with the float32 `scalar` in every lane."""

    def generate(context, builder, signature, args):
        return broadcast(builder, args[0])

    return vector(types.float32), generate


@intrinsic
def lane_indices(typingctx):
    """Return the numbers 0 to 15."""

    def generate(context, builder, signature, args):
        return ir.Constant(FLOATS, [float(index) for index in range(LANES)])

    return vector(), generate


@intrinsic
def lane(typingctx, value, index):
    """Return one lane as float32."""

    def generate(context, builder, signature, args):
        return builder.extract_element(args[0], builder.trunc(args[1], INT32))

    return types.float32(vector, types.int64), generate


@intrinsic
def fma(typingctx, factor, other, addend):
    """Return factor * other + addend, rounded once."""

    def generate(context, builder, signature, args):
        return fused_multiply_add(builder, *args)

    return vector(vector, vector, vector), generate


@intrinsic
def and_i32(typingctx, words, mask):
    """Return each lane's 32 bits & mask."""

    def generate(context, builder, signature, args):
        mask = broadcast(builder, builder.trunc(args[1], INT32))
        return builder.bitcast(builder.and_(builder.bitcast(args[0], integers(32)), mask), FLOATS)

    return vector(vector, types.int64), generate


@intrinsic
def upper_halves(typingctx, words):
    """Return each lane's upper 16 bits, in their place."""

    def generate(context, builder, signature, args):
        mask = constants(32, 0xFFFF0000)
        if REGISTER_LANES < LANES:
            mask = _hidden(builder, mask)
        return builder.bitcast(builder.and_(builder.bitcast(args[0], integers(32)), mask), FLOATS)

    return vector(vector), generate


def _hidden(builder: ir.IRBuilder, constant: ir.Constant) -> ir.Value:
    """Return a constant of 16 integers without the compiler's knowing its value.

    Of some masks it makes `vpblendw`, which on AMD's Zen takes the ports of multiply-adds: 6 rows of bfloat16 products
    were 10.0 instead of 11.5 multiply-adds a cycle.
    """
    if not FEATURES.get("avx2"):
        return constant
    half = ir.VectorType(constant.type.element, LANES // 2)
    part = builder.call(
        ir.InlineAsm(ir.FunctionType(half, [half]), "", "=x,0"), [elements(builder, constant, range(LANES // 2))]
    )
    return elements(builder, part, 2 * list(range(LANES // 2)))


@intrinsic
def shift_right_i32(typingctx, words, count):
    """Return each lane's 32 bits >> count."""

    def generate(context, builder, signature, args):
        count = broadcast(builder, builder.trunc(args[1], INT32))
        return builder.bitcast(builder.lshr(builder.bitcast(args[0], integers(32)), count), FLOATS)

    return vector(vector, types.int64), generate


@intrinsic
def shift_left_i32(typingctx, words, count):
    """Return each lane's 32 bits << count."""

    def generate(context, builder, signature, args):
        count = broadcast(builder, builder.trunc(args[1], INT32))
        return builder.bitcast(builder.shl(builder.bitcast(args[0], integers(32)), count), FLOATS)

    return vector(vector, types.int64), generate


@intrinsic(prefer_literal=True)
def zeros(typingctx, count):
    """Return a tuple of `count` vectors of zeros; the count is a constant."""
    result = types.UniTuple(vector, count.literal_value)

    def generate(context, builder, signature, args):
        return context.make_tuple(builder, result, [ir.Constant(FLOATS, None)] * result.count)

    return result(count), generate


@intrinsic
def keep(typingctx, value, first, start, stop, other):
    """Return `value` in the lanes with start <= first + lane < stop, `other` elsewhere."""

    def generate(context, builder, signature, args):
        value, first, start, stop, other = args
        first, start, stop = (broadcast(builder, builder.trunc(value, INT32)) for value in (first, start, stop))
        lanes = builder.add(first, constants(32, range(LANES)))
        above, below = builder.icmp_signed(">=", lanes, start), builder.icmp_signed("<", lanes, stop)
        return builder.select(builder.and_(above, below), value, other)

    return vector(vector, types.int64, types.int64, types.int64, vector), generate


@intrinsic
def copy_sign(typingctx, magnitude, sign):
    """Return the absolute value of `magnitude` with the sign of `sign` for each lane."""

    def generate(context, builder, signature, args):
        kind = ir.FunctionType(FLOATS, [FLOATS] * 2)
        return builder.call(builder.module.declare_intrinsic("llvm.copysign.v16f32", (), kind), args)

    return vector(vector, vector), generate


@intrinsic
def choose_below(typingctx, value, limit, below, other):
    """Return `below` in the lanes with value < limit, `other` elsewhere."""

    def generate(context, builder, signature, args):
        value, limit, below, other = args
        return builder.select(builder.fcmp_ordered("<", value, limit), below, other)

    return vector(vector, vector, vector, vector), generate


def _fold(builder: ir.IRBuilder, value: ir.Value, combine: Callable[[ir.Value, ir.Value], ir.Value]) -> ir.Value:
    """Return all lanes combined as a balanced tree: lane i with i + 8, then i + 4, i + 2, i + 1."""
    for width in (8, 4, 2, 1):
        halves = elements(builder, value, range(width)), elements(builder, value, range(width, 2 * width))
        value = combine(*halves)
    return builder.extract_element(value, ir.Constant(INT32, 0))


@intrinsic
def sum_of_lanes(typingctx, value):
    """Return the sum of the lanes as float32, added up as a balanced tree."""

    def generate(context, builder, signature, args):
        return _fold(builder, args[0], builder.fadd)

    return types.float32(vector), generate


@intrinsic
def largest_lane(typingctx, value):
    """Return the largest lane as float32."""

    def generate(context, builder, signature, args):
        return _fold(builder, args[0], lambda left, right: _emit_maximum(builder, left, right))

    return types.float32(vector), generate
