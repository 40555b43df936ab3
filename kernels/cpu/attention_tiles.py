# Numba infers the types.
# mypy: allow-untyped-defs, allow-untyped-calls
"""One tile of keys and values, and the rows of a task that see it.

The legend stands in `kernels.cpu.attention`.
"""

from typing import NamedTuple

import numpy as np

from kernels.cpu.attention_tasks import ROW_GROUP, padded_rows, round_up, state_stride
from kernels.cpu.jit import routine
from kernels.cpu.simd import (
    LANES,
    exp,
    fma,
    keep,
    lane,
    lane_indices,
    largest_lane,
    load,
    load_part,
    load_splat,
    maximum,
    pointer,
    splat,
    store,
    tanh,
)

TILE = 32  # keys

_ZERO = np.float32(0.0)
_MINUS_INFINITY = np.float32(-np.inf)


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
def new_scratch(step):
    rows = padded_rows(step)
    head_size, value_size = round_up(step.head_size, LANES), round_up(step.value_size, LANES)
    return Scratch(
        np.zeros(rows * head_size, np.float32),
        np.zeros(head_size * TILE, np.float32),
        np.zeros(TILE * value_size, np.float32),
        np.zeros(rows * TILE, np.float32),
        np.zeros(rows, np.int64),
        np.zeros(rows, np.int64),
        np.zeros(rows * state_stride(step), np.float32),
        np.zeros(rows * state_stride(step), np.float32),
    )


@routine()
def load_queries(step, task, like, q_RD):
    """Fill q_RD with the task's queries times `scale`, a row for each query and head of the group."""
    q = pointer(step.q, like)
    group = step.num_heads // step.num_kv_heads
    stride = round_up(step.head_size, LANES)
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
def load_keys(step, task, like, start, count, k_DC):
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
def load_values(step, task, like, start, count, v_CV):
    """Fill v_CV with the values of positions start to start + count."""
    v_cache = pointer(step.v_cache, like)
    size, stride = step.value_size, round_up(step.value_size, LANES)
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
def find_visible(step, task, start, scratch):
    """Fill in which keys of the tile at `start` each row sees; padding rows see what the last row sees."""
    group = step.num_heads // step.num_kv_heads
    for row in range(len(scratch.first_visible_R)):
        position = task.first_position + min(row // group, task.num_queries - 1)
        scratch.first_visible_R[row] = min(max(position - step.window + 1 - start, 0), TILE)
        scratch.end_visible_R[row] = min(max(position + 1 - start, 0), TILE)


@routine()
def _adjust_scores(step, task, start, row, scratch):
    """Cap one row's scores of the tile at `start`, and lower those of distant keys."""
    group = step.num_heads // step.num_kv_heads
    cap, slope = splat(np.float32(step.soft_cap)), splat(_ZERO)
    if step.alibi_slopes != 0:
        slope = load_splat(pointer(step.alibi_slopes, np.float32), task.kv_head * group + row % group)
    first_distance = start - (task.first_position + row // group)  # negative, for keys before the query
    for column in range(0, TILE, LANES):
        scores = load(scratch.weights_RC, row * TILE + column)
        if step.soft_cap > 0.0:
            scores = tanh(scores / cap) * cap
        if step.alibi_slopes != 0:
            distances = lane_indices() + splat(np.float32(first_distance + column))
            scores = fma(slope, distances, scores)
        store(scratch.weights_RC, row * TILE + column, scores)


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
def attend_tile(step, task, start, num_rows, scratch):
    """Add the loaded tile, whose keys begin at position `start`, to the states of all rows."""
    has_adjustments = step.soft_cap > 0.0 or step.alibi_slopes != 0
    width, stride = round_up(step.value_size, LANES), state_stride(step)
    head_size = round_up(step.head_size, LANES)
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
                if has_adjustments:
                    _adjust_scores(step, task, start, r, scratch)
                _weigh(scratch, r, r * stride, width)
        _add_values(scratch, row, stride, width)
