"""What is known of 16 lanes, and the LLVM code that intrinsics for them have in common."""

from collections.abc import Iterable, Sequence

from llvmlite import ir  # type: ignore[import-untyped]

from octavo.kernels.cpu.jit import FEATURES

LANES = 16
REGISTER_LANES = 16 if FEATURES.get("avx512f") else 8

FLOAT = ir.FloatType()
INT32 = ir.IntType(32)
INT64 = ir.IntType(64)
FLOATS = ir.VectorType(FLOAT, LANES)


def integers(bits: int, count: int = LANES) -> ir.VectorType:
    """Return the type of `count` integers of `bits`."""
    return ir.VectorType(ir.IntType(bits), count)


def constants(bits: int, values: int | Sequence[int]) -> ir.Constant:
    """Return integers of `bits`, or 16 times the same one."""
    values = [values] * LANES if isinstance(values, int) else list(values)
    return ir.Constant(integers(bits, len(values)), values)


def broadcast(builder: ir.IRBuilder, scalar: ir.Value) -> ir.Value:
    """Return 16 lanes of the same value."""
    undefined = ir.Constant(ir.VectorType(scalar.type, LANES), ir.Undefined)
    single = builder.insert_element(undefined, scalar, ir.Constant(INT32, 0))
    return builder.shuffle_vector(single, undefined, constants(32, 0))


def elements(builder: ir.IRBuilder, value: ir.Value, indices: Iterable[int]) -> ir.Value:
    """Return those elements of a vector, in this order."""
    return builder.shuffle_vector(value, value, constants(32, list(indices)))


def joined(builder: ir.IRBuilder, parts: Sequence[ir.Value]) -> ir.Value:
    """Return one part as it is, or two of the same type as one vector."""
    if len(parts) == 1:
        return parts[0]
    low, high = parts
    return builder.shuffle_vector(low, high, constants(32, range(2 * low.type.count)))


def fused_multiply_add(builder: ir.IRBuilder, factor: ir.Value, other: ir.Value, addend: ir.Value) -> ir.Value:
    """Return factor * other + addend, rounded once, for vectors of float32."""
    kind = factor.type
    function_type = ir.FunctionType(kind, [kind] * 3)
    fused = builder.module.declare_intrinsic(f"llvm.fma.v{kind.count}f32", (), function_type)
    return builder.call(fused, [factor, other, addend])
