# Numba infers the types.
# mypy: allow-untyped-defs, allow-untyped-calls
"""Paged attention on the CPU, with results that do not depend on the batch.

The context of a sequence is cut at absolute positions into partitions, these into tiles of 32 keys. One query of one
head is always the same sequence of operations: for each tile the scores (each a chain of fused multiply-adds over the
components), the running maximum, the weights and the output (a chain over the keys); at the end of a partition its
state is merged into the row's. Which rows are computed together (queries of a chunk, heads that share keys), in which
order and by which thread changes nothing in it. Keys that a row does not see take no part, whatever their memory holds.

Online softmax: Milakov and Gimelshein, 2018; partitions: FlashDecoding, Dao et al., 2023.

S sequences, M blocks a sequence, P tokens a block, H query heads, K key/value heads, D and V head sizes of keys and
values, C keys of a tile, R rows: the queries of one tile times the query heads of one key/value head, padded to 4.
"""

from typing import NamedTuple

import numpy as np
from numba import prange

from kernels.cpu.jit import kernel, routine
from kernels.cpu.simd import (
    LANES,
    exp,
    fetch_add,
    fma,
    keep,
    lane,
    largest_lane,
    load,
    load_part,
    load_splat,
    maximum,
    pointer,
    splat,
    store,
    store_part,
    sum_of_lanes,
)

TILE = 32  # keys
PARTITION = 512  # tokens, a multiple of TILE
ROW_GROUP = 4
TARGET_ROWS = 32
LEAST_PARALLEL_WORK = 200_000  # multiply-adds; below, a second thread costs more than it brings

_ZERO = np.float32(0.0)
_MINUS_INFINITY = np.float32(-np.inf)


class Step(NamedTuple):
    """The call: addresses, then sizes."""

    out: int
    q: int
    k_cache: int
    v_cache: int
    block_tables: int
    cu_seqlens_q: int
    seq_lens: int
    num_tokens: int
    num_seqs: int
    num_blocks: int
    max_blocks: int
    block_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    value_size: int
    q_stride: int
    window: int
    scale: float


class Task(NamedTuple):
    """The queries of one tile that one thread computes, over some partitions of the context."""

    seq: int
    kv_head: int
    first_token: int  # in the packed batch
    num_queries: int
    first_position: int
    first_partition: int
    end_partition: int
    part: int  # this task is the part-th of the queries' partitions; -1: all of them


class Scratch(NamedTuple):
    """One thread's memory. A state row is the maximum, 16 lanes of the weights' sum and the output."""

    q_RD: np.ndarray
    k_DC: np.ndarray
    v_CV: np.ndarray
    weights_RC: np.ndarray
    first_visible_R: np.ndarray
    end_visible_R: np.ndarray
    state: np.ndarray
    total: np.ndarray


@routine()
def _round_up(value, multiple):
    return (value + multiple - 1) // multiple * multiple


@routine()
def _queries_of_tile(step):
    return max(1, TARGET_ROWS // (step.num_heads // step.num_kv_heads))


@routine()
def _state_stride(step):
    return 2 * LANES + _round_up(step.value_size, LANES)


@routine()
def _padded_rows(step):
    return _round_up(_queries_of_tile(step) * (step.num_heads // step.num_kv_heads), ROW_GROUP)


@routine()
def _new_scratch(step):
    rows = _padded_rows(step)
    head_size, value_size = _round_up(step.head_size, LANES), _round_up(step.value_size, LANES)
    return Scratch(
        np.zeros(rows * head_size, np.float32),
        np.zeros(head_size * TILE, np.float32),
        np.zeros(TILE * value_size, np.float32),
        np.zeros(rows * TILE, np.float32),
        np.zeros(rows, np.int64),
        np.zeros(rows, np.int64),
        np.zeros(rows * _state_stride(step), np.float32),
        np.zeros(rows * _state_stride(step), np.float32),
    )


@routine()
def _load_queries(step, task, like, q_RD):
    """Fill q_RD with the task's queries times `scale`, a row for each query and head of the group."""
    q = pointer(step.q, like)
    group = step.num_heads // step.num_kv_heads
    stride = _round_up(step.head_size, LANES)
    scale = splat(np.float32(step.scale))
    for query in range(task.num_queries):
        for head in range(group):
            source = (task.first_token + query) * step.q_stride + (task.kv_head * group + head) * step.head_size
            target = (query * group + head) * stride
            for d in range(0, step.head_size, LANES):
                lanes = load_part(q, source + d, step.head_size - d)
                store(q_RD, target + d, lanes * scale)


@routine()
def _block_run(step, task, position, end):
    """Return the block of `position`, the place in it, and how many positions before `end` lie there side by side."""
    table = pointer(step.block_tables, np.int32)
    entry = position // step.block_size
    offset = position - entry * step.block_size
    return table[task.seq * step.max_blocks + entry], offset, min(step.block_size - offset, end - position)


@routine()
def _load_keys(step, task, like, start, count, k_DC):
    """Fill k_DC with the keys of positions start to start + count."""
    k_cache = pointer(step.k_cache, like)
    in_vectors = step.block_size % LANES == 0  # then a vector of keys lies within one block
    column = 0
    while column < count:
        block, offset, run = _block_run(step, task, start + column, start + count)
        source = (block * step.num_kv_heads + task.kv_head) * step.head_size * step.block_size + offset
        for d in range(step.head_size):
            target = d * TILE + column
            if in_vectors:
                for c in range(0, run, LANES):
                    store(k_DC, target + c, load(k_cache, source + c))
            else:
                for c in range(run):
                    k_DC[target + c] = lane(load_splat(k_cache, source + c), 0)
            source += step.block_size
        column += run


@routine()
def _load_values(step, task, like, start, count, v_CV):
    """Fill v_CV with the values of positions start to start + count."""
    v_cache = pointer(step.v_cache, like)
    size, stride = step.value_size, _round_up(step.value_size, LANES)
    row = 0
    while row < count:
        block, offset, run = _block_run(step, task, start + row, start + count)
        source = ((block * step.num_kv_heads + task.kv_head) * step.block_size + offset) * size
        for target in range(row * stride, (row + run) * stride, stride):
            for v in range(0, size, LANES):
                store(v_CV, target + v, load_part(v_cache, source + v, size - v))
            source += size
        row += run


@routine()
def _add_products(out, out_start, out_stride, a, a_start, a_stride, b, width, first, end):
    """out[r] += sum of a[r, k] * b[k] over first <= k < end, in this order, for the 4 rows r of one group."""
    for column in range(0, width, LANES):
        at = out_start + column
        sum_0 = load(out, at)
        sum_1 = load(out, at + out_stride)
        sum_2 = load(out, at + 2 * out_stride)
        sum_3 = load(out, at + 3 * out_stride)
        for k in range(first, end):
            row = load(b, k * width + column)
            sum_0 = fma(load_splat(a, a_start + k), row, sum_0)
            sum_1 = fma(load_splat(a, a_start + a_stride + k), row, sum_1)
            sum_2 = fma(load_splat(a, a_start + 2 * a_stride + k), row, sum_2)
            sum_3 = fma(load_splat(a, a_start + 3 * a_stride + k), row, sum_3)
        store(out, at, sum_0)
        store(out, at + out_stride, sum_1)
        store(out, at + 2 * out_stride, sum_2)
        store(out, at + 3 * out_stride, sum_3)


@routine()
def _add_products_of_row(out, out_start, a, a_start, b, width, first, end):
    """The same for one row."""
    if first >= end:
        return
    for column in range(0, width, LANES):
        total = load(out, out_start + column)
        for k in range(first, end):
            total = fma(load_splat(a, a_start + k), load(b, k * width + column), total)
        store(out, out_start + column, total)


@routine()
def _find_visible(step, task, start, scratch):
    """Fill in which keys of the tile at `start` each row sees; padding rows see what the last row sees."""
    group = step.num_heads // step.num_kv_heads
    for row in range(len(scratch.first_visible_R)):
        position = task.first_position + min(row // group, task.num_queries - 1)
        scratch.first_visible_R[row] = min(max(position - step.window + 1 - start, 0), TILE)
        scratch.end_visible_R[row] = min(max(position + 1 - start, 0), TILE)


@routine()
def _weigh(scratch, row, state_start, width):
    """Turn one row's scores into weights and bring its state to the new maximum."""
    first, end = scratch.first_visible_R[row], scratch.end_visible_R[row]
    at, state = row * TILE, scratch.state
    low, high = load(scratch.weights_RC, at), load(scratch.weights_RC, at + LANES)
    hidden = splat(_MINUS_INFINITY)
    old = state[state_start]
    new = largest_lane(maximum(keep(low, 0, first, end, hidden), keep(high, LANES, first, end, hidden)))
    new = new if new > old else old
    low = keep(exp(low - splat(new)), 0, first, end, splat(_ZERO))
    high = keep(exp(high - splat(new)), LANES, first, end, splat(_ZERO))
    store(scratch.weights_RC, at, low)
    store(scratch.weights_RC, at + LANES, high)
    sums_start = state_start + LANES
    if new != old:  # else the factor is exactly 1
        factor = exp(splat(old - new))
        state[state_start] = new
        for column in range(sums_start, sums_start + LANES + width, LANES):
            store(state, column, load(state, column) * factor)
    store(state, sums_start, load(state, sums_start) + (low + high))


@routine()
def _add_values(scratch, row, stride, width):
    """Add the weighted values to the outputs of 4 rows: what all see together, the rest row by row, keys in order."""
    out_start = row * stride + 2 * LANES
    common_first, common_end = 0, TILE
    for r in range(row, row + ROW_GROUP):
        common_first = max(common_first, scratch.first_visible_R[r])
        common_end = min(common_end, scratch.end_visible_R[r])
    common_end = max(common_end, common_first)
    for r in range(ROW_GROUP):
        first, end = scratch.first_visible_R[row + r], min(scratch.end_visible_R[row + r], common_first)
        _add_products_of_row(
            scratch.state, out_start + r * stride, scratch.weights_RC, (row + r) * TILE, scratch.v_CV, width, first, end
        )
    _add_products(
        scratch.state,
        out_start,
        stride,
        scratch.weights_RC,
        row * TILE,
        TILE,
        scratch.v_CV,
        width,
        common_first,
        common_end,
    )
    for r in range(ROW_GROUP):
        first, end = max(scratch.first_visible_R[row + r], common_end), scratch.end_visible_R[row + r]
        _add_products_of_row(
            scratch.state, out_start + r * stride, scratch.weights_RC, (row + r) * TILE, scratch.v_CV, width, first, end
        )


@routine()
def _attend_tile(step, task, num_rows, scratch):
    """Add the loaded tile of keys and values to the states of all rows."""
    width, stride = _round_up(step.value_size, LANES), _state_stride(step)
    head_size = _round_up(step.head_size, LANES)
    for row in range(0, num_rows, ROW_GROUP):
        last = min(row + ROW_GROUP, num_rows)
        if scratch.end_visible_R[last - 1] <= 0 or scratch.first_visible_R[row] >= TILE:
            continue
        for column in range(row * TILE, (row + ROW_GROUP) * TILE, LANES):
            store(scratch.weights_RC, column, splat(_ZERO))
        _add_products(
            scratch.weights_RC,
            row * TILE,
            TILE,
            scratch.q_RD,
            row * head_size,
            head_size,
            scratch.k_DC,
            TILE,
            0,
            step.head_size,
        )
        for r in range(row, last):
            if scratch.first_visible_R[r] < scratch.end_visible_R[r]:
                _weigh(scratch, r, r * stride, width)
        _add_values(scratch, row, stride, width)


@routine()
def _clear(state, num_rows, stride):
    """Make the states of rows that have seen nothing."""
    for start in range(0, num_rows * stride, stride):
        state[start] = _MINUS_INFINITY
        for column in range(start + LANES, start + stride, LANES):
            store(state, column, splat(_ZERO))


@routine()
def _merge(total, state, state_start, num_rows, stride):
    """Add to each row of `total` the state of the partition that follows."""
    for start in range(0, num_rows * stride, stride):
        old, other = total[start], state[state_start + start]
        if other == _MINUS_INFINITY:  # the row sees nothing of this partition
            continue
        new = other if other > old else old
        total[start] = new
        old_factor, other_factor = exp(splat(old - new)), exp(splat(other - new))
        for column in range(start + LANES, start + stride, LANES):
            added = load(state, state_start + column) * other_factor
            store(total, column, fma(load(total, column), old_factor, added))


@routine()
def _write_out(step, task, like, total):
    out = pointer(step.out, like)
    group, stride = step.num_heads // step.num_kv_heads, _state_stride(step)
    for row in range(task.num_queries * group):
        token, head = task.first_token + row // group, task.kv_head * group + row % group
        target = (token * step.num_heads + head) * step.value_size
        start = row * stride
        weight = splat(sum_of_lanes(load(total, start + LANES)))
        for v in range(0, step.value_size, LANES):
            lanes = load(total, start + 2 * LANES + v) / weight
            store_part(out, target + v, step.value_size - v, lanes)


@routine()
def _attend(step, task, index, like, scratch, partials):
    """Compute one task: its output, or the state of its one partition into place `index` of `partials`."""
    group, stride = step.num_heads // step.num_kv_heads, _state_stride(step)
    num_rows = task.num_queries * group
    padded = _round_up(num_rows, ROW_GROUP)
    last_position = task.first_position + task.num_queries - 1
    first_visible = max(0, task.first_position - step.window + 1)
    _load_queries(step, task, like, scratch.q_RD)
    _clear(scratch.total, padded, stride)
    for partition in range(task.first_partition, task.end_partition):
        _clear(scratch.state, padded, stride)
        start = max(partition * PARTITION, first_visible // TILE * TILE)
        end = min((partition + 1) * PARTITION, last_position + 1)
        for tile in range(start, end, TILE):
            count = min(TILE, end - tile)
            _load_keys(step, task, like, tile, count, scratch.k_DC)
            _load_values(step, task, like, tile, count, scratch.v_CV)
            _find_visible(step, task, tile, scratch)
            _attend_tile(step, task, num_rows, scratch)
        if task.part < 0:
            _merge(scratch.total, scratch.state, 0, num_rows, stride)
    if task.part < 0:
        _write_out(step, task, like, scratch.total)
    else:
        partial_start = index * _padded_rows(step) * stride
        for column in range(0, num_rows * stride, LANES):
            store(partials, partial_start + column, load(scratch.state, column))


@routine()
def _first_malformed(step):
    """Return the first sequence whose lengths or block table point outside, or -1."""
    table = pointer(step.block_tables, np.int32)
    starts, seq_lens = pointer(step.cu_seqlens_q, np.int32), pointer(step.seq_lens, np.int32)
    for seq in range(step.num_seqs):
        num_queries, seq_len = starts[seq + 1] - starts[seq], seq_lens[seq]
        if starts[seq] < 0 or starts[seq + 1] > step.num_tokens:
            return seq
        if num_queries < 0 or seq_len < num_queries or seq_len > step.max_blocks * step.block_size:
            return seq
        for entry in range((seq_len + step.block_size - 1) // step.block_size):
            block = table[seq * step.max_blocks + entry]
            if block < 0 or block >= step.num_blocks:
                return seq
    return -1


@routine()
def _plan(step, tasks, split):
    """Write the step's tasks into the rows of `tasks`; return their number. An empty `tasks` only counts.

    Within a sequence the tiles with the longest context come first, so that threads end together.
    """
    starts, seq_lens = pointer(step.cu_seqlens_q, np.int32), pointer(step.seq_lens, np.int32)
    tile_queries = _queries_of_tile(step)
    num_tasks = 0
    for seq in range(step.num_seqs):
        num_queries = np.int64(starts[seq + 1] - starts[seq])
        num_computed = seq_lens[seq] - num_queries
        for kv_head in range(step.num_kv_heads):
            for first in range((num_queries - 1) // tile_queries * tile_queries, -1, -tile_queries):
                count = min(tile_queries, num_queries - first)
                first_partition = max(0, num_computed + first - step.window + 1) // PARTITION
                end_partition = (num_computed + first + count - 1) // PARTITION + 1
                num_parts = end_partition - first_partition if split else 1
                for part in range(num_parts):
                    if len(tasks) > 0:
                        tasks[num_tasks, 0] = seq
                        tasks[num_tasks, 1] = kv_head
                        tasks[num_tasks, 2] = starts[seq] + first
                        tasks[num_tasks, 3] = count
                        tasks[num_tasks, 4] = num_computed + first
                        tasks[num_tasks, 5] = first_partition + part
                        tasks[num_tasks, 6] = first_partition + part + 1 if split else end_partition
                        tasks[num_tasks, 7] = part if split else -1
                    num_tasks += 1
    return num_tasks


@routine()
def _task(row):
    return Task(row[0], row[1], row[2], row[3], row[4], row[5], row[6], row[7])


@routine()
def _work(step, like, tasks, next_task, partials):
    """Take tasks until none is left."""
    scratch = _new_scratch(step)
    while True:
        index = fetch_add(next_task, 1)
        if index >= len(tasks):
            return
        _attend(step, _task(tasks[index]), index, like, scratch, partials)


@routine(parallel=True)
def _work_in_parallel(step, like, tasks, next_task, partials, num_workers):
    for _ in prange(num_workers):
        _work(step, like, tasks, next_task, partials)


@routine()
def _merge_partials(step, like, tasks, partials):
    """Write the output of every query whose partitions were computed apart."""
    group, stride = step.num_heads // step.num_kv_heads, _state_stride(step)
    total = np.zeros(_padded_rows(step) * stride, np.float32)
    for index in range(len(tasks)):
        task = _task(tasks[index])
        num_rows = task.num_queries * group
        if task.part == 0:
            _clear(total, num_rows, stride)
        _merge(total, partials, index * len(total), num_rows, stride)
        if index + 1 == len(tasks) or tasks[index + 1, 7] == 0:
            _write_out(step, task, like, total)


@routine()
def _total_work(step):
    """Return about how many multiply-adds the step takes."""
    starts, seq_lens = pointer(step.cu_seqlens_q, np.int32), pointer(step.seq_lens, np.int32)
    num_pairs = np.int64(0)
    for seq in range(step.num_seqs):
        num_pairs += np.int64(starts[seq + 1] - starts[seq]) * min(seq_lens[seq], step.window)
    return num_pairs * step.num_heads * (step.head_size + step.value_size)


@kernel()
def paged_attention(like, addresses, sizes, scale, num_threads):
    """Compute the step that `addresses` and `sizes` describe in the order of `Step`'s fields.

    Return -1, or the first sequence whose lengths or block table point outside.
    """
    step = Step(*(addresses + sizes + (scale,)))
    malformed = _first_malformed(step)
    if malformed >= 0:
        return malformed
    num_workers = num_threads if _total_work(step) >= LEAST_PARALLEL_WORK else 1
    nothing = np.empty((0, 8), np.int64)
    num_tasks = _plan(step, nothing, False)
    split = num_workers > 1 and num_tasks < 4 * num_workers
    if split:
        num_tasks = _plan(step, nothing, True)
    tasks = np.empty((num_tasks, 8), np.int64)
    _plan(step, tasks, split)
    partials = np.empty(num_tasks * _padded_rows(step) * _state_stride(step) if split else 0, np.float32)
    next_task = np.zeros(1, np.int64)
    if num_workers > 1:
        _work_in_parallel(step, like, tasks, next_task, partials, num_workers)
    else:
        _work(step, like, tasks, next_task, partials)
    if split:
        _merge_partials(step, like, tasks, partials)
    return -1
