# Numba infers the types.
# mypy: allow-untyped-defs, allow-untyped-calls
"""One tile of keys and values, and the rows of a task that see it.

Keys and values are read where they lie, and widened in registers: a second reading from the first cache costs nothing
beside the products. Only blocks that do not consist of whole vectors are copied first.

The legend stands in `kernels.cpu.attention`.
"""

from typing import NamedTuple

import numpy as np

from octavo.kernels.cpu.attention_tasks import MANY, padded_rows, round_up, rows_of_head, state_stride
from octavo.kernels.cpu.elementary import exp, tanh
from octavo.kernels.cpu.jit import routine
from octavo.kernels.cpu.lanes import LANES
from octavo.kernels.cpu.memory import address_of, load, load_rows, load_splat, pointer, prefetch, store, store_rows
from octavo.kernels.cpu.multiply_add import add_products, add_products_of_two
from octavo.kernels.cpu.simd import fma, keep, lane, lane_indices, largest_lane, maximum, splat, zeros

TILE = 2 * LANES  # keys
FEW = MANY // 2  # rows, of which two vectors are done at once
CACHE_LINE = 16  # float32

_ZERO = np.float32(0.0)
_MINUS_INFINITY = np.float32(-np.inf)


class Scratch(NamedTuple):
    """One thread's memory: addresses (an array would be counted at every call), of float32 unless a comment differs.

    A state row is the maximum, 16 lanes of the weights' sum and the output.
    """

    q_DR: int  # of MANY rows each, one after another
    weights_RC: int
    slopes_R: int
    positions_R: int  # int64; padding rows have the last row's
    state: int
    total: int
    k_DC: int  # copies, in the dtype of the cache
    v_CV: int
    block_shift: int  # a shift that divides a position by the block's size, or -1


class Tile(NamedTuple):
    """Where the keys and values of a tile lie: addresses for the first 16 and the last 16 keys; strides in elements."""

    k_low: int
    k_high: int
    k_stride: int  # between components
    v_low: int
    v_high: int
    v_stride: int  # between keys


@routine()
def new_scratch(step):
    """Return a Scratch, and the array that it lies in, which must live as long."""
    rows, width, state_size = (
        padded_rows(step),
        round_up(step.value_size, LANES),
        padded_rows(step) * state_stride(step),
    )
    q_size = round_up(rows * step.head_size, CACHE_LINE)
    row_size = round_up(rows, CACHE_LINE)
    sizes = (q_size, rows * TILE, row_size, 2 * row_size, state_size, state_size, step.head_size * TILE, TILE * width)
    total_size = CACHE_LINE
    for size in sizes:
        total_size += size
    memory = np.empty(total_size, np.float32)
    q_DR = round_up(memory.ctypes.data, 4 * CACHE_LINE)
    weights_RC = q_DR + 4 * sizes[0]
    slopes_R = weights_RC + 4 * sizes[1]
    positions_R = slopes_R + 4 * sizes[2]
    state = positions_R + 4 * sizes[3]
    total = state + 4 * sizes[4]
    k_DC = total + 4 * sizes[5]
    v_CV = k_DC + 4 * sizes[6]
    shift = 0
    while 1 << shift < step.block_size:
        shift += 1
    block_shift = shift if 1 << shift == step.block_size else -1
    return Scratch(q_DR, weights_RC, slopes_R, positions_R, state, total, k_DC, v_CV, block_shift), memory


@routine(forceinline=True)
def _floats(address):
    return pointer(address, np.float32)


@routine()
def load_queries(step, task, like, scratch):
    """Fill scratch with the task's queries times `scale`, a row for each query and head of a group, and their places.

    Groups lie one after another; rows that only fill up the last MANY of each are zeros.
    """
    q, group = pointer(step.q, like), step.num_heads // step.num_kv_heads
    q_DR, positions_R, slopes_R = (
        _floats(scratch.q_DR),
        pointer(scratch.positions_R, np.int64),
        _floats(scratch.slopes_R),
    )
    scale, row = np.float32(step.scale), 0
    for kv_head in range(task.first_kv_head, task.end_kv_head):
        end_row = row + rows_of_head(step, task.num_queries)
        for query in range(task.num_queries):
            for head in range(kv_head * group, (kv_head + 1) * group):
                source = (task.first_token + query) * step.q_stride + head * step.head_size
                target = row // MANY * MANY * step.head_size + row % MANY
                for d in range(step.head_size):
                    q_DR[target + d * MANY] = lane(load_splat(q, source + d), 0) * scale
                positions_R[row] = task.first_position + query
                slopes_R[row] = pointer(step.alibi_slopes, np.float32)[head] if step.alibi_slopes != 0 else _ZERO
                row += 1
        for padding in range(row, end_row):
            target = padding // MANY * MANY * step.head_size + padding % MANY
            for d in range(step.head_size):
                q_DR[target + d * MANY] = _ZERO
            positions_R[padding] = positions_R[row - 1]
        row = end_row


# Where keys and values lie.


@routine(forceinline=True)
def reads_in_place(step):
    """Return whether vectors of keys and of values lie within a block."""
    return step.block_size % LANES == 0 and step.value_size % LANES == 0


@routine(forceinline=True)
def _locate(step, task, kv_head, scratch, position):
    """Return the index of the first key component of a position's block and head, divided by the head's size, and
    where in the block the position is."""
    # A division takes as long as the products of a key.
    entry = position >> scratch.block_shift if scratch.block_shift >= 0 else position // step.block_size
    block = np.int64(pointer(step.block_tables, np.int32)[task.seq * step.max_blocks + entry])
    return (block * step.num_kv_heads + kv_head) * step.block_size, position - entry * step.block_size


@routine(forceinline=True)
def _half_in_place(step, task, kv_head, like, scratch, position):
    """Return the addresses of the key and the value at a position."""
    head, offset = _locate(step, task, kv_head, scratch, position)
    k, v = pointer(step.k_cache, like), pointer(step.v_cache, like)
    return address_of(k, head * step.head_size + offset), address_of(v, (head + offset) * step.value_size)


@routine(forceinline=True)
def tile_in_place(step, task, kv_head, like, scratch, start, count):
    """Return where `count` positions from `start` on lie in the cache; the second half is anywhere if there is none."""
    k_low, v_low = _half_in_place(step, task, kv_head, like, scratch, start)
    k_high, v_high = k_low, v_low
    if count > LANES:
        k_high, v_high = _half_in_place(step, task, kv_head, like, scratch, start + LANES)
    return Tile(k_low, k_high, step.block_size, v_low, v_high, step.value_size)


@routine()
def copied_tile(step, task, kv_head, like, scratch, start, count):
    """Copy keys and values of `count` positions from `start` on; return where they lie then."""
    k_cache, v_cache = pointer(step.k_cache, like), pointer(step.v_cache, like)
    k_DC, v_CV = pointer(scratch.k_DC, like), pointer(scratch.v_CV, like)
    width = round_up(step.value_size, LANES)
    for column in range(count):
        head, offset = _locate(step, task, kv_head, scratch, start + column)
        for d in range(step.head_size):
            k_DC[d * TILE + column] = k_cache[head * step.head_size + d * step.block_size + offset]
        for v in range(step.value_size):
            v_CV[column * width + v] = v_cache[(head + offset) * step.value_size + v]
    return Tile(scratch.k_DC, address_of(k_DC, LANES), TILE, scratch.v_CV, address_of(v_CV, LANES * width), width)


# Products: of MANY rows with one vector, or of FEW rows with two.


@routine()
def _score_many(q, weights, k, stride, head_size):
    """Write the scores of MANY rows for 16 keys."""
    q_DR, at, k_at = _floats(q), 0, 0
    sums = zeros(MANY)
    for _ in range(head_size):
        sums = add_products(sums, q_DR, at, 1, load(k, k_at))
        at, k_at = at + MANY, k_at + stride
    store_rows(_floats(weights), 0, TILE, sums)


@routine()
def _score_few(q, weights, k_low, k_high, stride, head_size, next_low, next_high):
    """Write the scores of FEW rows for a tile; bring the next one's keys near, a memory's latency ahead."""
    q_DR, at, k_at = _floats(q), 0, 0
    sums = zeros(MANY)
    for _ in range(head_size):
        sums = add_products_of_two(sums, q_DR, at, 1, k_low, k_at, k_high, k_at)
        prefetch(next_low, k_at)
        prefetch(next_high, k_at)
        at, k_at = at + MANY, k_at + stride
    store_rows(_floats(weights), 0, TILE, sums[:FEW])
    store_rows(_floats(weights), LANES, TILE, sums[FEW:])


@routine()
def _weigh_many(weights, first, end, v_low, v_high, stride, out, out_stride):
    """Add the values of keys first to end times their weights to 16 columns of MANY rows."""
    at, v_at = first, first * stride
    sums = load_rows(MANY, _floats(out), 0, out_stride)
    for _ in range(first, min(end, LANES)):
        sums = add_products(sums, _floats(weights), at, TILE, load(v_low, v_at))
        at, v_at = at + 1, v_at + stride
    v_at -= LANES * stride
    for _ in range(max(first, LANES), end):
        sums = add_products(sums, _floats(weights), at, TILE, load(v_high, v_at))
        at, v_at = at + 1, v_at + stride
    store_rows(_floats(out), 0, out_stride, sums)


@routine()
def _weigh_few(weights, first, end, v_low, v_high, stride, out, out_stride, next_low, next_high):
    """Add the values of keys first to end times their weights to 32 columns of FEW rows; bring the next ones near."""
    at, v_at, next_at = first, first * stride, 0
    sums = load_rows(FEW, _floats(out), 0, out_stride) + load_rows(FEW, _floats(out), LANES, out_stride)
    for _ in range(first, min(end, LANES)):
        sums = add_products_of_two(sums, _floats(weights), at, TILE, v_low, v_at, v_low, v_at + LANES)
        prefetch(next_low, next_at)
        prefetch(next_low, next_at + LANES)
        at, v_at, next_at = at + 1, v_at + stride, next_at + 2 * LANES
    v_at -= LANES * stride
    next_at = 0
    for _ in range(max(first, LANES), end):
        sums = add_products_of_two(sums, _floats(weights), at, TILE, v_high, v_at, v_high, v_at + LANES)
        prefetch(next_high, next_at)
        prefetch(next_high, next_at + LANES)
        at, v_at, next_at = at + 1, v_at + stride, next_at + 2 * LANES
    store_rows(_floats(out), 0, out_stride, sums[:FEW])
    store_rows(_floats(out), LANES, out_stride, sums[FEW:])


@routine()
def _weigh_one(weights, first, end, v_low, v_high, stride, out, width):
    """The same for all columns of one row."""
    for key in range(first, end):
        weight = load_splat(_floats(weights), key)
        for column in range(0, width, LANES):
            values = (
                load(v_low, key * stride + column) if key < LANES else load(v_high, (key - LANES) * stride + column)
            )
            store(_floats(out), column, fma(weight, values, load(_floats(out), column)))


@routine(forceinline=True)
def _visible(step, scratch, row, start):
    """Return the first key and the end of the keys that a row sees of the tile at `start`."""
    position = pointer(scratch.positions_R, np.int64)[row]
    return min(max(position - step.window + 1 - start, 0), TILE), min(max(position + 1 - start, 0), TILE)


@routine()
def _adjust_scores(scores, soft_cap, has_slope, slope, first_distance):
    """Cap one row's scores, and lower those of distant keys."""
    cap = splat(np.float32(soft_cap))
    for column in range(0, TILE, LANES):
        lanes = load(_floats(scores), column)
        if soft_cap > 0.0:
            lanes = tanh(lanes / cap) * cap
        if has_slope:
            distances = lane_indices() + splat(np.float32(first_distance + column))
            lanes = fma(splat(slope), distances, lanes)
        store(_floats(scores), column, lanes)


@routine(forceinline=True)
def _raise_maximum(scores, first, end, state, width):
    """Bring one row's state to the maximum of what it has seen and of the scores of keys first to end."""
    low, high = load(_floats(scores), 0), load(_floats(scores), LANES)
    if end - first < TILE:
        low = keep(low, 0, first, end, splat(_MINUS_INFINITY))
        high = keep(high, LANES, first, end, splat(_MINUS_INFINITY))
    old, new = _floats(state)[0], largest_lane(maximum(low, high))
    if new > old:  # else the factor is exactly 1
        factor = exp(splat(old - new))
        _floats(state)[0] = new
        for column in range(LANES, 2 * LANES + width, LANES):
            store(_floats(state), column, load(_floats(state), column) * factor)


@routine(forceinline=True)
def _make_weights(scores, first, end, state):
    """Turn one row's scores into weights and add up these."""
    largest = splat(_floats(state)[0])
    low, high = exp(load(_floats(scores), 0) - largest), exp(load(_floats(scores), LANES) - largest)
    if end - first < TILE:
        low, high = keep(low, 0, first, end, splat(_ZERO)), keep(high, LANES, first, end, splat(_ZERO))
    store(_floats(scores), 0, low)
    store(_floats(scores), LANES, high)
    store(_floats(state), LANES, load(_floats(state), LANES) + (low + high))


@routine(forceinline=True)
def _score(step, tile, next_tile, like, q, weights, num_rows, num_keys):
    """Write the scores of up to MANY rows."""
    k_low, k_high = pointer(tile.k_low, like), pointer(tile.k_high, like)
    if num_rows <= FEW:
        next_low, next_high = pointer(next_tile.k_low, like), pointer(next_tile.k_high, like)
        _score_few(q, weights, k_low, k_high, tile.k_stride, step.head_size, next_low, next_high)
        return
    _score_many(q, weights, k_low, tile.k_stride, step.head_size)
    if num_keys > LANES:
        _score_many(q, weights + 4 * LANES, k_high, tile.k_stride, step.head_size)


@routine(forceinline=True)
def _element(address, like, index):
    return pointer(address_of(pointer(address, like), index), like)


@routine(forceinline=True)
def _weigh(step, tile, next_tile, like, weights, num_rows, first, end, out):
    """Add the values of keys first to end times their weights to the outputs of up to MANY rows."""
    width, out_stride, stride, column = round_up(step.value_size, LANES), state_stride(step), tile.v_stride, 0
    while num_rows <= FEW and column + LANES < width:
        v_low, v_high = _element(tile.v_low, like, column), _element(tile.v_high, like, column)
        next_low = _element(next_tile.v_low, like, column * LANES)
        next_high = _element(next_tile.v_high, like, column * LANES)
        target = out + 4 * column
        _weigh_few(weights, first, end, v_low, v_high, stride, target, out_stride, next_low, next_high)
        column += 2 * LANES
    while column < width:
        v_low, v_high = _element(tile.v_low, like, column), _element(tile.v_high, like, column)
        _weigh_many(weights, first, end, v_low, v_high, stride, out + 4 * column, out_stride)
        column += LANES


@routine(forceinline=True)
def _make_all_weights(step, start, row, num_rows, scratch):
    """Turn the scores of up to MANY rows into weights. Maxima come first: their latencies overlap."""
    has_slopes, width, stride = step.alibi_slopes != 0, round_up(step.value_size, LANES), state_stride(step)
    scores, state = scratch.weights_RC + 4 * row * TILE, scratch.state + 4 * row * stride
    for r in range(num_rows):
        first, end = _visible(step, scratch, row + r, start)
        if first < end:
            if has_slopes or step.soft_cap > 0.0:
                distance = start - pointer(scratch.positions_R, np.int64)[row + r]  # negative, for keys before
                slope = _floats(scratch.slopes_R)[row + r]
                _adjust_scores(scores + 4 * r * TILE, step.soft_cap, has_slopes, slope, distance)
            _raise_maximum(scores + 4 * r * TILE, first, end, state + 4 * r * stride, width)
    for r in range(num_rows):
        first, end = _visible(step, scratch, row + r, start)
        if first < end:
            _make_weights(scores + 4 * r * TILE, first, end, state + 4 * r * stride)


@routine(forceinline=True)
def _add_values(step, tile, next_tile, like, row, num_rows, start, scratch):
    """Add the weighted values to the outputs of up to MANY rows: keys that all see together, the others one by one.

    A row's keys are in order nevertheless.
    """
    width, stride = round_up(step.value_size, LANES), state_stride(step)
    v_low, v_high = pointer(tile.v_low, like), pointer(tile.v_high, like)
    weights, out = scratch.weights_RC + 4 * row * TILE, scratch.state + 4 * (row * stride + 2 * LANES)
    least, first_end = _visible(step, scratch, row, start)
    first, most = _visible(step, scratch, row + num_rows - 1, start)
    end = max(first, first_end)
    if least < first:
        for r in range(num_rows):
            own_first, own_end = _visible(step, scratch, row + r, start)
            own_weights, own_out = weights + 4 * r * TILE, out + 4 * r * stride
            _weigh_one(own_weights, own_first, min(own_end, first), v_low, v_high, tile.v_stride, own_out, width)
    _weigh(step, tile, next_tile, like, weights, num_rows, first, end, out)
    if end < most:
        for r in range(num_rows):
            own_first, own_end = _visible(step, scratch, row + r, start)
            own_weights, own_out = weights + 4 * r * TILE, out + 4 * r * stride
            _weigh_one(own_weights, max(own_first, end), own_end, v_low, v_high, tile.v_stride, own_out, width)


@routine(forceinline=True)
def attend_tile(step, tile, next_tile, like, start, count, first_row, num_rows, scratch):
    """Add a tile, whose keys begin at position `start`, to the states of some rows; the next one is brought near."""
    for row in range(first_row, first_row + num_rows, MANY):
        rows = min(MANY, first_row + num_rows - row)
        first, end = _visible(step, scratch, row, start)[0], _visible(step, scratch, row + rows - 1, start)[1]
        if first < end:
            weights = scratch.weights_RC + 4 * row * TILE
            _score(step, tile, next_tile, like, scratch.q_DR + 4 * row * step.head_size, weights, rows, count)
            _make_all_weights(step, start, row, rows, scratch)
            _add_values(step, tile, next_tile, like, row, rows, start, scratch)
