# Numba infers the types.
# mypy: allow-untyped-defs, allow-untyped-calls
"""What a program is made of: operations, of which every thread of a team does its share.

Each is compiled by itself, with the signature of C, and called by its address: what runs a program is small, and no
routine is compiled twice. They are the routines of the kernels that do one operation a call, and so are the bits of
their results. `at` is the address of the operation's row in the program: int64 fields (a float64 has its place among
them), in the order of `Row`, then those of the operation itself.

Pointwise operations share rows, the same ones each time: two of them that follow one another need no barrier. Products
and attention share tasks, which are taken from a counter in their row.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from llvmlite import ir  # type: ignore[import-untyped]
from numba import carray, types
from numba.core.ccallback import CFunc
from numba.extending import intrinsic

from kernels.cpu import attention, panel_products, pointwise
from kernels.cpu.attention_tasks import TASK_SIZE, Step
from kernels.cpu.jit import IS_KEPT, SharedCache, routine
from kernels.cpu.memory import pointer
from kernels.cpu.panels import Product
from kernels.cpu.team import meet


class Row(NamedTuple):
    """What each row begins with."""

    address: int  # of the compiled operation
    meets: int  # whether the team meets after it
    kind: int  # index of OPERATIONS
    next_task: int  # the counter


FIRST = 8 * len(Row._fields)  # bytes before an operation's own fields


class Shared(NamedTuple):
    """What all operations of a run know: sizes and addresses of the step's inputs, then what was planned for it."""

    num_tokens: int
    num_seqs: int
    max_blocks: int
    token_ids: int
    positions: int
    slot_mapping: int
    block_tables: int
    cu_seqlens_q: int
    seq_lens: int
    team: int
    tasks: int  # rows of TASK_SIZE
    partials: int
    num_partials: int
    plans: int  # for each kind of attention its first task, their number, and how many are parts


class Operation:
    """One kind of operation, compiled for each dtype when that is first asked for."""

    def __init__(self, number: int, function: Callable[..., int], shares_rows: bool, has_dtype: bool) -> None:
        self.number = number  # index of OPERATIONS
        self.name = function.__name__
        self.shares_rows = shares_rows
        self._function = function
        self._has_dtype = has_dtype
        self._compiled: dict[types.Type, Any] = {}

    def compiled(self, dtype: torch.dtype) -> int:
        """Return the address of the code for memory of `dtype`, float32 or bfloat16."""
        element = types.uint16 if self._has_dtype and dtype is torch.bfloat16 else types.float32
        if element not in self._compiled:
            arguments = (types.int64, types.int64, types.int64, types.int64, types.CPointer(element))
            callback: Any = CFunc(self._function, (arguments, types.int64), {}, {"nogil": True, "error_model": "numpy"})
            if IS_KEPT:
                callback._cache = SharedCache(self._function)
            callback.compile()
            self._compiled[element] = callback
        return int(self._compiled[element].address)


OPERATIONS: list[Operation] = []


def operation(*, shares_rows: bool, has_dtype: bool = True) -> Callable[[Callable[..., int]], Operation]:
    """Return a decorator that makes an Operation of a function, which returns 1.

    The function is given the addresses of its row and of Shared, this thread's number among `num_threads`, and a
    pointer of the dtype. Without `has_dtype` it serves every one.
    """

    def made(function: Callable[..., int]) -> Operation:
        OPERATIONS.append(Operation(len(OPERATIONS), function, shares_rows, has_dtype))
        return OPERATIONS[-1]

    return made


@intrinsic
def call(typingctx, address, at, shared, number, num_threads):
    """Call an operation; return 1, or 0 if it raised (it has no memory)."""

    def generate(context, builder, signature, args):
        integer = ir.IntType(64)
        kind = ir.FunctionType(integer, [integer] * 4 + [ir.IntType(8).as_pointer()])
        nothing = ir.Constant(ir.IntType(8).as_pointer(), None)
        return builder.call(builder.inttoptr(args[0], kind.as_pointer()), [*args[1:], nothing])

    return types.int64(*[types.int64] * 5), generate


@routine(forceinline=True)
def _fields(at):
    """Return pointers to an operation's own fields, as integers and as numbers."""
    return pointer(at + FIRST, np.int64), pointer(at + FIRST, np.float64)


@routine()
def known(address):
    """Return what stands at the address of Shared."""
    f = pointer(address, np.int64)
    return Shared(f[0], f[1], f[2], f[3], f[4], f[5], f[6], f[7], f[8], f[9], f[10], f[11], f[12], f[13])


@routine(forceinline=True)
def _rows_of(shared, number, num_threads):
    num_tokens = pointer(shared, np.int64)[0]
    return num_tokens * number // num_threads, num_tokens * (number + 1) // num_threads


@routine(forceinline=True)
def _counter(at):
    return carray(pointer(at + FIRST - 8, np.int64), 1)


@operation(shares_rows=True)
def embedding(at, shared, number, num_threads, like):
    """Copy the rows that the tokens name. Fields: out, weight, size."""
    op, _ = _fields(at)
    first, end = _rows_of(shared, number, num_threads)
    kind, token_ids = carray(like, 0), pointer(known(shared).token_ids, np.int64)
    out, weight, size = pointer(op[0], kind), pointer(op[1], kind), op[2]
    for row in range(first, end):
        source = token_ids[row] * size
        for column in range(size):
            out[row * size + column] = weight[source + column]
    return 1


@operation(shares_rows=True, has_dtype=False)
def panel_embedding(at, shared, number, num_threads, like):
    """Write the rows that the tokens name. Fields: those of `product`; there is no x."""
    f, _ = _fields(at)
    first, end = _rows_of(shared, number, num_threads)
    out_row_bytes = f[7] * f[10]
    addresses = (f[0] + first * out_row_bytes, f[1], f[2], f[3], f[4], f[5])
    sizes = (end - first, f[6], f[7], f[8], f[9], f[10], f[11], f[12], f[13], f[14])
    token_ids = carray(pointer(known(shared).token_ids + 8 * first, np.int64), end - first)
    panel_products.embedding(addresses, sizes, token_ids)
    return 1


@operation(shares_rows=True, has_dtype=False)
def clear(at, shared, number, num_threads, like):
    """Make rows of float32 zero. Fields: out, size."""
    op, _ = _fields(at)
    first, end = _rows_of(shared, number, num_threads)
    out = pointer(op[0], np.float32)
    for at_out in range(first * op[1], end * op[1]):
        out[at_out] = 0.0
    return 1


@operation(shares_rows=True)
def add_rms_norm(at, shared, number, num_threads, like):
    """Fields: out, x, residual, weight, size, eps."""
    op, numbers = _fields(at)
    first, end = _rows_of(shared, number, num_threads)
    memory = (op[0], op[1], op[2], op[3])
    pointwise.add_rms_norm(carray(like, 0), memory, op[4], numbers[5], first, end)
    return 1


@operation(shares_rows=True)
def rms_norm(at, shared, number, num_threads, like):
    """Fields: out, x, weight, rows a token, token's stride, size, eps."""
    op, numbers = _fields(at)
    first, end = _rows_of(shared, number, num_threads)
    memory, sizes = (op[0], op[1], op[2]), (op[3], op[4], op[5])
    pointwise.rms_norm(carray(like, 0), memory, sizes, numbers[6], first * op[3], end * op[3])
    return 1


@operation(shares_rows=True)
def copy(at, shared, number, num_threads, like):
    """Copy rows into some columns of wider ones. Fields: out, x, size, out's stride."""
    op, _ = _fields(at)
    first, end = _rows_of(shared, number, num_threads)
    kind = carray(like, 0)
    out, x = pointer(op[0], kind), pointer(op[1], kind)
    size, out_stride = op[2], op[3]
    for row in range(first, end):
        for column in range(size):
            out[row * out_stride + column] = x[row * size + column]
    return 1


@operation(shares_rows=True)
def rotate(at, shared, number, num_threads, like):
    """Fields: q, k, cos_sin, then the sizes of pointwise.rotary_embedding."""
    op, _ = _fields(at)
    first, end = _rows_of(shared, number, num_threads)
    memory, sizes = (op[0], op[1], op[2], known(shared).positions), (op[3], op[4], op[5], op[6], op[7], op[8])
    pointwise.rotary_embedding(carray(like, 0), memory, sizes, first, end)
    return 1


@operation(shares_rows=True)
def store_kv(at, shared, number, num_threads, like):
    """Fields: k, v, their caches, then the sizes of pointwise.store_kv."""
    op, _ = _fields(at)
    first, end = _rows_of(shared, number, num_threads)
    memory = (op[0], op[1], op[2], op[3], known(shared).slot_mapping)
    pointwise.store_kv(carray(like, 0), memory, (op[4], op[5], op[6], op[7], op[8], op[9]), first, end)
    return 1


@operation(shares_rows=True)
def silu_and_mul(at, shared, number, num_threads, like):
    """Fields: out, gate_up, size."""
    op, _ = _fields(at)
    first, end = _rows_of(shared, number, num_threads)
    pointwise.silu_and_mul(carray(like, 0), (op[0], op[1]), op[2], first, end)
    return 1


@operation(shares_rows=False, has_dtype=False)
def product(at, shared, number, num_threads, like):
    """Fields: those of Product without the number of rows."""
    f, _ = _fields(at)
    rows = known(shared).num_tokens
    of = Product(*(f[0], f[1], f[2], f[3], f[4], f[5], rows, f[6], f[7], f[8], f[9], f[10], f[11], f[12], f[13], f[14]))
    num_tasks, num_chunks = panel_products.num_tasks_of(of, num_threads)
    panel_products.work(of, num_tasks, num_chunks, _counter(at))
    return 1


@routine()
def attention_step(at, s):
    """Return attention's own description of one operation, in the step that Shared `s` describes.

    Fields: out, q, caches, slopes, then sizes from num_blocks to window in Step's order, its index among the kinds of
    attention, scale.
    """
    f, numbers = _fields(at)
    memory = (f[0], f[1], f[2], f[3], s.block_tables, s.cu_seqlens_q, s.seq_lens, np.int64(0), f[4])
    sizes = (s.num_tokens, s.num_seqs, f[5], s.max_blocks, f[6], f[7], f[8], f[9], f[10], f[11], f[12])
    return Step(*(memory + sizes + (numbers[14], 0.0)))  # type: ignore[arg-type]


@operation(shares_rows=False)
def paged_attention(at, shared, number, num_threads, like):
    """Fields: those of `attention_step`."""
    s, (f, _) = known(shared), _fields(at)
    step, kind = attention_step(at, s), carray(like, 0)
    plan = pointer(s.plans + 24 * f[13], np.int64)
    tasks = carray(pointer(s.tasks + 8 * TASK_SIZE * plan[0], np.int64), (plan[1], TASK_SIZE))
    partials = carray(pointer(s.partials, np.float32), s.num_partials)
    attention.work(step, kind, tasks, _counter(at), partials)
    if plan[2] > 0:
        meet(s.team, num_threads)
        if number == 0:
            attention.merge_partials(step, kind, tasks, partials)
    return 1


def as_field(number: float) -> int:
    """Return the int64 field that holds a float64."""
    return int(np.float64(number).view(np.int64))
