# Numba infers the types.
# mypy: allow-untyped-defs, allow-untyped-calls, allow-subclassing-any
"""Reads and writes of vectors of 16 float32 lanes.

Memory is a Numba array or a pointer made by `pointer`; 16-bit memory is bfloat16, widened by `load` and rounded to
nearest even by `store`. What writes a vector's 512 bits as 16 integers has a name that ends in the kind: `_i16`, `_i8`.
"""

from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from octavo.kernels.cpu.jit import routine
from octavo.kernels.cpu.lanes import FLOAT, FLOATS, INT32, INT64, LANES, broadcast, constants, elements, integers
from octavo.kernels.cpu.simd import vector


def element_address(context: Any, builder: ir.IRBuilder, memory: types.Type, value: ir.Value, index: ir.Value) -> Any:
    """Return the byte address of element `index` of an array or a pointer."""
    if isinstance(memory, types.Array):
        value = context.make_array(memory)(context, builder, value).data
    offset = builder.mul(index, ir.Constant(INT64, memory.dtype.bitwidth // 8))
    return builder.gep(builder.bitcast(value, ir.IntType(8).as_pointer()), [offset])


def element_type(memory: types.Type) -> ir.Type:
    """Return the LLVM type of an element: bfloat16 is an integer."""
    return {32: FLOAT, 16: ir.IntType(16)}[memory.dtype.bitwidth]


def _read(builder: ir.IRBuilder, address: ir.Value, memory: types.Type) -> ir.Value:
    kind = ir.VectorType(element_type(memory), LANES)
    return widen(builder, builder.load(builder.bitcast(address, kind.as_pointer()), align=memory.dtype.bitwidth // 8))


def widen(builder: ir.IRBuilder, raw: ir.Value) -> ir.Value:
    """Return a vector of elements as float32, which they may be already."""
    if raw.type.element == FLOAT:
        return raw
    count = raw.type.count
    words = builder.shl(builder.zext(raw, integers(32, count)), constants(32, [16] * count))
    return builder.bitcast(words, ir.VectorType(FLOAT, count))


def _write(builder: ir.IRBuilder, value: ir.Value, address: ir.Value, memory: types.Type) -> None:
    if element_type(memory) != FLOAT:
        value = _round_to_bfloat16(builder, value)
    builder.store(value, builder.bitcast(address, value.type.as_pointer()), align=memory.dtype.bitwidth // 8)


def _round_to_bfloat16(builder: ir.IRBuilder, value: ir.Value) -> ir.Value:
    """Return 16 bfloat16 bit patterns: nearest even; a NaN stays one."""
    bits = builder.bitcast(value, integers(32))
    odd = builder.and_(builder.lshr(bits, constants(32, 16)), constants(32, 1))
    rounded = builder.lshr(builder.add(bits, builder.add(odd, constants(32, 0x7FFF))), constants(32, 16))
    is_nan = builder.fcmp_unordered("uno", value, value)
    return builder.trunc(builder.select(is_nan, constants(32, 0x7FC0), rounded), integers(16))


def _lanes_buffer(builder: ir.IRBuilder, memory: types.Type) -> Any:
    """Return the byte address of a stack buffer for 16 elements of `memory`."""
    buffer = cgutils.alloca_once(builder, ir.VectorType(element_type(memory), LANES))
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
        return builder.ptrtoint(element_address(context, builder, memory, *args), INT64)

    return types.int64(memory, types.int64), generate


@intrinsic
def load(typingctx, memory, index):
    """Return the 16 elements of `memory` from element `index` on."""

    def generate(context, builder, signature, args):
        return _read(builder, element_address(context, builder, memory, *args), memory)

    return vector(memory, types.int64), generate


@intrinsic
def _load_some(typingctx, memory, index, count):
    """Return the `count` (0 to 16) elements of `memory` from element `index` on, then zeros."""

    def generate(context, builder, signature, args):
        source = element_address(context, builder, memory, *args[:2])
        buffer = _lanes_buffer(builder, memory)
        _write(builder, ir.Constant(FLOATS, None), buffer, memory)
        _copy(builder, buffer, source, memory, args[2])
        return _read(builder, buffer, memory)

    return vector(memory, types.int64, types.int64), generate


@intrinsic
def load_half(typingctx, memory, index):
    """Return 16 elements of 16-bit memory from element `index` on, taken as IEEE half precision."""

    def generate(context, builder, signature, args):
        kind = ir.VectorType(ir.HalfType(), LANES)
        address = builder.bitcast(element_address(context, builder, memory, *args), kind.as_pointer())
        return builder.fpext(builder.load(address, align=2), FLOATS)

    return vector(memory, types.int64), generate


@intrinsic
def load_splat(typingctx, memory, index):
    """Return a vector with element `index` of `memory` in every lane."""

    def generate(context, builder, signature, args):
        address = element_address(context, builder, memory, *args)
        single = builder.load(builder.bitcast(address, element_type(memory).as_pointer()))
        return widen(builder, broadcast(builder, single))

    return vector(memory, types.int64), generate


@intrinsic
def store(typingctx, memory, index, value):
    """Write 16 lanes to `memory` from element `index` on."""

    def generate(context, builder, signature, args):
        _write(builder, args[2], element_address(context, builder, memory, *args[:2]), memory)
        return context.get_dummy_value()

    return types.none(memory, types.int64, vector), generate


@intrinsic
def _store_some(typingctx, memory, index, count, value):
    """Write the first `count` (0 to 16) lanes to `memory` from element `index` on."""

    def generate(context, builder, signature, args):
        target = element_address(context, builder, memory, *args[:2])
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
        place = element_address(context, builder, memory, *args)
        kind = ir.FunctionType(ir.VoidType(), [place.type, INT32, INT32, INT32])
        function = builder.module.declare_intrinsic("llvm.prefetch", (place.type,), kind)
        builder.call(function, [place, *(ir.Constant(INT32, value) for value in (0, 3, 1))])
        return context.get_dummy_value()

    return types.none(memory, types.int64), generate


def _store_low_bits(bits: int, order: list[int]) -> Any:
    """Return an intrinsic that writes the low `bits` of 16 words side by side, in another order."""

    @intrinsic
    def write(typingctx, memory, index, words):
        def generate(context, builder, signature, args):
            low = elements(builder, builder.trunc(builder.bitcast(args[2], integers(32)), integers(bits)), order)
            address = element_address(context, builder, memory, *args[:2])
            builder.store(low, builder.bitcast(address, low.type.as_pointer()), align=4)
            return context.get_dummy_value()

        return types.none(memory, types.int64, vector), generate

    return write


store_low_i8 = _store_low_bits(8, [base + i for base in (0, 8) for i in (0, 2, 4, 6, 1, 3, 5, 7)])
store_low_i16 = _store_low_bits(16, [base + i for base in (0, 4, 8, 12) for i in (0, 2, 1, 3)])


@intrinsic(prefer_literal=True)
def load_rows(typingctx, count, memory, index, stride):
    """Return a tuple of `count` vectors, `stride` elements of float32 memory apart, from `index`; a constant count."""
    result = types.UniTuple(vector, count.literal_value)

    def generate(context, builder, signature, args):
        _, value, index, stride = args
        rows = []
        for _ in range(result.count):
            rows.append(_read(builder, element_address(context, builder, memory, value, index), memory))
            index = builder.add(index, stride)
        return context.make_tuple(builder, result, rows)

    return result(count, memory, types.int64, types.int64), generate


@intrinsic
def store_rows(typingctx, memory, index, stride, rows):
    """Write a tuple of vectors `stride` elements of float32 memory apart from `index` on."""

    def generate(context, builder, signature, args):
        value, index, stride, rows = args
        for row in cgutils.unpack_tuple(builder, rows):
            _write(builder, row, element_address(context, builder, memory, value, index), memory)
            index = builder.add(index, stride)
        return context.get_dummy_value()

    return types.none(memory, types.int64, types.int64, rows), generate
