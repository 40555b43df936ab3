# Numba infers the types.
# mypy: allow-untyped-defs, allow-untyped-calls
"""Runs a program: many operations in one parallel region, each of whose threads walks through all of them."""

from typing import Any, NamedTuple

import numpy as np
from numba import prange

from octavo.kernels.cpu.attention_tasks import (
    TASK_SIZE,
    first_malformed,
    padded_rows,
    plan,
    state_stride,
)
from octavo.kernels.cpu.jit import kernel, routine
from octavo.kernels.cpu.operations import Row, Shared, attention_step, call, known
from octavo.kernels.cpu.team import TEAM_SIZE, join, meet, now_ns, num_members, publish

DONE, NO_MEMORY = -1, -2
_ADDRESS, _MEETS, _, _NEXT_TASK = range(len(Row._fields))
_NUM_SHARED = len(Shared._fields)
_TEAM, _TASKS, _PARTIALS, _NUM_PARTIALS, _PLANS = range(Shared._fields.index("team"), _NUM_SHARED)
_FAILED = TEAM_SIZE - 8  # a place behind the places of `kernels.cpu.team`


class Plans(NamedTuple):
    """The tasks of each kind of attention, and memory for partial results."""

    tasks: Any
    plans: Any  # of each kind, see operations.Shared
    partials: Any


@routine()
def _walk(ops, team, shared, times_ns, number, num_threads):
    """Do this thread's share of all operations; number 0 adds the time of each to its place."""
    is_timed = number == 0 and len(times_ns) > 0
    before_ns = now_ns()
    at, row_bytes = np.int64(ops.ctypes.data), ops.shape[1] * 8
    for index in range(len(ops)):
        is_done = call(ops[index, _ADDRESS], at, np.int64(shared.ctypes.data), number, num_threads)
        if not is_done:
            publish(np.int64(team.ctypes.data), _FAILED, 1)
        if ops[index, _MEETS]:
            meet(np.int64(team.ctypes.data), num_threads)
        if is_timed:
            after_ns = now_ns()
            times_ns[index] += after_ns - before_ns
            before_ns = after_ns
        at += row_bytes


@routine()
def _join_and_walk(ops, team, shared, times_ns, num_threads):
    number = join(np.int64(team.ctypes.data), num_threads)
    if number >= 0:
        _walk(ops, team, shared, times_ns, number, num_members(np.int64(team.ctypes.data)))


@routine(parallel=True)
def _walk_in_parallel(ops, team, shared, times_ns, num_threads):
    for _ in prange(num_threads):
        _join_and_walk(ops, team, shared, times_ns, num_threads)


@routine()
def _walk_together(ops, team, shared, plans, times_ns, num_threads):
    """`shared` has the addresses of `plans`, which must not be freed before this ends."""
    if num_threads > 1:
        _walk_in_parallel(ops, team, shared, times_ns, num_threads)
    else:
        _walk(ops, team, shared, times_ns, np.int64(0), num_threads)


@routine()
def _step(ops, kinds, kind, shared):
    at = np.int64(ops.ctypes.data) + kinds[kind] * ops.shape[1] * 8
    return attention_step(at, known(np.int64(shared.ctypes.data)))


@routine()
def _first_malformed(ops, kinds, shared):
    for kind in range(len(kinds)):
        malformed = first_malformed(_step(ops, kinds, kind, shared))
        if malformed >= 0:
            return malformed
    return -1


@routine()
def _plan(ops, kinds, shared, num_threads):
    """Return the tasks of each kind of attention."""
    plans, nothing = np.zeros((len(kinds), 3), np.int64), np.empty((0, TASK_SIZE), np.int64)
    num_tasks, num_partials = 0, 0
    for kind in range(len(kinds)):
        step = _step(ops, kinds, kind, shared)
        count, num_parts = plan(step, nothing, num_threads)
        plans[kind, 0], plans[kind, 1], plans[kind, 2] = num_tasks, count, num_parts
        num_tasks += count
        if num_parts > 0:
            num_partials = max(num_partials, count * padded_rows(step) * state_stride(step))
    tasks = np.empty((num_tasks, TASK_SIZE), np.int64)
    for kind in range(len(kinds)):
        first, count, _ = plans[kind]
        plan(_step(ops, kinds, kind, shared), tasks[first : first + count], num_threads)
    return Plans(tasks, plans, np.empty(num_partials, np.float32))


@kernel()
def run(ops, kinds, first, end, inputs, times_ns, num_threads):
    """Do operations `first` to `end`. `kinds` has one index for each kind of attention; `inputs` is Shared to `team`.

    Return DONE, NO_MEMORY, or the first sequence whose lengths or block table point outside: then nothing was done.
    `times_ns` has a place for each of `ops`, or none.
    """
    team, shared = np.zeros(TEAM_SIZE, np.int64), np.zeros(_NUM_SHARED, np.int64)
    for field, value in enumerate(inputs):
        shared[field] = value
    malformed = _first_malformed(ops, kinds, shared)
    if malformed >= 0:
        return malformed
    plans = _plan(ops, kinds, shared, num_threads)
    shared[_TEAM], shared[_TASKS], shared[_PLANS] = team.ctypes.data, plans.tasks.ctypes.data, plans.plans.ctypes.data
    shared[_PARTIALS], shared[_NUM_PARTIALS] = plans.partials.ctypes.data, len(plans.partials)
    rows = ops[first:end]
    rows[:, _NEXT_TASK] = 0
    _walk_together(rows, team, shared, plans, times_ns[first:end], num_threads)
    return NO_MEMORY if team[_FAILED] else DONE
