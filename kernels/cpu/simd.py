# Numba infers the types.
# mypy: allow-untyped-defs, allow-untyped-calls, allow-subclassing-any
"""Vectors of 16 float32 lanes for Numba, and pointers to float32 and bfloat16 memory.

Every operation is one IEEE operation per lane, in the order written: a result has the same bits in every loop that
computes it, and on every machine (but `bfloat16_products`). The compiler maps a vector to two AVX2 registers or one
AVX-512 register.

Some operations take a vector's 512 bits as 16, 32 or 64 integers; their names end in the kind: `_i32`, `_i16`, `_i8`.

Memory is a Numba array or a pointer made by `pointer`; 16-bit memory is bfloat16, widened by `load` and rounded to
nearest even by `store`.
"""

import operator
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
from llvmlite import binding, ir  # type: ignore[import-untyped]
from numba import types
from numba.core import cgutils
from numba.core.datamodel import models
from numba.extending import intrinsic, overload, register_model

from kernels.cpu.jit import routine

LANES = 16
REGISTER_LANES = 16 if binding.get_host_cpu_features().get("avx512f") else 8

_FLOAT = ir.FloatType()
_INT32 = ir.IntType(32)
_INT64 = ir.IntType(64)
_FLOATS = ir.VectorType(_FLOAT, LANES)


class VectorType(types.Type):
    """Numba's type of 16 float32 lanes."""

    def __init__(self) -> None:
        super().__init__(name="vector_of_16_float32")


vector = VectorType()


@register_model(VectorType)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, dmm: Any, fe_type: types.Type) -> None:
        super().__init__(dmm, fe_type, _FLOATS)


def _ints(bits: int, value: int | list[int] | None = None) -> Any:
    """Return the LLVM type of 16 integers of `bits`, or a constant of it."""
    kind = ir.VectorType(ir.IntType(bits), LANES)
    if value is None:
        return kind
    return ir.Constant(kind, value if isinstance(value, list) else [value] * LANES)


def _broadcast(builder: ir.IRBuilder, scalar: ir.Value) -> ir.Value:
    undefined = ir.Constant(ir.VectorType(scalar.type, LANES), ir.Undefined)
    single = builder.insert_element(undefined, scalar, ir.Constant(_INT32, 0))
    return builder.shuffle_vector(single, undefined, _ints(32, 0))


# Memory.


def _address(context: Any, builder: ir.IRBuilder, memory: types.Type, value: ir.Value, index: ir.Value) -> Any:
    """Return the byte address of element `index` of an array or a pointer."""
    if isinstance(memory, types.Array):
        value = context.make_array(memory)(context, builder, value).data
    offset = builder.mul(index, ir.Constant(_INT64, memory.dtype.bitwidth // 8))
    return builder.gep(builder.bitcast(value, ir.IntType(8).as_pointer()), [offset])


def _lane_type(memory: types.Type) -> ir.Type:
    return {32: _FLOAT, 16: ir.IntType(16)}[memory.dtype.bitwidth]


def _read(builder: ir.IRBuilder, address: ir.Value, memory: types.Type) -> ir.Value:
    kind = ir.VectorType(_lane_type(memory), LANES)
    return _widen(builder, builder.load(builder.bitcast(address, kind.as_pointer()), align=memory.dtype.bitwidth // 8))


def _widen(builder: ir.IRBuilder, raw: ir.Value) -> ir.Value:
    if raw.type == _FLOATS:
        return raw
    return builder.bitcast(builder.shl(builder.zext(raw, _ints(32)), _ints(32, 16)), _FLOATS)


def _write(builder: ir.IRBuilder, value: ir.Value, address: ir.Value, memory: types.Type) -> None:
    if _lane_type(memory) != _FLOAT:
        value = _round_to_bfloat16(builder, value)
    builder.store(value, builder.bitcast(address, value.type.as_pointer()), align=memory.dtype.bitwidth // 8)


def _round_to_bfloat16(builder: ir.IRBuilder, value: ir.Value) -> ir.Value:
    """Return 16 bfloat16 bit patterns: nearest even; a NaN stays one."""
    bits = builder.bitcast(value, _ints(32))
    odd = builder.and_(builder.lshr(bits, _ints(32, 16)), _ints(32, 1))
    rounded = builder.lshr(builder.add(bits, builder.add(odd, _ints(32, 0x7FFF))), _ints(32, 16))
    is_nan = builder.fcmp_unordered("uno", value, value)
    return builder.trunc(builder.select(is_nan, _ints(32, 0x7FC0), rounded), _ints(16))


def _lanes_buffer(builder: ir.IRBuilder, memory: types.Type) -> Any:
    """Return the byte address of a stack buffer for 16 elements of `memory`."""
    buffer = cgutils.alloca_once(builder, ir.VectorType(_lane_type(memory), LANES))
    return builder.bitcast(buffer, ir.IntType(8).as_pointer())


def _copy(builder: ir.IRBuilder, target: ir.Value, source: ir.Value, memory: types.Type, count: ir.Value) -> None:
    cgutils.raw_memcpy(builder, target, source, count, memory.dtype.bitwidth // 8, align=1)


@intrinsic
def pointer(typingctx, address, like):
    """Return the int64 `address` as a pointer to elements of `like`, a dtype or an array of that dtype."""
    result = types.CPointer(like.dtype)

    def generate(context, builder, signature, args):
        return builder.inttoptr(args[0], context.get_value_type(result))

    return result(types.int64, like), generate


@intrinsic
def address_of(typingctx, memory, index):
    """Return the address of an element as int64."""

    def generate(context, builder, signature, args):
        return builder.ptrtoint(_address(context, builder, memory, *args), _INT64)

    return types.int64(memory, types.int64), generate


@intrinsic
def load(typingctx, memory, index):
    """Return the 16 elements of `memory` from element `index` on."""

    def generate(context, builder, signature, args):
        return _read(builder, _address(context, builder, memory, *args), memory)

    return vector(memory, types.int64), generate


@intrinsic
def _load_some(typingctx, memory, index, count):
    """Return the `count` (0 to 16) elements of `memory` from element `index` on, then zeros."""

    def generate(context, builder, signature, args):
        source = _address(context, builder, memory, *args[:2])
        buffer = _lanes_buffer(builder, memory)
        _write(builder, ir.Constant(_FLOATS, None), buffer, memory)
        _copy(builder, buffer, source, memory, args[2])
        return _read(builder, buffer, memory)

    return vector(memory, types.int64, types.int64), generate


@intrinsic
def load_half(typingctx, memory, index):
    """Return 16 elements of 16-bit memory from element `index` on, taken as IEEE half precision."""

    def generate(context, builder, signature, args):
        kind = ir.VectorType(ir.HalfType(), LANES)
        address = builder.bitcast(_address(context, builder, memory, *args), kind.as_pointer())
        return builder.fpext(builder.load(address, align=2), _FLOATS)

    return vector(memory, types.int64), generate


@intrinsic
def load_splat(typingctx, memory, index):
    """Return a vector with element `index` of `memory` in every lane."""

    def generate(context, builder, signature, args):
        address = _address(context, builder, memory, *args)
        single = builder.load(builder.bitcast(address, _lane_type(memory).as_pointer()))
        return _widen(builder, _broadcast(builder, single))

    return vector(memory, types.int64), generate


@intrinsic
def store(typingctx, memory, index, value):
    """Write 16 lanes to `memory` from element `index` on."""

    def generate(context, builder, signature, args):
        _write(builder, args[2], _address(context, builder, memory, *args[:2]), memory)
        return context.get_dummy_value()

    return types.none(memory, types.int64, vector), generate


@intrinsic
def _store_some(typingctx, memory, index, count, value):
    """Write the first `count` (0 to 16) lanes to `memory` from element `index` on."""

    def generate(context, builder, signature, args):
        target = _address(context, builder, memory, *args[:2])
        buffer = _lanes_buffer(builder, memory)
        _write(builder, args[3], buffer, memory)
        _copy(builder, target, buffer, memory, args[2])
        return context.get_dummy_value()

    return types.none(memory, types.int64, types.int64, vector), generate


@routine(forceinline=True)
def load_part(memory, index, count):
    """Return the first `count` of the 16 elements from element `index` on, then zeros; 16 or more mean all."""
    if count >= LANES:
        return load(memory, index)
    return _load_some(memory, index, count)


@routine(forceinline=True)
def store_part(memory, index, count, value):
    """Write the first `count` lanes to `memory` from element `index` on; 16 or more mean all."""
    if count >= LANES:
        store(memory, index, value)
    else:
        _store_some(memory, index, count, value)


@intrinsic
def fetch_add(typingctx, memory, amount):
    """Atomically add `amount` to the first element of an int64 array; return what was there before."""

    def generate(context, builder, signature, args):
        address = context.make_array(memory)(context, builder, args[0]).data
        return builder.atomic_rmw("add", address, args[1], "monotonic")

    return types.int64(memory, types.int64), generate


@intrinsic
def prefetch(typingctx, memory, index):
    """Have the cache line of an element brought near; it may be anything."""

    def generate(context, builder, signature, args):
        place = _address(context, builder, memory, *args)
        kind = ir.FunctionType(ir.VoidType(), [place.type, _INT32, _INT32, _INT32])
        function = builder.module.declare_intrinsic("llvm.prefetch", (place.type,), kind)
        builder.call(function, [place, *(ir.Constant(_INT32, value) for value in (0, 3, 1))])
        return context.get_dummy_value()

    return types.none(memory, types.int64), generate


# Arithmetic.


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
        return _broadcast(builder, args[0])

    return vector(types.float32), generate


@intrinsic
def lane_indices(typingctx):
    """Return the numbers 0 to 15."""

    def generate(context, builder, signature, args):
        return ir.Constant(_FLOATS, [float(index) for index in range(LANES)])

    return vector(), generate


@intrinsic
def lane(typingctx, value, index):
    """Return one lane as float32."""

    def generate(context, builder, signature, args):
        return builder.extract_element(args[0], builder.trunc(args[1], _INT32))

    return types.float32(vector, types.int64), generate


@intrinsic
def fma(typingctx, factor, other, addend):
    """Return factor * other + addend, rounded once."""

    def generate(context, builder, signature, args):
        kind = ir.FunctionType(_FLOATS, [_FLOATS] * 3)
        return builder.call(builder.module.declare_intrinsic("llvm.fma.v16f32", (), kind), args)

    return vector(vector, vector, vector), generate


@intrinsic
def and_i32(typingctx, words, mask):
    """Return each lane's 32 bits & mask."""

    def generate(context, builder, signature, args):
        mask = _broadcast(builder, builder.trunc(args[1], _INT32))
        return builder.bitcast(builder.and_(builder.bitcast(args[0], _ints(32)), mask), _FLOATS)

    return vector(vector, types.int64), generate


@intrinsic
def shift_right_i32(typingctx, words, count):
    """Return each lane's 32 bits >> count."""

    def generate(context, builder, signature, args):
        count = _broadcast(builder, builder.trunc(args[1], _INT32))
        return builder.bitcast(builder.lshr(builder.bitcast(args[0], _ints(32)), count), _FLOATS)

    return vector(vector, types.int64), generate


@intrinsic
def shift_left_i32(typingctx, words, count):
    """Return each lane's 32 bits << count."""

    def generate(context, builder, signature, args):
        count = _broadcast(builder, builder.trunc(args[1], _INT32))
        return builder.bitcast(builder.shl(builder.bitcast(args[0], _ints(32)), count), _FLOATS)

    return vector(vector, types.int64), generate


def _store_low_bits(bits: int, order: list[int]) -> Any:
    """Return an intrinsic that writes the low `bits` of 16 words side by side, in another order."""

    @intrinsic
    def write(typingctx, memory, index, words):
        def generate(context, builder, signature, args):
            low = builder.trunc(builder.bitcast(args[2], _ints(32)), _ints(bits))
            low = builder.shuffle_vector(low, low, _ints(32, order))
            address = _address(context, builder, memory, *args[:2])
            builder.store(low, builder.bitcast(address, low.type.as_pointer()), align=4)
            return context.get_dummy_value()

        return types.none(memory, types.int64, vector), generate

    return write


store_low_i8 = _store_low_bits(8, [base + i for base in (0, 8) for i in (0, 2, 4, 6, 1, 3, 5, 7)])
store_low_i16 = _store_low_bits(16, [base + i for base in (0, 4, 8, 12) for i in (0, 2, 1, 3)])


@intrinsic(prefer_literal=True)
def zeros(typingctx, count):
    """Return a tuple of `count` vectors of zeros; the count is a constant."""
    result = types.UniTuple(vector, count.literal_value)

    def generate(context, builder, signature, args):
        return context.make_tuple(builder, result, [ir.Constant(_FLOATS, None)] * result.count)

    return result(count), generate


@intrinsic(prefer_literal=True)
def load_rows(typingctx, count, memory, index, stride):
    """Return a tuple of `count` vectors, `stride` elements of float32 memory apart, from `index`; a constant count."""
    result = types.UniTuple(vector, count.literal_value)

    def generate(context, builder, signature, args):
        _, memory, index, stride = args
        rows = []
        for _ in range(result.count):
            rows.append(_read(builder, _address(context, builder, signature.args[1], memory, index), signature.args[1]))
            index = builder.add(index, stride)
        return context.make_tuple(builder, result, rows)

    return result(count, memory, types.int64, types.int64), generate


@intrinsic
def store_rows(typingctx, memory, index, stride, rows):
    """Write a tuple of vectors `stride` elements of float32 memory apart from `index` on."""

    def generate(context, builder, signature, args):
        memory, index, stride, rows = args
        for row in cgutils.unpack_tuple(builder, rows):
            _write(builder, row, _address(context, builder, signature.args[0], memory, index), signature.args[0])
            index = builder.add(index, stride)
        return context.get_dummy_value()

    return types.none(memory, types.int64, types.int64, rows), generate


@intrinsic
def add_products(typingctx, sums, memory, index, stride, row):
    """Return fma(x, row, sum) for each of a tuple of sums; x are elements of `memory`, `stride` apart, from `index`."""

    def generate(context, builder, signature, args):
        sums, memory, index, stride, row = args
        kind = ir.FunctionType(_FLOATS, [_FLOATS] * 3)
        fused = builder.module.declare_intrinsic("llvm.fma.v16f32", (), kind)
        added = []
        for total in cgutils.unpack_tuple(builder, sums):
            address = _address(context, builder, signature.args[1], memory, index)
            x = builder.load(builder.bitcast(address, _FLOAT.as_pointer()))
            added.append(builder.call(fused, [_broadcast(builder, x), row, total]))
            index = builder.add(index, stride)
        return context.make_tuple(builder, signature.return_type, added)

    return sums(sums, memory, types.int64, types.int64, vector), generate


@intrinsic
def add_products_of_two(typingctx, sums, memory, index, stride, left, left_index, right, right_index):
    """As add_products of two vectors, which lie in memory; `sums` are those of the left one, then the right one's.

    It is done register by register: whole vectors with as many sums would be one register too many.
    """

    def generate(context, builder, signature, args):
        sums, memory, index, stride, left, left_index, right, right_index = args
        sums, width = cgutils.unpack_tuple(builder, sums), REGISTER_LANES
        part = ir.VectorType(_FLOAT, width)
        name = f"llvm.fma.v{width}f32"
        fused = builder.module.declare_intrinsic(name, (), ir.FunctionType(part, [part] * 3))
        num_rows = len(sums) // 2
        factors = []
        for _ in range(num_rows):
            address = _address(context, builder, signature.args[1], memory, index)
            x = builder.load(builder.bitcast(address, _FLOAT.as_pointer()))
            factors.append(_elements(builder, _broadcast(builder, x), range(width)))
            index = builder.add(index, stride)
        added = []
        for side, (kind, vectors, at) in enumerate(
            ((signature.args[4], left, left_index), (signature.args[6], right, right_index))
        ):
            parts: list[list[ir.Value]] = [[] for _ in range(num_rows)]
            for first in range(0, LANES, width):
                address = _address(context, builder, kind, vectors, builder.add(at, ir.Constant(_INT64, first)))
                raw_kind = ir.VectorType(_lane_type(kind), width)
                raw = builder.load(builder.bitcast(address, raw_kind.as_pointer()), align=kind.dtype.bitwidth // 8)
                if raw.type != part:
                    words = ir.VectorType(_INT32, width)
                    raw = builder.shl(builder.zext(raw, words), ir.Constant(words, [16] * width))
                    raw = builder.bitcast(raw, part)
                for row in range(num_rows):
                    total = _elements(builder, sums[side * num_rows + row], range(first, first + width))
                    parts[row].append(builder.call(fused, [factors[row], raw, total]))
            for low, *high in parts:
                for other in high:
                    low = builder.shuffle_vector(
                        low, other, ir.Constant(ir.VectorType(_INT32, LANES), list(range(LANES)))
                    )
                added.append(low)
        return context.make_tuple(builder, signature.return_type, added)

    integers = [types.int64] * 2
    return sums(sums, memory, *integers, left, types.int64, right, types.int64), generate


def _integers(count: int, bits: int) -> Any:
    return ir.VectorType(ir.IntType(bits), count)


def _elements(builder: ir.IRBuilder, value: ir.Value, indices: Any) -> ir.Value:
    indices = list(indices)
    return builder.shuffle_vector(value, value, ir.Constant(ir.VectorType(_INT32, len(indices)), indices))


class Instruction(NamedTuple):
    """An operation of the target's registers on integers."""

    name: str  # LLVM's
    width: int  # bits


def _in_registers(
    builder: ir.IRBuilder, instruction: Instruction, operands: list[ir.Value], result_bits: int
) -> ir.Value:
    """Return the result of an instruction for vectors of 512 bits."""
    name, width = instruction
    parts = []
    for first in range(0, 512, width):
        lanes = [range(first // size, (first + width) // size) for size in (v.type.element.width for v in operands)]
        part = [_elements(builder, value, indices) for value, indices in zip(operands, lanes, strict=True)]
        kind = ir.FunctionType(_integers(width // result_bits, result_bits), [value.type for value in part])
        parts.append(builder.call(cgutils.get_or_insert_function(builder.module, kind, name), part))
    if len(parts) == 1:
        return parts[0]
    low, high = parts
    all_lanes = list(range(512 // result_bits))
    return builder.shuffle_vector(low, high, ir.Constant(_integers(len(all_lanes), 32), all_lanes))


def _sum_groups(builder: ir.IRBuilder, products: ir.Value, size: int) -> ir.Value:
    """Return the sums of neighbouring elements, `size` (a power of two) at a time."""
    while size > 1:
        count = products.type.count
        halves = [_elements(builder, products, range(odd, count, 2)) for odd in (0, 1)]
        products, size = builder.add(*halves), size // 2
    return products


def _multiplied(builder: ir.IRBuilder, codes: ir.Value, x: ir.Value, result_bits: int) -> ir.Value:
    """Return products in integers of `result_bits`; bytes of `codes` have no sign."""
    wide = _integers(codes.type.count, result_bits)
    widen = builder.zext if codes.type.element.width == 8 else builder.sext
    return builder.mul(widen(codes, wide), builder.sext(x, wide))


class IntegerProducts(NamedTuple):
    """How a machine multiplies integers and adds the products up; `add` and `total` are Numba's intrinsics.

    With add(sums, memory, index, stride, row), 32 bits of memory are multiplied with each 32 bits of a row and added to
    a sum, as add_products does with floats; total(sums) makes sums of 32 bits of them.
    """

    add: Any
    total: Any


def integer_products(bits: int, features: Mapping[str, bool]) -> IntegerProducts:
    """Return how numbers of 8 or 16 bits are multiplied on a machine with `features`.

    32 bits of memory hold 4 bytes or 2 numbers of 16 bits, with a sign; those of a row 4 bytes without a sign or 2
    numbers with one. Until `total`, sums of bytes may be numbers of 16 bits, each of two products at a time: that they
    fit is for the caller to know. All ways give the same sums.
    """
    fused, multiply = _instructions(bits, features)
    sum_bits = 32 if fused or bits == 16 else 16

    def emit(builder: ir.IRBuilder, total: ir.Value, row: ir.Value, x: ir.Value) -> ir.Value:
        if fused:
            return _in_registers(builder, fused, [total, row, x], 32)
        if multiply:
            return builder.add(total, _in_registers(builder, multiply, [row, x], sum_bits))
        return builder.add(total, _sum_groups(builder, _multiplied(builder, row, x, sum_bits), sum_bits // bits))

    @intrinsic
    def add(typingctx, sums, memory, index, stride, row):
        def generate(context, builder, signature, args):
            sums, memory, index, stride, row = args
            row = builder.bitcast(row, _integers(512 // bits, bits))
            added = []
            for total in cgutils.unpack_tuple(builder, sums):
                address = _address(context, builder, signature.args[1], memory, index)
                word = builder.load(builder.bitcast(address, _INT32.as_pointer()), align=4)
                x = builder.bitcast(_broadcast(builder, word), row.type)
                total = emit(builder, builder.bitcast(total, _integers(512 // sum_bits, sum_bits)), row, x)
                added.append(builder.bitcast(total, _FLOATS))
                index = builder.add(index, stride)
            return context.make_tuple(builder, signature.return_type, added)

        return sums(sums, memory, types.int64, types.int64, vector), generate

    @intrinsic
    def total(typingctx, sums):
        def generate(context, builder, signature, args):
            if sum_bits == 32:
                return args[0]
            ones = ir.Constant(_integers(32, 16), [1] * 32)
            _, multiply = _instructions(16, features)
            totals = []
            for value in cgutils.unpack_tuple(builder, args[0]):
                pairs = builder.bitcast(value, ones.type)
                if multiply:
                    pairs = _in_registers(builder, multiply, [pairs, ones], 32)
                else:
                    pairs = _sum_groups(builder, builder.sext(pairs, _integers(32, 32)), 2)
                totals.append(builder.bitcast(pairs, _FLOATS))
            return context.make_tuple(builder, signature.return_type, totals)

        return sums(sums), generate

    return IntegerProducts(add, total)


def _instructions(bits: int, features: Mapping[str, bool]) -> tuple[Instruction | None, Instruction | None]:
    """Return what adds products of 8 or 16 bits to a sum of 32, and what only multiplies and adds pairs, if any."""
    fused, narrow, wide = {
        8: ("vpdpbusd", "avx2.pmadd.ub.sw", "avx512.pmaddubs.w.512"),
        16: ("vpdpwssd", "avx2.pmadd.wd", "avx512.pmaddw.d.512"),
    }[bits]
    if features.get("avx512vnni"):
        return Instruction(f"llvm.x86.avx512.{fused}.512", 512), None
    if features.get("avxvnni"):
        return Instruction(f"llvm.x86.avx512.{fused}.256", 256), None
    if features.get("avx512bw"):
        return None, Instruction(f"llvm.x86.{wide}", 512)
    if features.get("avx2"):
        return None, Instruction(f"llvm.x86.{narrow}", 256)
    return None, None


class _BFloatType(ir.HalfType):
    """LLVM's bfloat, for which llvmlite has no class."""

    def __str__(self) -> str:
        return "bfloat"


_BFloatType._create_instance()


def bfloat16_products(features: Mapping[str, bool]) -> Any:
    """Return an intrinsic like add_products for bfloat16 numbers in pairs, each pair 32 bits of memory and of a row.

    With AVX-512-BF16 it is one instruction, which takes numbers below the least normal one for zero. Without, it is a
    fused multiply-add with the lower number of each pair, then one with the other.
    """
    has_instruction = features.get("avx512bf16", False)

    def emit(builder: ir.IRBuilder, total: ir.Value, row: ir.Value, x: ir.Value) -> ir.Value:
        if has_instruction:
            pairs = ir.VectorType(_BFloatType(), 2 * LANES)
            kind = ir.FunctionType(_FLOATS, [_FLOATS, pairs, pairs])
            name = "llvm.x86.avx512bf16.dpbf16ps.512"
            multiply = cgutils.get_or_insert_function(builder.module, kind, name)
            return builder.call(multiply, [total, builder.bitcast(row, pairs), builder.bitcast(x, pairs)])
        fused = builder.module.declare_intrinsic("llvm.fma.v16f32", (), ir.FunctionType(_FLOATS, [_FLOATS] * 3))
        for widen in (
            lambda words: builder.shl(words, _ints(32, 16)),
            lambda words: builder.and_(words, _ints(32, 0xFFFF0000)),
        ):
            total = builder.call(fused, [builder.bitcast(widen(words), _FLOATS) for words in (x, row)] + [total])
        return total

    @intrinsic
    def add(typingctx, sums, memory, index, stride, row):
        def generate(context, builder, signature, args):
            sums, memory, index, stride, row = args
            row, added = builder.bitcast(row, _ints(32)), []
            for total in cgutils.unpack_tuple(builder, sums):
                address = _address(context, builder, signature.args[1], memory, index)
                word = builder.load(builder.bitcast(address, _INT32.as_pointer()), align=4)
                added.append(emit(builder, total, row, _broadcast(builder, word)))
                index = builder.add(index, stride)
            return context.make_tuple(builder, signature.return_type, added)

        return sums(sums, memory, types.int64, types.int64, vector), generate

    return add


_FEATURES = binding.get_host_cpu_features()
HAS_BFLOAT16 = _FEATURES.get("avx512bf16", False)  # instructions that multiply such numbers in pairs
products_bfloat16 = bfloat16_products(_FEATURES)
products_i8 = integer_products(8, _FEATURES)
products_i16 = integer_products(16, _FEATURES)


@intrinsic
def add_scaled(typingctx, sums, factors, added, first, stride, scales, offsets, out, out_first, out_stride):
    """Add, for each i of a tuple of sums (32-bit integers), sums[i] * factors[i] * scales + added[i] * offsets to out.

    factors[i] and added[i] are elements of memory, `stride` apart, from `first`; `scales` and `offsets` are vectors;
    the vector of out is at out_first + i * out_stride. Each sum is rounded to a float32, multiplied by its factor, and
    added with a fused multiply-add; then the other product is, with another.
    """

    def generate(context, builder, signature, args):
        sums, factors, added, first, stride, scales, offsets, out, out_first, out_stride = args
        kind = ir.FunctionType(_FLOATS, [_FLOATS] * 3)
        fused = builder.module.declare_intrinsic("llvm.fma.v16f32", (), kind)

        def element(memory, value):
            address = _address(context, builder, signature.args[memory], value, first)
            return _broadcast(builder, builder.load(builder.bitcast(address, _FLOAT.as_pointer()), align=4))

        for total in cgutils.unpack_tuple(builder, sums):
            floats = builder.fmul(builder.sitofp(builder.bitcast(total, _ints(32)), _FLOATS), element(1, factors))
            address = builder.bitcast(
                _address(context, builder, signature.args[7], out, out_first), _FLOATS.as_pointer()
            )
            result = builder.call(fused, [floats, scales, builder.load(address, align=4)])
            result = builder.call(fused, [element(2, added), offsets, result])
            builder.store(result, address, align=4)
            first, out_first = builder.add(first, stride), builder.add(out_first, out_stride)
        return context.get_dummy_value()

    integers = [types.int64] * 2
    return types.none(sums, factors, added, *integers, vector, vector, out, *integers), generate


@intrinsic
def keep(typingctx, value, first, start, stop, other):
    """Return `value` in the lanes with start <= first + lane < stop, `other` elsewhere."""

    def generate(context, builder, signature, args):
        value, first, start, stop, other = args
        first, start, stop = (_broadcast(builder, builder.trunc(value, _INT32)) for value in (first, start, stop))
        lanes = builder.add(first, _ints(32, list(range(LANES))))
        above, below = builder.icmp_signed(">=", lanes, start), builder.icmp_signed("<", lanes, stop)
        return builder.select(builder.and_(above, below), value, other)

    return vector(vector, types.int64, types.int64, types.int64, vector), generate


@intrinsic
def copy_sign(typingctx, magnitude, sign):
    """Return the absolute value of `magnitude` with the sign of `sign` for each lane."""

    def generate(context, builder, signature, args):
        kind = ir.FunctionType(_FLOATS, [_FLOATS] * 2)
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
        halves = _elements(builder, value, range(width)), _elements(builder, value, range(width, 2 * width))
        value = combine(*halves)
    return builder.extract_element(value, ir.Constant(_INT32, 0))


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


@intrinsic
def _scale_by_power_of_two(typingctx, value, exponent_plus_magic):
    """Return value * 2**n, where n (-126 to 127) stands in the low bits of n + _ROUND_MAGIC."""

    def generate(context, builder, signature, args):
        biased = builder.add(builder.bitcast(args[1], _ints(32)), _ints(32, 127))
        return builder.fmul(args[0], builder.bitcast(builder.shl(biased, _ints(32, 23)), _FLOATS))

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
