# Numba infers the types.
# mypy: allow-untyped-defs, allow-untyped-calls, allow-subclassing-any
"""Products added to tuples of vectors: of float32, of bfloat16 in pairs, and of integers.

A vector of sums, 16 lanes, belongs to each row of inputs: an element of memory, or a word of several numbers, is
multiplied with each lane of an operand that all rows share. A tuple of as many vectors as there are rows stays in
registers.

Sums of float32 and of integers have the same bits on every machine; sums of bfloat16 pairs do not (see
`bfloat16_products`).
"""

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any, NamedTuple

from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from octavo.kernels.cpu.jit import FEATURES
from octavo.kernels.cpu.lanes import (
    FLOAT,
    FLOATS,
    INT32,
    INT64,
    LANES,
    REGISTER_LANES,
    broadcast,
    constants,
    elements,
    fused_multiply_add,
    integers,
    joined,
)
from octavo.kernels.cpu.memory import element_address, element_type, widen
from octavo.kernels.cpu.simd import vector


def _broadcasts(
    context: Any, builder: ir.IRBuilder, memory: types.Type, values: list[ir.Value], kind: ir.Type
) -> Iterator[ir.Value]:
    """Yield, for one row after the other, its element in all lanes; `values` are memory, index and stride."""
    value, index, stride = values
    while True:
        address = element_address(context, builder, memory, value, index)
        yield broadcast(builder, builder.load(builder.bitcast(address, kind.as_pointer()), align=4))
        index = builder.add(index, stride)


@intrinsic
def add_products(typingctx, sums, memory, index, stride, row):
    """Return fma(x, row, sum) for each of a tuple of sums; x are elements of `memory`, `stride` apart, from `index`."""

    def generate(context, builder, signature, args):
        sums, *values, row = args
        rows = _broadcasts(context, builder, signature.args[1], values, FLOAT)
        totals = cgutils.unpack_tuple(builder, sums)
        added = [fused_multiply_add(builder, x, row, total) for total, x in zip(totals, rows, strict=False)]
        return context.make_tuple(builder, signature.return_type, added)

    return sums(sums, memory, types.int64, types.int64, vector), generate


@intrinsic
def add_products_of_two(typingctx, sums, memory, index, stride, left, left_index, right, right_index):
    """As add_products of two vectors, which lie in memory; `sums` are those of the left one, then the right one's.

    The products are added register by register: whole vectors with as many sums would need one register too many.
    """

    def generate(context, builder, signature, args):
        sums, *values, left, left_index, right, right_index = args
        sums, width = cgutils.unpack_tuple(builder, sums), REGISTER_LANES
        num_rows = len(sums) // 2
        rows = islice(_broadcasts(context, builder, signature.args[1], values, FLOAT), num_rows)
        factors = [elements(builder, x, range(width)) for x in rows]
        added = []
        for side, (kind, vectors, at) in enumerate(
            ((signature.args[4], left, left_index), (signature.args[6], right, right_index))
        ):
            parts: list[list[ir.Value]] = [[] for _ in range(num_rows)]
            for first in range(0, LANES, width):
                address = element_address(context, builder, kind, vectors, builder.add(at, ir.Constant(INT64, first)))
                raw_kind = ir.VectorType(element_type(kind), width)
                raw = builder.load(builder.bitcast(address, raw_kind.as_pointer()), align=kind.dtype.bitwidth // 8)
                operand = widen(builder, raw)
                for row in range(num_rows):
                    total = elements(builder, sums[side * num_rows + row], range(first, first + width))
                    parts[row].append(fused_multiply_add(builder, factors[row], operand, total))
            added += [joined(builder, part) for part in parts]
        return context.make_tuple(builder, signature.return_type, added)

    index_and_stride = [types.int64] * 2
    return sums(sums, memory, *index_and_stride, left, types.int64, right, types.int64), generate


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
        part = [elements(builder, value, indices) for value, indices in zip(operands, lanes, strict=True)]
        kind = ir.FunctionType(integers(result_bits, width // result_bits), [value.type for value in part])
        parts.append(builder.call(cgutils.get_or_insert_function(builder.module, kind, name), part))
    return joined(builder, parts)


def _sum_groups(builder: ir.IRBuilder, products: ir.Value, size: int) -> ir.Value:
    """Return the sums of neighbouring elements, `size` (a power of two) at a time."""
    while size > 1:
        count = products.type.count
        halves = [elements(builder, products, range(odd, count, 2)) for odd in (0, 1)]
        products, size = builder.add(*halves), size // 2
    return products


def _multiplied(builder: ir.IRBuilder, codes: ir.Value, x: ir.Value, result_bits: int) -> ir.Value:
    """Return products in integers of `result_bits`; bytes of `codes` have no sign."""
    wide = integers(result_bits, codes.type.count)
    extend = builder.zext if codes.type.element.width == 8 else builder.sext
    return builder.mul(extend(codes, wide), builder.sext(x, wide))


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
    numbers with one. Until `total`, sums of bytes may be numbers of 16 bits, each of two products at a time; the caller
    must know that they fit. All ways give the same sums.
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
            sums, *values, row = args
            row = builder.bitcast(row, integers(bits, 512 // bits))
            words = _broadcasts(context, builder, signature.args[1], values, INT32)
            added = []
            for total, word in zip(cgutils.unpack_tuple(builder, sums), words, strict=False):
                x = builder.bitcast(word, row.type)
                total = emit(builder, builder.bitcast(total, integers(sum_bits, 512 // sum_bits)), row, x)
                added.append(builder.bitcast(total, FLOATS))
            return context.make_tuple(builder, signature.return_type, added)

        return sums(sums, memory, types.int64, types.int64, vector), generate

    @intrinsic
    def total(typingctx, sums):
        def generate(context, builder, signature, args):
            if sum_bits == 32:
                return args[0]
            ones = constants(16, [1] * 32)
            _, multiply = _instructions(16, features)
            totals = []
            for value in cgutils.unpack_tuple(builder, args[0]):
                pairs = builder.bitcast(value, ones.type)
                if multiply:
                    pairs = _in_registers(builder, multiply, [pairs, ones], 32)
                else:
                    pairs = _sum_groups(builder, builder.sext(pairs, integers(32, 32)), 2)
                totals.append(builder.bitcast(pairs, FLOATS))
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

    With AVX-512-BF16 it is one instruction, which treats numbers below the least normal one as zero. Otherwise it is a
    fused multiply-add with the lower number of each pair, then one with the upper number.
    """
    has_instruction = features.get("avx512bf16", False)

    def emit(builder: ir.IRBuilder, total: ir.Value, row: ir.Value, x: ir.Value) -> ir.Value:
        if has_instruction:
            pairs = ir.VectorType(_BFloatType(), 2 * LANES)
            kind = ir.FunctionType(FLOATS, [FLOATS, pairs, pairs])
            name = "llvm.x86.avx512bf16.dpbf16ps.512"
            multiply = cgutils.get_or_insert_function(builder.module, kind, name)
            return builder.call(multiply, [total, builder.bitcast(row, pairs), builder.bitcast(x, pairs)])
        for of_words in (
            lambda words: builder.shl(words, constants(32, 16)),
            lambda words: builder.and_(words, constants(32, 0xFFFF0000)),
        ):
            factor, other = (builder.bitcast(of_words(words), FLOATS) for words in (x, row))
            total = fused_multiply_add(builder, factor, other, total)
        return total

    @intrinsic
    def add(typingctx, sums, memory, index, stride, row):
        def generate(context, builder, signature, args):
            sums, *values, row = args
            row, totals = builder.bitcast(row, integers(32)), cgutils.unpack_tuple(builder, sums)
            words = _broadcasts(context, builder, signature.args[1], values, INT32)
            added = [emit(builder, total, row, word) for total, word in zip(totals, words, strict=False)]
            return context.make_tuple(builder, signature.return_type, added)

        return sums(sums, memory, types.int64, types.int64, vector), generate

    return add


HAS_BFLOAT16 = FEATURES.get("avx512bf16", False)  # instructions that multiply bfloat16 numbers in pairs
products_bfloat16 = bfloat16_products(FEATURES)
products_i8 = integer_products(8, FEATURES)
products_i16 = integer_products(16, FEATURES)


@intrinsic
def add_scaled(typingctx, sums, factors, added, first, stride, scales, offsets, out, out_first, out_stride):
    """Add, for each i of a tuple of sums (32-bit integers), sums[i] * factors[i] * scales + added[i] * offsets to out.

    factors[i] and added[i] are elements of memory, `stride` apart, from `first`; `scales` and `offsets` are vectors;
    the vector of out is at out_first + i * out_stride. Each sum is rounded to a float32, multiplied by its factor, and
    added with a fused multiply-add; then the other product is, with another.
    """

    def generate(context, builder, signature, args):
        sums, factors, added, first, stride, scales, offsets, out, out_first, out_stride = args

        def element(memory, value):
            address = element_address(context, builder, signature.args[memory], value, first)
            return broadcast(builder, builder.load(builder.bitcast(address, FLOAT.as_pointer()), align=4))

        for total in cgutils.unpack_tuple(builder, sums):
            floats = builder.fmul(builder.sitofp(builder.bitcast(total, integers(32)), FLOATS), element(1, factors))
            address = element_address(context, builder, signature.args[7], out, out_first)
            address = builder.bitcast(address, FLOATS.as_pointer())
            result = fused_multiply_add(builder, floats, scales, builder.load(address, align=4))
            result = fused_multiply_add(builder, element(2, added), offsets, result)
            builder.store(result, address, align=4)
            first, out_first = builder.add(first, stride), builder.add(out_first, out_stride)
        return context.get_dummy_value()

    index_and_stride = [types.int64] * 2
    return types.none(sums, factors, added, *index_and_stride, vector, vector, out, *index_and_stride), generate
