# Numba infers the types.
# mypy: allow-untyped-defs, allow-untyped-calls
"""Products with weights of 4 or 8 bits on the CPU, and rows of such weights.

Outputs lie in panels of 32, as two vectors. A panel has, for each 8 inputs of 4 bits or 4 inputs of 8, a word of 32
bits for each output, the first input's code lowest; and for each group 32 scales and, if there are any, 32 offsets.

One output of one row is always the same sequence of operations: the weight, scale * code + offset, is one fused
multiply-add; a tile of inputs is a chain of fused multiply-adds from zero, in their order; the tiles are added up in
theirs, the bias last. How many rows there are decides only where the weights stand meanwhile: in registers for one
row, otherwise in a tile that stays in the first cache while all rows of a block pass by.

M rows, N outputs, K inputs.
"""

from typing import Any, NamedTuple

import numpy as np
from llvmlite import binding  # type: ignore[import-untyped]
from numba import prange

from kernels.cpu.jit import kernel, routine
from kernels.cpu.simd import (
    LANES,
    add_products,
    fetch_add,
    fma,
    lane,
    load,
    load_half,
    load_splat,
    low_bits,
    pointer,
    shift_right,
    splat,
    store,
    store_part,
    zeros,
)

PANEL = 2 * LANES  # outputs
TILE = 128  # inputs: with a panel's outputs 16 KiB, half of the first cache
BLOCK = 96  # rows at most, whose tile of inputs stays in the second cache
ROWS = 12 if binding.get_host_cpu_features().get("avx512f") else 6  # at once: their sums fill the registers
FEW = 4  # rows that are faster done in pairs
LEAST_PARALLEL_WORK = 200_000  # multiply-adds; below, a second thread costs more than it brings
TASKS_PER_WORKER = 4

_ZERO = np.float32(0.0)


class Product(NamedTuple):
    """The call: addresses (0: there is none), sizes, and the bytes of an element."""

    out: int
    x: int
    codes: int
    scales: int
    offsets: int
    bias: int
    num_rows: int
    num_outputs: int
    num_inputs: int
    group_size: int
    bits: int
    out_bytes: int  # 4: float32, 2: bfloat16
    x_bytes: int
    scale_bytes: int  # 4: float32, 2: float16
    offset_bytes: int


class Group(NamedTuple):
    """Vectors: what makes weights of a panel's codes in one group of inputs."""

    scales_0: Any
    scales_1: Any
    offsets_0: Any
    offsets_1: Any


class Scratch(NamedTuple):
    """One thread's memory. A block of rows lies tile by tile: the tile's inputs of the first row, of the second, ..."""

    x: np.ndarray
    weights_KN: np.ndarray  # of one tile and panel
    sums_MN: np.ndarray  # of one block and panel


@routine()
def _round_up(value, multiple):
    return (value + multiple - 1) // multiple * multiple


@routine()
def _num_panels(product):
    return (product.num_outputs + PANEL - 1) // PANEL


@routine()
def _rows_of_block(product):
    num_blocks = (product.num_rows + BLOCK - 1) // BLOCK
    return _round_up((product.num_rows + num_blocks - 1) // num_blocks, ROWS)


@routine()
def _load_rows(product, first_row, num_rows, scratch):
    """Fill scratch.x with rows first_row to first_row + num_rows, in float32."""
    stride = _rows_of_block(product)
    x, x_bfloat16 = pointer(product.x, np.float32), pointer(product.x, np.uint16)
    for row in range(num_rows):
        source = (first_row + row) * product.num_inputs
        for k in range(0, product.num_inputs, LANES):
            target = (k // TILE * stride + row) * TILE + k % TILE
            if product.x_bytes == 4:
                store(scratch.x, target, load(x, source + k))
            else:
                store(scratch.x, target, load(x_bfloat16, source + k))


@routine(forceinline=True)
def _load_floats(address, num_bytes, index):
    if num_bytes == 2:
        return load_half(pointer(address, np.uint16), index)
    return load(pointer(address, np.float32), index)


@routine(forceinline=True)
def _load_group(product, panel, group):
    start = (panel * (product.num_inputs // product.group_size) + group) * PANEL
    scales_0 = _load_floats(product.scales, product.scale_bytes, start)
    scales_1 = _load_floats(product.scales, product.scale_bytes, start + LANES)
    if product.offsets == 0:
        middle = splat(np.float32(-(1 << (product.bits - 1))))
        return Group(scales_0, scales_1, scales_0 * middle, scales_1 * middle)
    offsets_0 = _load_floats(product.offsets, product.offset_bytes, start)
    offsets_1 = _load_floats(product.offsets, product.offset_bytes, start + LANES)
    return Group(scales_0, scales_1, offsets_0, offsets_1)


@routine(forceinline=True)
def _first_word(product, panel, first_input):
    return (panel * product.num_inputs + first_input) * product.bits // 32 * PANEL


@routine(forceinline=True)
def _write_weights(words, at, bits, count, group, weights_KN, target):
    """Write down the weights of `count` inputs of one group."""
    mask = (1 << bits) - 1
    for _ in range(0, count, 32 // bits):
        words_0, words_1 = load(words, at), load(words, at + LANES)
        for _ in range(32 // bits):
            store(weights_KN, target, fma(low_bits(words_0, mask), group.scales_0, group.offsets_0))
            store(weights_KN, target + LANES, fma(low_bits(words_1, mask), group.scales_1, group.offsets_1))
            words_0, words_1 = shift_right(words_0, bits), shift_right(words_1, bits)
            target += PANEL
        at += PANEL


@routine()
def _dequantize(product, panel, first, end, weights_KN):
    """Fill weights_KN with the panel's weights of inputs first to end."""
    words = pointer(product.codes, np.float32)
    index, target = first // product.group_size, 0
    while first < end:
        group, at = _load_group(product, panel, index), _first_word(product, panel, first)
        index += 1
        count = min(index * product.group_size, end) - first
        if product.bits == 4:  # as a constant: shifts by constants are faster
            _write_weights(words, at, 4, count, group, weights_KN, target)
        else:
            _write_weights(words, at, 8, count, group, weights_KN, target)
        first += count
        target += count * PANEL


@routine()
def _multiply_group(scratch, x_start, width, row):
    """Add the products of ROWS rows with the dequantized tile, `width` inputs of it, to their sums."""
    for column in range(0, PANEL, LANES):
        sums = zeros(ROWS)
        for k in range(width):
            sums = add_products(sums, scratch.x, x_start + k, TILE, load(scratch.weights_KN, k * PANEL + column))
        for r in range(ROWS):
            target = (row + r) * PANEL + column
            store(scratch.sums_MN, target, load(scratch.sums_MN, target) + sums[r])


@routine()
def _multiply_pair(scratch, x_start, width, row):
    """The same for two rows."""
    sums_0, sums_1 = zeros(2), zeros(2)
    for k in range(width):
        sums_0 = add_products(sums_0, scratch.x, x_start + k, TILE, load(scratch.weights_KN, k * PANEL))
        sums_1 = add_products(sums_1, scratch.x, x_start + k, TILE, load(scratch.weights_KN, k * PANEL + LANES))
    for r in range(2):
        target = (row + r) * PANEL
        store(scratch.sums_MN, target, load(scratch.sums_MN, target) + sums_0[r])
        store(scratch.sums_MN, target + LANES, load(scratch.sums_MN, target + LANES) + sums_1[r])


@routine()
def _multiply_rows(product, panel, num_rows, scratch):
    """Add the products of a block's rows with a panel to their sums."""
    stride = _rows_of_block(product)
    in_groups = (num_rows + ROWS - 1 - FEW) // ROWS * ROWS  # what is left is done in pairs
    for first in range(0, product.num_inputs, TILE):
        end = min(first + TILE, product.num_inputs)
        _dequantize(product, panel, first, end, scratch.weights_KN)
        x_start = first // TILE * stride * TILE
        for row in range(0, in_groups, ROWS):
            _multiply_group(scratch, x_start + row * TILE, end - first, row)
        for row in range(in_groups, num_rows, 2):
            _multiply_pair(scratch, x_start + row * TILE, end - first, row)


@routine(forceinline=True)
def _add_group(sums_0, sums_1, words, at, bits, count, group, x, x_at):
    """Return the sums with the products of one row and the weights of `count` inputs of one group."""
    mask = (1 << bits) - 1
    for _ in range(0, count, 32 // bits):
        words_0, words_1 = load(words, at), load(words, at + LANES)
        for _ in range(32 // bits):
            x_k = load_splat(x, x_at)
            sums_0 = fma(x_k, fma(low_bits(words_0, mask), group.scales_0, group.offsets_0), sums_0)
            sums_1 = fma(x_k, fma(low_bits(words_1, mask), group.scales_1, group.offsets_1), sums_1)
            words_0, words_1 = shift_right(words_0, bits), shift_right(words_1, bits)
            x_at += 1
        at += PANEL
    return sums_0, sums_1


@routine()
def _multiply_row(product, panel, scratch):
    """The same for one row, without writing the weights down."""
    words = pointer(product.codes, np.float32)
    for tile in range(0, product.num_inputs, TILE):
        end = min(tile + TILE, product.num_inputs)
        x_at = tile * _rows_of_block(product)
        sums_0 = sums_1 = splat(_ZERO)
        first, index = tile, tile // product.group_size
        while first < end:
            group, at = _load_group(product, panel, index), _first_word(product, panel, first)
            index += 1
            count = min(index * product.group_size, end) - first
            if product.bits == 4:
                sums_0, sums_1 = _add_group(sums_0, sums_1, words, at, 4, count, group, scratch.x, x_at)
            else:
                sums_0, sums_1 = _add_group(sums_0, sums_1, words, at, 8, count, group, scratch.x, x_at)
            first += count
            x_at += count
        store(scratch.sums_MN, 0, load(scratch.sums_MN, 0) + sums_0)
        store(scratch.sums_MN, LANES, load(scratch.sums_MN, LANES) + sums_1)


@routine()
def _write_out(product, panel, first_row, num_rows, sums_MN):
    out, out_bfloat16 = pointer(product.out, np.float32), pointer(product.out, np.uint16)
    for column in range(0, PANEL, LANES):
        output = panel * PANEL + column
        count = max(0, product.num_outputs - output)
        bias = splat(_ZERO)
        if product.bias != 0:
            bias = load(pointer(product.bias, np.float32), output)
        for row in range(num_rows):
            sums = load(sums_MN, row * PANEL + column) + bias
            target = (first_row + row) * product.num_outputs + output
            if product.out_bytes == 4:
                store_part(out, target, count, sums)
            else:
                store_part(out_bfloat16, target, count, sums)


@routine()
def _multiply(product, panel, first_row, num_rows, scratch):
    """Write the products of a block of rows, which is loaded, with a panel."""
    for column in range(0, _round_up(num_rows, ROWS) * PANEL, LANES):
        store(scratch.sums_MN, column, splat(_ZERO))
    if num_rows == 1:
        _multiply_row(product, panel, scratch)
    else:
        _multiply_rows(product, panel, num_rows, scratch)
    _write_out(product, panel, first_row, num_rows, scratch.sums_MN)


@routine()
def _new_scratch(product):
    rows = _rows_of_block(product)
    return Scratch(
        np.zeros(rows * _round_up(product.num_inputs, TILE), np.float32),
        np.empty(TILE * PANEL, np.float32),
        np.empty(rows * PANEL, np.float32),
    )


@routine()
def num_tasks_of(product, num_threads):
    """Return the number of tasks for `work`, and into how many chunks of panels each block of rows is divided."""
    num_blocks = (product.num_rows + BLOCK - 1) // BLOCK
    num_chunks = 1
    if num_threads > 1:
        num_chunks = min(_num_panels(product), (TASKS_PER_WORKER * num_threads + num_blocks - 1) // num_blocks)
    return num_blocks * num_chunks, num_chunks


@routine()
def work(product, num_tasks, num_chunks, next_task):
    """Take tasks, each a block of rows and a chunk of panels, until none is left."""
    scratch, loaded_row = _new_scratch(product), -1
    num_panels, stride = _num_panels(product), _rows_of_block(product)
    while True:
        task = fetch_add(next_task, 1)
        if task >= num_tasks:
            return
        first_row, chunk = task // num_chunks * stride, task % num_chunks
        num_rows = min(stride, product.num_rows - first_row)
        if first_row != loaded_row:
            _load_rows(product, first_row, num_rows, scratch)
            loaded_row = first_row
        for panel in range(num_panels * chunk // num_chunks, num_panels * (chunk + 1) // num_chunks):
            _multiply(product, panel, first_row, num_rows, scratch)


@routine(parallel=True)
def _work_in_parallel(product, num_tasks, num_chunks, next_task, num_workers):
    for _ in prange(num_workers):
        work(product, num_tasks, num_chunks, next_task)


@kernel()
def linear(addresses, sizes, num_threads):
    """Compute the product that `addresses` and `sizes` describe in the order of `Product`'s fields."""
    product = Product(*(addresses + sizes))
    num_products = product.num_rows * product.num_outputs * product.num_inputs
    num_workers = num_threads if num_products >= LEAST_PARALLEL_WORK else 1
    num_tasks, num_chunks = num_tasks_of(product, num_workers)
    next_task = np.zeros(1, np.int64)
    if num_workers > 1:
        _work_in_parallel(product, num_tasks, num_chunks, next_task, num_workers)
    else:
        work(product, num_tasks, num_chunks, next_task)


@routine()
def _dequantize_row(product, output, row_K):
    """Fill row_K with the weights of one output."""
    per_word, mask = 32 // product.bits, (1 << product.bits) - 1
    words = pointer(product.codes, np.uint32)
    panel, column = output // PANEL, output % PANEL
    for index in range(product.num_inputs // product.group_size):
        group = _load_group(product, panel, index)
        scales = group.scales_0 if column < LANES else group.scales_1
        offsets = group.offsets_0 if column < LANES else group.offsets_1
        scale, offset = splat(lane(scales, column % LANES)), splat(lane(offsets, column % LANES))
        for k in range(index * product.group_size, (index + 1) * product.group_size):
            word = words[_first_word(product, panel, k) + column]
            code = (word >> (k % per_word * product.bits)) & mask
            row_K[k] = lane(fma(splat(np.float32(code)), scale, offset), 0)


@kernel()
def embedding(addresses, sizes, token_ids_T):
    """Write the weights of the outputs `token_ids_T`, a row each."""
    product = Product(*(addresses + sizes))
    out, out_bfloat16 = pointer(product.out, np.float32), pointer(product.out, np.uint16)
    row_K = np.empty(product.num_inputs, np.float32)
    for token in range(len(token_ids_T)):
        _dequantize_row(product, token_ids_T[token], row_K)
        for k in range(0, product.num_inputs, LANES):
            target = token * product.num_inputs + k
            if product.out_bytes == 4:
                store(out, target, load(row_K, k))
            else:
                store(out_bfloat16, target, load(row_K, k))
