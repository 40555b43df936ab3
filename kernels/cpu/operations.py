# Numba infers the types.
# mypy: allow-untyped-defs, allow-untyped-calls
"""The operations of a program: every thread of a team does its share of each.

Each operation is compiled by itself, with the signature of C, and called by its address. So the code that runs a
program is small, and no routine is compiled twice. An operation calls the routines of the kernel that does one
operation a call, and therefore gives the same bits. `at` is the address of the operation's row in the program: a `Row`,
then the record (see `records`) of the operation's own fields.

The threads divide the rows of pointwise operations in the same way each time, so that two of these operations that
follow one another need no barrier. The threads divide products and attention into tasks, which they take from a counter
in the operation's row.
"""

from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from llvmlite import ir  # type: ignore[import-untyped]
from numba import carray, types
from numba.core.ccallback import CFunc
from numba.extending import intrinsic

from octavo.kernels.cpu import attention, panel_products, pointwise
from octavo.kernels.cpu.attention_tasks import TASK_SIZE, Step
from octavo.kernels.cpu.jit import cache_of, routine
from octavo.kernels.cpu.memory import pointer
from octavo.kernels.cpu.panels import Product
from octavo.kernels.cpu.records import read, replaced
from octavo.kernels.cpu.team import meet


class Row(NamedTuple):
    """The fields with which each row begins."""

    address: int  # of the compiled operation
    meets: int  # whether the team meets after it
    kind: int  # index of OPERATIONS
    next_task: int  # the counter


FIRST = 8 * len(Row._fields)  # bytes before an operation's own fields
NEXT_TASK = 8 * Row._fields.index("next_task")
Fields = TypeVar("Fields", bound=tuple[Any, ...])  # the class of an operation's own fields


class Shared(NamedTuple):
    """What all operations of a run know: sizes and addresses of the step's inputs, then the plan of its tasks."""

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


class Operation(Generic[Fields]):
    """One kind of operation, compiled for each dtype when it is first needed."""

    def __init__(
        self, number: int, fields: type[Fields], function: Callable[..., int], shares_rows: bool, has_dtype: bool
    ) -> None:
        self.number = number  # index of OPERATIONS
        self.fields = fields
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
            if cache := cache_of(self._function):
                callback._cache = cache
            callback.compile()
            self._compiled[element] = callback
        return int(self._compiled[element].address)


OPERATIONS: list[Operation[Any]] = []


def operation(
    fields: type[Fields], *, shares_rows: bool, has_dtype: bool = True
) -> Callable[[Callable[..., int]], Operation[Fields]]:
    """Return a decorator that makes an Operation with `fields` of a function, which returns 1.

    The function is given the addresses of its row and of Shared, this thread's number among `num_threads`, and a
    pointer of the dtype. Without `has_dtype` one compiled function serves all dtypes.
    """

    def made(function: Callable[..., int]) -> Operation[Fields]:
        made = Operation(len(OPERATIONS), fields, function, shares_rows, has_dtype)
        OPERATIONS.append(made)
        return made

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


@routine()
def known(address):
    """Return the record at the address of Shared."""
    return read(address, Shared)


@routine(forceinline=True)
def _rows_of(shared, number, num_threads):
    num_tokens = read(shared, Shared).num_tokens
    return num_tokens * number // num_threads, num_tokens * (number + 1) // num_threads


@routine(forceinline=True)
def _counter(at):
    return carray(pointer(at + NEXT_TASK, np.int64), 1)


class Embedding(NamedTuple):
    out: int
    weight: int
    size: int


@operation(Embedding, shares_rows=True)
def embedding(at, shared, number, num_threads, like):
    """Copy the rows that the tokens name."""
    f = read(at + FIRST, Embedding)
    first, end = _rows_of(shared, number, num_threads)
    kind, token_ids = carray(like, 0), pointer(known(shared).token_ids, np.int64)
    out, weight = pointer(f.out, kind), pointer(f.weight, kind)
    for row in range(first, end):
        source = token_ids[row] * f.size
        for column in range(f.size):
            out[row * f.size + column] = weight[source + column]
    return 1


@operation(Product, shares_rows=True, has_dtype=False)
def panel_embedding(at, shared, number, num_threads, like):
    """Write the rows that the tokens name. There is no x."""
    f = read(at + FIRST, Product)
    first, end = _rows_of(shared, number, num_threads)
    rows = replaced(f, "out", f.out + first * f.num_inputs * f.out_bytes)
    token_ids = carray(pointer(known(shared).token_ids + 8 * first, np.int64), end - first)
    panel_products.write_rows(rows, token_ids)
    return 1


class Clear(NamedTuple):
    out: int
    size: int


@operation(Clear, shares_rows=True, has_dtype=False)
def clear(at, shared, number, num_threads, like):
    """Make rows of float32 zero."""
    f = read(at + FIRST, Clear)
    first, end = _rows_of(shared, number, num_threads)
    out = pointer(f.out, np.float32)
    for at_out in range(first * f.size, end * f.size):
        out[at_out] = 0.0
    return 1


class AddRMSNorm(NamedTuple):
    out: int
    x: int
    residual: int
    weight: int
    size: int
    eps: float


@operation(AddRMSNorm, shares_rows=True)
def add_rms_norm(at, shared, number, num_threads, like):
    f = read(at + FIRST, AddRMSNorm)
    first, end = _rows_of(shared, number, num_threads)
    pointwise.add_rms_norm(carray(like, 0), (f.out, f.x, f.residual, f.weight), f.size, f.eps, first, end)
    return 1


class RMSNorm(NamedTuple):
    out: int
    x: int
    weight: int
    num_heads: int
    token_stride: int  # of x
    size: int
    eps: float


@operation(RMSNorm, shares_rows=True)
def rms_norm(at, shared, number, num_threads, like):
    f = read(at + FIRST, RMSNorm)
    first, end = _rows_of(shared, number, num_threads)
    memory, sizes = (f.out, f.x, f.weight), (f.num_heads, f.token_stride, f.size)
    pointwise.rms_norm(carray(like, 0), memory, sizes, f.eps, first * f.num_heads, end * f.num_heads)
    return 1


class Copy(NamedTuple):
    out: int
    x: int
    size: int
    out_stride: int


@operation(Copy, shares_rows=True)
def copy(at, shared, number, num_threads, like):
    """Copy rows into some columns of wider ones."""
    f = read(at + FIRST, Copy)
    first, end = _rows_of(shared, number, num_threads)
    kind = carray(like, 0)
    out, x = pointer(f.out, kind), pointer(f.x, kind)
    for row in range(first, end):
        for column in range(f.size):
            out[row * f.out_stride + column] = x[row * f.size + column]
    return 1


class Rotate(NamedTuple):
    q: int
    k: int
    cos_sin: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    rotary_size: int
    q_stride: int
    k_stride: int


@operation(Rotate, shares_rows=True)
def rotate(at, shared, number, num_threads, like):
    f = read(at + FIRST, Rotate)
    first, end = _rows_of(shared, number, num_threads)
    memory = (f.q, f.k, f.cos_sin, known(shared).positions)
    sizes = (f.num_heads, f.num_kv_heads, f.head_size, f.rotary_size, f.q_stride, f.k_stride)
    pointwise.rotary_embedding(carray(like, 0), memory, sizes, first, end)
    return 1


class StoreKV(NamedTuple):
    k: int
    v: int
    k_cache: int
    v_cache: int
    num_kv_heads: int
    head_size: int
    value_size: int
    block_size: int
    k_stride: int
    v_stride: int


@operation(StoreKV, shares_rows=True)
def store_kv(at, shared, number, num_threads, like):
    f = read(at + FIRST, StoreKV)
    first, end = _rows_of(shared, number, num_threads)
    memory = (f.k, f.v, f.k_cache, f.v_cache, known(shared).slot_mapping)
    sizes = (f.num_kv_heads, f.head_size, f.value_size, f.block_size, f.k_stride, f.v_stride)
    pointwise.store_kv(carray(like, 0), memory, sizes, first, end)
    return 1


class SiluAndMul(NamedTuple):
    out: int
    gate_up: int
    size: int


@operation(SiluAndMul, shares_rows=True)
def silu_and_mul(at, shared, number, num_threads, like):
    f = read(at + FIRST, SiluAndMul)
    first, end = _rows_of(shared, number, num_threads)
    pointwise.silu_and_mul(carray(like, 0), (f.out, f.gate_up), f.size, first, end)
    return 1


@operation(Product, shares_rows=False, has_dtype=False)
def product(at, shared, number, num_threads, like):
    of = replaced(read(at + FIRST, Product), "num_rows", known(shared).num_tokens)
    num_tasks, num_chunks = panel_products.num_tasks_of(of, num_threads)
    panel_products.work(of, num_tasks, num_chunks, _counter(at))
    return 1


class PagedAttention(NamedTuple):
    out: int
    q: int
    k_cache: int
    v_cache: int
    alibi_slopes: int
    num_blocks: int
    block_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    value_size: int
    q_stride: int
    window: int
    kind: int  # index of `Shared.plans`
    scale: float


@routine()
def attention_step(at, s):
    """Return attention's own description of an operation at `at`, in the step that Shared `s` describes."""
    f = read(at + FIRST, PagedAttention)
    return Step(
        out=f.out,
        q=f.q,
        k_cache=f.k_cache,
        v_cache=f.v_cache,
        block_tables=s.block_tables,
        cu_seqlens_q=s.cu_seqlens_q,
        seq_lens=s.seq_lens,
        sinks=np.int64(0),  # type: ignore[arg-type]  # Numba takes it for the int64 that addresses are
        alibi_slopes=f.alibi_slopes,
        num_tokens=s.num_tokens,
        num_seqs=s.num_seqs,
        num_blocks=f.num_blocks,
        max_blocks=s.max_blocks,
        block_size=f.block_size,
        num_heads=f.num_heads,
        num_kv_heads=f.num_kv_heads,
        head_size=f.head_size,
        value_size=f.value_size,
        q_stride=f.q_stride,
        window=f.window,
        scale=f.scale,
        soft_cap=0.0,
    )


@operation(PagedAttention, shares_rows=False)
def paged_attention(at, shared, number, num_threads, like):
    s, f = known(shared), read(at + FIRST, PagedAttention)
    step, kind = attention_step(at, s), carray(like, 0)
    plan = pointer(s.plans + 24 * f.kind, np.int64)
    tasks = carray(pointer(s.tasks + 8 * TASK_SIZE * plan[0], np.int64), (plan[1], TASK_SIZE))
    partials = carray(pointer(s.partials, np.float32), s.num_partials)
    attention.work(step, kind, tasks, _counter(at), partials)
    if plan[2] > 0:
        meet(s.team, num_threads)
        if number == 0:
            attention.merge_partials(step, kind, tasks, partials)
    return 1


ROW_SIZE = len(Row._fields) + max(len(operation.fields._fields) for operation in OPERATIONS)
