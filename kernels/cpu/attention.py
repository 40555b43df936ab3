# Numba infers the types.
# mypy: allow-untyped-defs, allow-untyped-calls
"""Paged attention on the CPU, with results that do not depend on the batch.

The context of a sequence is cut at absolute positions into partitions, these into tiles of 32 keys. One query of one
head is always the same sequence of operations: for each tile the scores (each a chain of fused multiply-adds over the
components, then capped and sloped), the running maximum, the weights and the output (a chain over the keys); at the end
of a partition its state is merged into the row's; after the last partition the head's sink is added. This sequence does
not depend on which rows are computed together (queries of a chunk, heads that share keys), in which order, and by which
thread. Keys that a row does not see take no part, whatever their memory holds.

Online softmax: Milakov and Gimelshein, 2018; partitions: FlashDecoding, Dao et al., 2023.

S sequences, M blocks a sequence, P tokens a block, H query heads, K key/value heads, D and V head sizes of keys and
values, C keys of a tile, R rows: for each key/value head of a task the queries of a tile times the query heads that
share it, padded to MANY.
"""

import numpy as np
from numba import prange

from octavo.kernels.cpu.attention_tasks import (
    PARTITION,
    TASK_SIZE,
    Step,
    first_malformed,
    num_pairs,
    padded_rows,
    plan,
    rows_of_head,
    state_stride,
    task_of,
)
from octavo.kernels.cpu.attention_tiles import (
    TILE,
    attend_tile,
    copied_tile,
    load_queries,
    new_scratch,
    reads_in_place,
    tile_in_place,
)
from octavo.kernels.cpu.elementary import exp
from octavo.kernels.cpu.jit import kernel, routine
from octavo.kernels.cpu.lanes import LANES
from octavo.kernels.cpu.memory import address_of, fetch_add, load, pointer, store, store_part
from octavo.kernels.cpu.simd import fma, lane, splat, sum_of_lanes

LEAST_PARALLEL_WORK = 200_000  # multiply-adds; below, a second thread costs more than it brings

_ZERO = np.float32(0.0)
_MINUS_INFINITY = np.float32(-np.inf)


@routine()
def _clear(state, num_rows, stride):
    """Write the states of rows that have seen no keys."""
    for start in range(0, num_rows * stride, stride):
        state[start] = _MINUS_INFINITY
        for column in range(start + LANES, start + stride, LANES):
            store(state, column, splat(_ZERO))


@routine()
def _merge(total, state, num_rows, stride):
    """Add to each row of `total` the state of the partition that follows."""
    for start in range(0, num_rows * stride, stride):
        old, other = total[start], state[start]
        if other == _MINUS_INFINITY:  # the row sees nothing of this partition
            continue
        new = other if other > old else old
        total[start] = new
        old_factor, other_factor = exp(splat(old - new)), exp(splat(other - new))
        for column in range(start + LANES, start + stride, LANES):
            added = load(state, column) * other_factor
            store(total, column, fma(load(total, column), old_factor, added))


@routine()
def _add_sink(step, head, total, start, stride):
    """Add the head's sink, a weight without a value, to the sum (in its first lane) of a row that is complete."""
    old, sink = total[start], pointer(step.sinks, np.float32)[head]
    new = sink if sink > old else old
    total[start] = new
    if new != old:
        factor = exp(splat(old - new))
        for column in range(start + LANES, start + stride, LANES):
            store(total, column, load(total, column) * factor)
    total[start + LANES] += lane(exp(splat(sink - new)), 0)


@routine()
def _write_out(step, task, like, total):
    out = pointer(step.out, like)
    group, stride = step.num_heads // step.num_kv_heads, state_stride(step)
    num_rows = rows_of_head(step, task.num_queries)
    for kv_head in range(task.first_kv_head, task.end_kv_head):
        for row in range(task.num_queries * group):
            token, head = task.first_token + row // group, kv_head * group + row % group
            target = (token * step.num_heads + head) * step.value_size
            start = ((kv_head - task.first_kv_head) * num_rows + row) * stride
            if step.sinks != 0:
                _add_sink(step, head, total, start, stride)
            weight = splat(sum_of_lanes(load(total, start + LANES)))
            for v in range(0, step.value_size, LANES):
                lanes = load(total, start + 2 * LANES + v) / weight
                store_part(out, target + v, step.value_size - v, lanes)


@routine(forceinline=True)
def _attend_partition(step, task, like, start, end, scratch):
    """Add the keys of positions start to end to the states of all rows."""
    in_place, last_position = reads_in_place(step), task.first_position + task.num_queries - 1
    num_rows = task.num_queries * (step.num_heads // step.num_kv_heads)
    tile = tile_in_place(step, task, task.first_kv_head, like, scratch, start, end - start)
    for first in range(start, end, TILE):
        for kv_head in range(task.first_kv_head, task.end_kv_head):
            next_tile = tile
            if not in_place:
                tile = copied_tile(step, task, kv_head, like, scratch, first, min(TILE, end - first))
            elif kv_head + 1 < task.end_kv_head:
                next_tile = tile_in_place(step, task, kv_head + 1, like, scratch, first, last_position - first + 1)
            elif first + TILE <= last_position:
                num_left = last_position - first - TILE + 1
                next_tile = tile_in_place(step, task, task.first_kv_head, like, scratch, first + TILE, num_left)
            first_row = (kv_head - task.first_kv_head) * rows_of_head(step, task.num_queries)
            attend_tile(step, tile, next_tile, like, first, end - first, first_row, num_rows, scratch)
            tile = next_tile


@routine()
def _attend(step, task, index, like, scratch, partials):
    """Compute one task: its output, or if it is one partition, the partition's state in place `index` of `partials`."""
    stride = state_stride(step)
    num_rows = (task.end_kv_head - task.first_kv_head) * rows_of_head(step, task.num_queries)
    state, total = pointer(scratch.state, np.float32), pointer(scratch.total, np.float32)
    last_position = task.first_position + task.num_queries - 1
    first_visible = max(0, task.first_position - step.window + 1)
    load_queries(step, task, like, scratch)
    _clear(total, num_rows, stride)
    for partition in range(task.first_partition, task.end_partition):
        _clear(state, num_rows, stride)
        start = max(partition * PARTITION, first_visible // TILE * TILE)
        end = min((partition + 1) * PARTITION, last_position + 1)
        _attend_partition(step, task, like, start, end, scratch)
        if task.part < 0:
            _merge(total, state, num_rows, stride)
    if task.part < 0:
        _write_out(step, task, like, total)
    else:
        partial_start = index * padded_rows(step) * stride
        for column in range(0, num_rows * stride, LANES):
            store(partials, partial_start + column, load(state, column))


@routine()
def work(step, like, tasks, next_task, partials):
    """Take tasks until none is left."""
    scratch, memory = new_scratch(step)
    while True:
        index = fetch_add(next_task, 1)
        if index >= len(tasks):
            memory[0] = _ZERO  # keeps the array alive until here
            return
        _attend(step, task_of(tasks[index]), index, pointer(step.q, like), scratch, partials)


@routine(parallel=True)
def _work_in_parallel(step, like, tasks, next_task, partials, num_workers):
    for _ in prange(num_workers):
        work(step, like, tasks, next_task, partials)


@routine()
def merge_partials(step, like, tasks, partials):
    """Write the output of every query whose partitions are tasks of their own."""
    stride = state_stride(step)
    size = padded_rows(step) * stride
    memory = np.empty(size, np.float32)
    total = pointer(memory.ctypes.data, np.float32)
    for index in range(len(tasks)):
        task = task_of(tasks[index])
        if task.part < 0:
            continue
        num_rows = (task.end_kv_head - task.first_kv_head) * rows_of_head(step, task.num_queries)
        if task.part == 0:
            _clear(total, num_rows, stride)
        _merge(total, pointer(address_of(partials, index * size), np.float32), num_rows, stride)
        if index + 1 == len(tasks) or task_of(tasks[index + 1]).part <= 0:
            _write_out(step, task, pointer(step.q, like), total)
    memory[0] = _ZERO  # keeps the array alive until here


@kernel()
def paged_attention(like, addresses, sizes, scale, soft_cap, num_threads):
    """Compute the step that `addresses` and `sizes` describe in the order of `Step`'s fields.

    Return -1, or the first sequence whose lengths or block table point outside.
    """
    step = Step(*(addresses + sizes + (scale, soft_cap)))
    malformed = first_malformed(step)
    if malformed >= 0:
        return malformed
    work_in_all = num_pairs(step) * step.num_heads * (step.head_size + step.value_size)
    num_workers = num_threads if work_in_all >= LEAST_PARALLEL_WORK else 1
    num_tasks, num_parts = plan(step, np.empty((0, TASK_SIZE), np.int64), num_workers)
    tasks = np.empty((num_tasks, TASK_SIZE), np.int64)
    plan(step, tasks, num_workers)
    partials = np.empty(num_tasks * padded_rows(step) * state_stride(step) if num_parts > 0 else 0, np.float32)
    next_task = np.zeros(1, np.int64)
    if num_workers > 1:
        _work_in_parallel(step, like, tasks, next_task, partials, num_workers)
    else:
        work(step, like, tasks, next_task, partials)
    if num_parts > 0:
        merge_partials(step, like, tasks, partials)
    return -1
