# Numba infers the types.
# mypy: allow-untyped-defs, allow-untyped-calls
"""Many operations in one parallel region: each of its threads walks through all of them and does its share.

An operation is a row of int64: what it is (an Operation), then addresses and sizes in the order of its routine here;
its numbers are a row of float64. The routines are those of the kernels that do one operation a call, and so are the
bits of the results.

Pointwise operations share rows, the same ones each time: two of them that follow one another need no barrier. Products
and attention share tasks, which are taken from a counter.
"""

from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
from numba import prange

from kernels.cpu import attention, groupwise_kernels, pointwise
from kernels.cpu.attention_tasks import Step, first_malformed, padded_rows, plan, state_stride
from kernels.cpu.groupwise_kernels import Product
from kernels.cpu.jit import kernel, routine
from kernels.cpu.simd import pointer
from kernels.cpu.team import TEAM_SIZE, join, meet, now_ns, num_members


class Operation(IntEnum):
    """What a row is; the ones before PRODUCT share rows."""

    ADD_RMS_NORM = 0
    RMS_NORM = 1
    COPY = 2
    ROTATE = 3
    STORE_KV = 4
    SILU_AND_MUL = 5
    PRODUCT = 6
    ATTENTION = 7


ADD_RMS_NORM, RMS_NORM, COPY, ROTATE, STORE_KV, SILU_AND_MUL, PRODUCT, ATTENTION = map(int, Operation)
ROW_SIZE = 16
NUM_NUMBERS = 2


class Inputs(NamedTuple):
    """What differs from step to step: sizes, then addresses."""

    num_tokens: int
    num_seqs: int
    max_blocks: int
    positions: int
    slot_mapping: int
    block_tables: int
    cu_seqlens_q: int
    seq_lens: int


class Plans(NamedTuple):
    """The tasks of each kind of attention: those of kind i from first[i] to first[i + 1]."""

    tasks: Any
    first: Any
    is_split: Any  # a task is one partition, and partial results are to be merged
    partials: Any


@routine()
def _copy(like, op, first, end):
    """Copy rows into some columns of wider ones."""
    out, x = pointer(op[1], like), pointer(op[2], like)
    size, out_stride = op[3], op[4]
    for row in range(first, end):
        for column in range(size):
            out[row * out_stride + column] = x[row * size + column]


@routine()
def _do_rows(like, op, numbers, inputs, first, end):
    """Do rows `first` to `end` of a pointwise operation."""
    kind = op[0]
    if kind == ADD_RMS_NORM:
        pointwise.add_rms_norm(like, (op[1], op[2], op[3], op[4]), op[5], numbers[0], first, end)
    elif kind == RMS_NORM:
        heads, sizes = op[4], (op[4], op[5], op[6])
        pointwise.rms_norm(like, (op[1], op[2], op[3]), sizes, numbers[0], first * heads, end * heads)
    elif kind == COPY:
        _copy(like, op, first, end)
    elif kind == ROTATE:
        sizes = (op[4], op[5], op[6], op[7], op[8], op[9])
        pointwise.rotary_embedding(like, (op[1], op[2], op[3], inputs.positions), sizes, first, end)
    elif kind == STORE_KV:
        sizes = (op[5], op[6], op[7], op[8], op[9], op[10])
        pointwise.store_kv(like, (op[1], op[2], op[3], op[4], inputs.slot_mapping), sizes, first, end)
    elif kind == SILU_AND_MUL:
        pointwise.silu_and_mul(like, (op[1], op[2]), op[3], first, end)


@routine()
def _multiply(op, inputs, next_task, num_threads):
    product = Product(
        op[1], op[2], op[3], op[4], op[5], op[6], inputs.num_tokens, op[7], op[8], op[9], op[10], op[11], op[12], op[13], op[14]
    )  # fmt: skip
    num_tasks, num_chunks = groupwise_kernels.num_tasks_of(product, num_threads)
    groupwise_kernels.work(product, num_tasks, num_chunks, next_task)


@routine()
def _step_of(op, numbers, inputs):
    return Step(
        op[1], op[2], op[3], op[4], inputs.block_tables, inputs.cu_seqlens_q, inputs.seq_lens, 0, op[5],
        inputs.num_tokens, inputs.num_seqs, op[6], inputs.max_blocks, op[7], op[8], op[9], op[10], op[11], op[12], op[13],
        numbers[0], 0.0,
    )  # fmt: skip


@routine()
def _attend(like, op, numbers, inputs, plans, next_task, team, number, num_threads):
    step, index = _step_of(op, numbers, inputs), op[14]
    tasks = plans.tasks[plans.first[index] : plans.first[index + 1]]
    attention.work(step, like, tasks, next_task, plans.partials)
    if plans.is_split[index]:
        meet(team, num_threads)
        if number == 0:
            attention.merge_partials(step, like, tasks, plans.partials)


@routine()
def _walk(like, ops, numbers, inputs, plans, team, next_tasks, times_ns, number, num_threads):
    """Do this thread's share of all operations; number 0 adds the time of each to its kind's."""
    is_timed = number == 0 and len(times_ns) > 0
    before_ns = now_ns() if is_timed else 0
    first, end = inputs.num_tokens * number // num_threads, inputs.num_tokens * (number + 1) // num_threads
    for index in range(len(ops)):
        op, own_numbers, next_task = ops[index], numbers[index], next_tasks[index : index + 1]
        if op[0] == PRODUCT:
            _multiply(op, inputs, next_task, num_threads)
        elif op[0] == ATTENTION:
            _attend(like, op, own_numbers, inputs, plans, next_task, team, number, num_threads)
        else:
            _do_rows(like, op, own_numbers, inputs, first, end)
        if index + 1 < len(ops) and (op[0] >= PRODUCT or ops[index + 1, 0] >= PRODUCT):
            meet(team, num_threads)
        if is_timed:
            after_ns = now_ns()
            times_ns[op[0]] += after_ns - before_ns
            before_ns = after_ns


@routine()
def _join_and_walk(like, ops, numbers, inputs, plans, team, next_tasks, times_ns, num_threads):
    number = join(team, num_threads)
    if number >= 0:
        _walk(like, ops, numbers, inputs, plans, team, next_tasks, times_ns, number, num_members(team))


@routine(parallel=True)
def _walk_in_parallel(like, ops, numbers, inputs, plans, team, next_tasks, times_ns, num_threads):
    for _ in prange(num_threads):
        _join_and_walk(like, ops, numbers, inputs, plans, team, next_tasks, times_ns, num_threads)


@routine()
def _num_tasks(step, num_threads):
    """Return how many tasks attention is divided into, and whether at partitions: where whole queries are too few."""
    nothing = np.empty((0, 8), np.int64)
    num_tasks = plan(step, nothing, False)
    if num_threads > 1 and num_tasks < 4 * num_threads:
        num_parts = plan(step, nothing, True)
        if num_parts > num_tasks:
            return num_parts, True
    return num_tasks, False


@routine()
def _plan(ops, numbers, kinds, inputs, num_threads):
    """Return the tasks of each kind of attention; `kinds` are indices of operations."""
    first, is_split = np.zeros(len(kinds) + 1, np.int64), np.zeros(len(kinds), np.bool_)
    num_partials = 0
    for kind in range(len(kinds)):
        step = _step_of(ops[kinds[kind]], numbers[kinds[kind]], inputs)
        num_tasks, is_split[kind] = _num_tasks(step, num_threads)
        first[kind + 1] = first[kind] + num_tasks
        if is_split[kind]:
            num_partials = max(num_partials, num_tasks * padded_rows(step) * state_stride(step))
    tasks = np.empty((first[-1], 8), np.int64)
    for kind in range(len(kinds)):
        step = _step_of(ops[kinds[kind]], numbers[kinds[kind]], inputs)
        plan(step, tasks[first[kind] : first[kind + 1]], is_split[kind])
    return Plans(tasks, first, is_split, np.empty(num_partials, np.float32))


@routine()
def _first_malformed(ops, numbers, kinds, inputs):
    for kind in kinds:
        malformed = first_malformed(_step_of(ops[kind], numbers[kind], inputs))
        if malformed >= 0:
            return malformed
    return -1


@kernel()
def run(like, ops, numbers, kinds, first, end, inputs, times_ns, num_threads):
    """Do operations `first` to `end`. `kinds` has one index for each kind of attention; `inputs` are those fields.

    Return -1, or the first sequence whose lengths or block table point outside: then nothing was done. `times_ns` has a
    place for each kind of operation, or none.
    """
    inputs = Inputs(*inputs)
    malformed = _first_malformed(ops, numbers, kinds, inputs)
    if malformed >= 0:
        return malformed
    plans = _plan(ops, numbers, kinds, inputs, num_threads)
    ops, numbers = ops[first:end], numbers[first:end]
    team, next_tasks = np.zeros(TEAM_SIZE, np.int64), np.zeros(len(ops), np.int64)
    if num_threads > 1:
        _walk_in_parallel(like, ops, numbers, inputs, plans, team, next_tasks, times_ns, num_threads)
    else:
        _walk(like, ops, numbers, inputs, plans, team, next_tasks, times_ns, 0, 1)
    return -1
