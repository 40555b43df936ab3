# Numba infers the types.
# mypy: allow-untyped-defs, allow-untyped-calls
"""Weights of 4, 8 or 16 bits in panels, and the product of some rows with one panel.

Outputs lie in panels of 32, as two vectors. A panel has words of 32 bits: one for each 8, 4 or 2 inputs and each
output, the first input's code lowest. For each group of inputs there are 32 scales and, if there are any, 32 offsets;
codes of 16 bits are bfloat16 numbers and have neither.

Of each word two operands are made, of every other input each: 4 bytes, 2 numbers of 16 bits, or 1 float32. The inputs
of a row are brought to the same order and kind. Those that meet codes of 4 bits are rounded to 8 bits (as in
llama.cpp's Q8_1), those that meet 8 bits to 16: a chunk of 32 inputs (16, where groups ask for it) has one factor. The
products of a chunk are then added up in integers, exactly.

One output of one row is always the same sequence of operations. Of integers: a chunk's sum, times the row's factor,
times the scale, added to the chunks before with a fused multiply-add; then the sum of the row's inputs times the offset
likewise. Of bfloat16: a tile of inputs is a chain of fused multiply-adds from zero, and the tiles are added up; where
the processor multiplies pairs of such numbers, the chain is of those. How
many rows there are decides only where the operands stand meanwhile: in registers, made anew for every few rows, or,
of bfloat16 and many rows, in a tile that stays in the first cache while all rows of a block pass by.

M rows, N outputs, K inputs.
"""

from typing import Any, NamedTuple

import numpy as np

from kernels.cpu.jit import routine
from kernels.cpu.lanes import LANES, REGISTER_LANES
from kernels.cpu.memory import (
    load,
    load_half,
    load_part,
    load_splat,
    pointer,
    prefetch,
    store,
    store_low_i8,
    store_low_i16,
)
from kernels.cpu.multiply_add import (
    add_products,
    add_scaled,
    products_bfloat16,
    products_i8,
    products_i16,
)
from kernels.cpu.simd import (
    and_i32,
    copy_sign,
    fma,
    largest_lane,
    maximum,
    shift_left_i32,
    shift_right_i32,
    splat,
    sum_of_lanes,
    upper_halves,
    zeros,
)

PANEL = 2 * LANES  # outputs
TILE = 128  # inputs: a panel's operands of float32 take 16 KiB of the first cache
CACHE_LINE = 16  # float32
BLOCK = 96  # rows at most, whose tile of inputs stays in the second cache
ROWS = 8 if REGISTER_LANES == LANES else 4  # at once, where operands are made in registers: 8 of these have sums
FLOAT_ROWS = 12 if REGISTER_LANES == LANES else 6  # at once, where they were written down
FEW = 16  # rows of floats, for which operands are not worth writing down
PAIRED = 4  # rows of floats beyond whole FLOAT_ROWS that are faster done in pairs
AHEAD = 64 * PANEL  # words: how far from what is multiplied memory is asked for what follows
AHEAD_OF_ROW = 8 * PANEL  # of a single row, where two parts of memory are read at once

_add_pairs = products_bfloat16
_ZERO, _ONE = np.float32(0.0), np.float32(1.0)
_LEAST = np.float32(1e-30)  # less is taken for zero: what brings it to whole numbers would be infinite
_ROUND_MAGIC = np.float32(1.5 * 2**23)  # adding it rounds to a whole number, which then stands in the low bits


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
    in_pairs: int  # 1: bfloat16 inputs and weights are multiplied in pairs, as the words that they are


class Group(NamedTuple):
    """What makes weights of the codes of 16 outputs in one group of inputs: vectors."""

    scales: Any
    offsets: Any


class Scratch(NamedTuple):
    """One thread's memory: sizes, and addresses of float32 (an array would be counted at every call).

    A block of rows lies tile by tile: the tile's inputs of the first row, of the second, ...
    """

    chunk: int  # inputs; a divisor of the group
    chunk_shift: int  # what divides by it: a division takes as long as ten products
    num_chunks: int
    num_groups: int
    row_words: int  # of x, in one tile and row
    tile_words: int  # of x, in one tile of all rows of a block
    x: int  # words of 32 bits
    factors_MC: int  # of each row and chunk
    x_sums_MC: int  # of the inputs of each chunk
    operands: int  # of one tile and panel: an operand of each output for each word of x
    sums_MN: int  # of one block and panel


@routine()
def round_up(value, multiple):
    return (value + multiple - 1) // multiple * multiple


@routine()
def num_panels(product):
    return (product.num_outputs + PANEL - 1) // PANEL


@routine()
def rows_at_once(product):
    return FLOAT_ROWS if product.bits == 16 and not product.in_pairs else ROWS


@routine()
def rows_of_block(product):
    num_blocks = (product.num_rows + BLOCK - 1) // BLOCK
    return round_up((product.num_rows + num_blocks - 1) // num_blocks, rows_at_once(product))


@routine()
def padded_rows(product, num_rows):
    """Return how many rows have to have room where `num_rows` are multiplied: the last ones are done with others."""
    return round_up(round_up(num_rows, rows_at_once(product)), ROWS)


@routine(forceinline=True)
def _x_words(product, num_inputs):
    """Return how many words of x hold `num_inputs` of one row."""
    return num_inputs // 2 if product.in_pairs else num_inputs * product.bits // 16


@routine()
def new_scratch(product):
    """Return a Scratch for blocks of the product, and the array that it lies in: to be kept as long."""
    rows, num_tiles = padded_rows(product, rows_of_block(product)), (product.num_inputs + TILE - 1) // TILE
    chunk_shift = 5 if product.group_size % 32 == 0 else 4
    chunk = 1 << chunk_shift
    num_chunks = 0 if product.bits == 16 else product.num_inputs // chunk
    num_groups = 0 if product.bits == 16 else product.num_inputs // product.group_size
    row_words = _x_words(product, TILE)
    sizes = (num_tiles * rows * row_words, rows * num_chunks, rows * num_chunks, row_words * PANEL, rows * PANEL)
    memory = np.zeros(sizes[0] + sizes[1] + sizes[2] + sizes[3] + sizes[4] + CACHE_LINE, np.float32)
    x = round_up(memory.ctypes.data, 4 * CACHE_LINE)
    operands = x + 4 * sizes[0]
    sums_MN = operands + 4 * sizes[3]
    factors_MC = sums_MN + 4 * sizes[4]
    x_sums_MC = factors_MC + 4 * sizes[1]
    scratch = Scratch(
        *(chunk, chunk_shift, num_chunks, num_groups, row_words, rows * row_words),
        *(x, factors_MC, x_sums_MC, operands, sums_MN),
    )
    return scratch, memory


@routine(forceinline=True)
def _floats(address):
    return pointer(address, np.float32)


# The inputs.


@routine(forceinline=True)
def _load_x(product, index, count):
    if product.x_bytes == 4:
        return load_part(pointer(product.x, np.float32), index, count)
    return load_part(pointer(product.x, np.uint16), index, count)


@routine(forceinline=True)
def _x_at(product, row, k, scratch):
    """Return where in scratch.x the word of input k of a block's row is."""
    return k // TILE * scratch.tile_words + row * scratch.row_words + _x_words(product, k % TILE)


@routine(forceinline=True)
def _store_rounded(product, lanes, inverse, at, scratch):
    """Write 16 inputs times `inverse` as whole numbers, which are returned. A NaN becomes some number."""
    shifted = fma(lanes, inverse, splat(_ROUND_MAGIC))
    if product.bits == 4:
        store_low_i8(_floats(scratch.x), at, shifted)
    else:
        store_low_i16(_floats(scratch.x), at, shifted)
    return shifted - splat(_ROUND_MAGIC)


@routine()
def _load_rounded_row(product, source, row, scratch):
    """Write a row of inputs, rounded chunk by chunk. A row that is not finite has a factor of NaN."""
    chunk, largest = scratch.chunk, np.float32(127.0) if product.bits == 4 else np.float32(32767.0)
    first = row * scratch.num_chunks
    at, nan_or_zero = first, splat(_ZERO)
    for k in range(0, product.num_inputs, chunk):
        low, high = _load_x(product, source + k, LANES), splat(_ZERO)
        if chunk == 32:
            high = _load_x(product, source + k + LANES, LANES)
        size = largest_lane(maximum(copy_sign(low, splat(_ONE)), copy_sign(high, splat(_ONE))))
        nan_or_zero = fma(low, splat(_ZERO), fma(high, splat(_ZERO), nan_or_zero))
        inverse = splat(largest / size if size > _LEAST else _ZERO)
        rounded = _store_rounded(product, low, inverse, _x_at(product, row, k, scratch), scratch)
        if chunk == 32:
            rounded = rounded + _store_rounded(product, high, inverse, _x_at(product, row, k + LANES, scratch), scratch)
        factor = size / largest
        _floats(scratch.factors_MC)[at] = factor
        _floats(scratch.x_sums_MC)[at] = factor * sum_of_lanes(rounded)
        at += 1
    _floats(scratch.factors_MC)[first] += sum_of_lanes(nan_or_zero)


@routine()
def _copy_row(product, source, row, scratch):
    """Write a row of bfloat16 inputs as it is. An odd last one is followed by a zero."""
    x, target = pointer(product.x, np.uint16), pointer(scratch.x, np.uint16)
    for first in range(0, product.num_inputs, TILE):
        at = 2 * _x_at(product, row, first, scratch)
        for k in range(first, min(first + TILE, product.num_inputs)):
            target[at + k - first] = x[source + k]


@routine()
def _widen_row(product, source, row, scratch):
    """Write a row of inputs as float32."""
    for k in range(0, product.num_inputs, LANES):
        lanes = _load_x(product, source + k, product.num_inputs - k)
        store(_floats(scratch.x), _x_at(product, row, k, scratch), lanes)


@routine()
def load_rows(product, first_row, num_rows, scratch):
    """Fill scratch with the inputs of rows first_row to first_row + num_rows."""
    for row in range(num_rows):
        source = (first_row + row) * product.num_inputs
        if product.in_pairs:
            _copy_row(product, source, row, scratch)
        elif product.bits == 16:
            _widen_row(product, source, row, scratch)
        else:
            _load_rounded_row(product, source, row, scratch)


# The weights.


@routine(forceinline=True)
def _load_floats(address, num_bytes, index):
    if num_bytes == 2:
        return load_half(pointer(address, np.uint16), index)
    return load(pointer(address, np.float32), index)


@routine(forceinline=True)
def load_group(product, panel, num_groups, group, column):
    at = (panel * num_groups + group) * PANEL + column
    scales = _load_floats(product.scales, product.scale_bytes, at)
    if product.offsets == 0:
        return Group(scales, scales * splat(np.float32(-(1 << (product.bits - 1)))))
    return Group(scales, _load_floats(product.offsets, product.offset_bytes, at))


@routine(forceinline=True)
def first_word(product, panel, k):
    words_of_output = (product.num_inputs * product.bits + 31) // 32
    return (panel * words_of_output + k * product.bits // 32) * PANEL


@routine()
def fetch(product, panel):
    """Ask memory for the beginning of a panel: it comes while something else is done."""
    words, at = pointer(product.codes, np.float32), first_word(product, panel, 0)
    for word in range(0, AHEAD_OF_ROW, CACHE_LINE):
        prefetch(words, at + word)


@routine(forceinline=True)
def _first_operand(words, bits):
    if bits == 16:
        return shift_left_i32(words, 16)
    return and_i32(words, 0x0F0F0F0F if bits == 4 else 0x00FF00FF)


@routine(forceinline=True)
def _second_operand(words, bits):
    if bits == 16:
        return upper_halves(words)
    return and_i32(shift_right_i32(words, bits), 0x0F0F0F0F if bits == 4 else 0x00FF00FF)


@routine()
def _load_operands(product, panel, first, end, scratch):
    """Fill scratch.operands with a panel's of inputs first to end, of bfloat16 weights."""
    words, operands = pointer(product.codes, np.float32), _floats(scratch.operands)
    at = first_word(product, panel, first)
    for target in range(0, (end - first + 1) // 2 * 2 * PANEL, 2 * PANEL):
        for column in range(0, PANEL, LANES):
            codes = load(words, at + column)
            store(operands, target + column, _first_operand(codes, 16))
            store(operands, target + PANEL + column, _second_operand(codes, 16))
        at += PANEL


# Products of integers.


@routine(forceinline=True)
def _add_chunk(sums, group, chunk, row, target, scratch):
    """Add one chunk's sums of some rows, which begin with `row`, to scratch.sums_MN from `target` on."""
    add_scaled(
        sums,
        *(
            _floats(scratch.factors_MC),
            _floats(scratch.x_sums_MC),
            row * scratch.num_chunks + chunk,
            scratch.num_chunks,
        ),
        *(group.scales, group.offsets),
        *(_floats(scratch.sums_MN), target, PANEL),
    )


def _group_of(bits, num_rows, ahead):
    """Return a routine that multiplies codes with so many rows: sums for each of them are what registers are for."""
    products = {4: products_i8, 8: products_i16}[bits]
    add, total, inputs_of_word = products.add, products.total, 32 // bits

    @routine(forceinline=True)
    def multiply_group(product, group, at, first, end, row, target, scratch):
        """Add products with inputs first to end, of one group and tile, whose codes begin at `at`.

        Those of rows from `row` on are added to scratch.sums_MN from `target` on.
        """
        words, x, x_at = pointer(product.codes, np.float32), _floats(scratch.x), _x_at(product, row, first, scratch)
        stride, chunk = scratch.row_words, first >> scratch.chunk_shift
        for _ in range(first, end, scratch.chunk):
            sums = zeros(num_rows)
            for _ in range(0, scratch.chunk, inputs_of_word):
                codes = load(words, at)
                prefetch(words, at + ahead)
                sums = add(sums, x, x_at, stride, _first_operand(codes, bits))
                sums = add(sums, x, x_at + 1, stride, _second_operand(codes, bits))
                x_at, at = x_at + 2, at + PANEL
            _add_chunk(total(sums), group, chunk, row, target, scratch)
            chunk += 1

    return multiply_group


_multiply_group_4, _multiply_group_8 = _group_of(4, ROWS, AHEAD), _group_of(8, ROWS, AHEAD)
_multiply_row_4, _multiply_row_8 = _group_of(4, 1, AHEAD_OF_ROW), _group_of(8, 1, AHEAD_OF_ROW)


@routine(forceinline=True)
def _end_of_run(product, group, first):
    """Return where inputs end that are of one group and one tile: a row's lie side by side within a tile only."""
    return min(first // TILE * TILE + TILE, (group + 1) * product.group_size)


@routine()
def _multiply_rounded(product, panel, num_rows, scratch):
    """Add the products of a block's rows with a panel to their sums."""
    first = 0
    while first < product.num_inputs:
        index = first // product.group_size
        at, end = first_word(product, panel, first), _end_of_run(product, index, first)
        for column in range(0, PANEL, LANES):
            group = load_group(product, panel, scratch.num_groups, index, column)
            for row in range(0, num_rows, ROWS):
                target = row * PANEL + column
                if product.bits == 4:
                    _multiply_group_4(product, group, at + column, first, end, row, target, scratch)
                else:
                    _multiply_group_8(product, group, at + column, first, end, row, target, scratch)
        first = end


@routine()
def _multiply_rounded_row(product, panels, scratch):
    """Add the products of the only row with some panels to the sums of as many rows."""
    first = 0
    while first < product.num_inputs:
        index = first // product.group_size
        end = _end_of_run(product, index, first)
        for number, panel in enumerate(panels):
            at = first_word(product, panel, first)
            for column in range(0, PANEL, LANES):
                group, target = load_group(product, panel, scratch.num_groups, index, column), number * PANEL + column
                if product.bits == 4:
                    _multiply_row_4(product, group, at + column, first, end, 0, target, scratch)
                else:
                    _multiply_row_8(product, group, at + column, first, end, 0, target, scratch)
        first = end


# Products of floats.


@routine(forceinline=True)
def _add_to_sums(total, target, scratch):
    store(_floats(scratch.sums_MN), target, load(_floats(scratch.sums_MN), target) + total)


@routine()
def _multiply_float_group(scratch, x_at, num_words, row):
    """Add the products of FLOAT_ROWS rows with a tile's operands to their sums."""
    for column in range(0, PANEL, LANES):
        sums = zeros(FLOAT_ROWS)
        for word in range(num_words):
            operand = load(_floats(scratch.operands), word * PANEL + column)
            sums = add_products(sums, _floats(scratch.x), x_at + word, TILE, operand)
        for r in range(FLOAT_ROWS):
            _add_to_sums(sums[r], (row + r) * PANEL + column, scratch)


@routine()
def _multiply_pair(scratch, x_at, num_words, row):
    """The same for two rows."""
    sums_0, sums_1 = zeros(2), zeros(2)
    for word in range(num_words):
        operand_0 = load(_floats(scratch.operands), word * PANEL)
        operand_1 = load(_floats(scratch.operands), word * PANEL + LANES)
        sums_0 = add_products(sums_0, _floats(scratch.x), x_at + word, TILE, operand_0)
        sums_1 = add_products(sums_1, _floats(scratch.x), x_at + word, TILE, operand_1)
    for r in range(2):
        _add_to_sums(sums_0[r], (row + r) * PANEL, scratch)
        _add_to_sums(sums_1[r], (row + r) * PANEL + LANES, scratch)


@routine(forceinline=True)
def _fetch(product, at, row, num_rows):
    """Bring near, of the tile whose words begin at `at`, as large a part as the next rows are of all."""
    words, num_words = pointer(product.codes, np.float32), TILE // 2 * PANEL
    first, end = num_words * row // num_rows, num_words * min(row + FLOAT_ROWS, num_rows) // num_rows
    for word in range(first, end, CACHE_LINE):
        prefetch(words, at + word)


@routine(forceinline=True)
def _rows_in_groups(num_rows):
    """Return how many rows are done FLOAT_ROWS at a time; what is left is done in pairs."""
    return (num_rows + FLOAT_ROWS - 1 - PAIRED) // FLOAT_ROWS * FLOAT_ROWS


@routine()
def _multiply_floats(product, first, end, num_rows, next_at, scratch):
    """Add the products of a block's rows with a tile's operands to their sums; ask memory for what is at next_at."""
    in_groups = _rows_in_groups(num_rows)
    num_words = round_up(end - first, 2)  # an odd last input is followed by a zero
    for row in range(0, in_groups, FLOAT_ROWS):
        _fetch(product, next_at, row, num_rows)
        _multiply_float_group(scratch, _x_at(product, row, first, scratch), num_words, row)
    for row in range(in_groups, num_rows, 2):
        _multiply_pair(scratch, _x_at(product, row, first, scratch), num_words, row)


@routine(forceinline=True)
def _add_word(sums, words, at, x_low, x_high):
    """Return the sums of 16 outputs, with the products of two inputs added."""
    codes = load(words, at)
    prefetch(words, at + AHEAD_OF_ROW)
    return fma(x_high, _second_operand(codes, 16), fma(x_low, _first_operand(codes, 16), sums))


@routine()
def _multiply_float_row(product, panels, scratch):
    """Add the products of the only row with two panels to the sums of two rows, without writing operands down."""
    words, x = pointer(product.codes, np.float32), _floats(scratch.x)
    for first in range(0, product.num_inputs, TILE):
        x_at = _x_at(product, 0, first, scratch)
        at, other_at = first_word(product, panels[0], first), first_word(product, panels[1], first)
        sums_0 = sums_1 = other_sums_0 = other_sums_1 = splat(_ZERO)
        for _ in range(first, min(first + TILE, product.num_inputs), 2):
            x_low, x_high = load_splat(x, x_at), load_splat(x, x_at + 1)
            sums_0 = _add_word(sums_0, words, at, x_low, x_high)
            sums_1 = _add_word(sums_1, words, at + LANES, x_low, x_high)
            other_sums_0 = _add_word(other_sums_0, words, other_at, x_low, x_high)
            other_sums_1 = _add_word(other_sums_1, words, other_at + LANES, x_low, x_high)
            x_at, at, other_at = x_at + 2, at + PANEL, other_at + PANEL
        _add_to_sums(sums_0, 0, scratch)
        _add_to_sums(sums_1, LANES, scratch)
        _add_to_sums(other_sums_0, PANEL, scratch)
        _add_to_sums(other_sums_1, PANEL + LANES, scratch)


@routine()
def _multiply_few_group(product, first, end, first_at, row, scratch):
    """Add the products of FLOAT_ROWS rows with a tile, whose codes begin at `first_at`, to their sums."""
    words, x = pointer(product.codes, np.float32), _floats(scratch.x)
    for column in range(0, PANEL, LANES):
        at, x_at, sums = first_at + column, _x_at(product, row, first, scratch), zeros(FLOAT_ROWS)
        shift = 16  # one operand at a time: with both, sums would not stay in registers
        for _ in range(first, round_up(end, 2)):
            operand = upper_halves(shift_left_i32(load(words, at), shift))
            prefetch(words, at + AHEAD)
            sums = add_products(sums, x, x_at, TILE, operand)
            x_at, at, shift = x_at + 1, at + (16 - shift) // 16 * PANEL, 16 - shift
        for r in range(FLOAT_ROWS):
            _add_to_sums(sums[r], (row + r) * PANEL + column, scratch)


@routine()
def _multiply_few_pair(product, first, end, at, row, scratch):
    """The same for two rows."""
    words, x, x_at = pointer(product.codes, np.float32), _floats(scratch.x), _x_at(product, row, first, scratch)
    sums_0, sums_1 = zeros(2), zeros(2)
    for _ in range(first, end, 2):
        codes_0, codes_1 = load(words, at), load(words, at + LANES)
        prefetch(words, at + AHEAD)
        prefetch(words, at + AHEAD + LANES)
        sums_0 = add_products(sums_0, x, x_at, TILE, _first_operand(codes_0, 16))
        sums_1 = add_products(sums_1, x, x_at, TILE, _first_operand(codes_1, 16))
        sums_0 = add_products(sums_0, x, x_at + 1, TILE, _second_operand(codes_0, 16))
        sums_1 = add_products(sums_1, x, x_at + 1, TILE, _second_operand(codes_1, 16))
        x_at, at = x_at + 2, at + PANEL
    for r in range(2):
        _add_to_sums(sums_0[r], (row + r) * PANEL, scratch)
        _add_to_sums(sums_1[r], (row + r) * PANEL + LANES, scratch)


@routine()
def _multiply_few_floats(product, panel, num_rows, scratch):
    """Add the products of few rows with a panel to their sums, without writing operands down."""
    in_groups = _rows_in_groups(num_rows)
    for first in range(0, product.num_inputs, TILE):
        at, end = first_word(product, panel, first), min(first + TILE, product.num_inputs)
        for row in range(0, in_groups, FLOAT_ROWS):
            _multiply_few_group(product, first, end, at, row, scratch)
        for row in range(in_groups, num_rows, 2):
            _multiply_few_pair(product, first, end, at, row, scratch)


def _tile_of(num_rows, ahead):
    """Return a routine that multiplies so many rows in pairs."""

    @routine(forceinline=True)
    def multiply_tile(product, at, first, end, row, target, scratch):
        """Add products of rows from `row` on with inputs first to end, of one tile, whose codes begin at `at`."""
        words, x, sums = pointer(product.codes, np.float32), _floats(scratch.x), zeros(num_rows)
        x_at = _x_at(product, row, first, scratch)
        for _ in range(first, end, 2):
            codes = load(words, at)
            prefetch(words, at + ahead)
            sums = _add_pairs(sums, x, x_at, scratch.row_words, codes)
            x_at, at = x_at + 1, at + PANEL
        for r in range(num_rows):
            _add_to_sums(sums[r], target + r * PANEL, scratch)

    return multiply_tile


_multiply_tile_of_row, _multiply_tile = _tile_of(1, AHEAD_OF_ROW), _tile_of(ROWS, AHEAD)


@routine()
def _multiply_in_pairs(product, panel, num_rows, scratch):
    """Add the products of a block's rows with a panel to their sums."""
    for first in range(0, product.num_inputs, TILE):
        at, end = first_word(product, panel, first), min(first + TILE, product.num_inputs)
        for column in range(0, PANEL, LANES):
            for row in range(0, num_rows, ROWS):
                _multiply_tile(product, at + column, first, end, row, row * PANEL + column, scratch)


@routine()
def _multiply_row_in_pairs(product, panels, scratch):
    """Add the products of the only row with some panels to the sums of as many rows."""
    for first in range(0, product.num_inputs, TILE):
        end = min(first + TILE, product.num_inputs)
        for number, panel in enumerate(panels):
            at = first_word(product, panel, first)
            for column in range(0, PANEL, LANES):
                _multiply_tile_of_row(product, at + column, first, end, 0, number * PANEL + column, scratch)


@routine()
def _clear_sums(num_rows, scratch):
    for at in range(0, num_rows * PANEL, LANES):
        store(_floats(scratch.sums_MN), at, splat(_ZERO))


@routine()
def multiply_row(product, panels, scratch):
    """Fill the first two rows of scratch.sums_MN with the products of the only row, which is loaded, with two panels.

    Two parts of memory that are read at once come faster than one: a core's prefetcher follows each of them.
    """
    _clear_sums(2, scratch)
    if product.bits < 16:
        _multiply_rounded_row(product, panels, scratch)
    elif product.in_pairs:
        _multiply_row_in_pairs(product, panels, scratch)
    else:
        _multiply_float_row(product, panels, scratch)


@routine()
def multiply(product, panel, num_rows, scratch):
    """Fill scratch.sums_MN with the products of a block of several rows, which is loaded, with a panel."""
    _clear_sums(padded_rows(product, num_rows), scratch)
    if product.bits < 16:
        _multiply_rounded(product, panel, num_rows, scratch)
    elif product.in_pairs:
        _multiply_in_pairs(product, panel, num_rows, scratch)
    elif num_rows <= FEW:
        _multiply_few_floats(product, panel, num_rows, scratch)
    else:
        for first in range(0, product.num_inputs, TILE):
            end = min(first + TILE, product.num_inputs)
            _load_operands(product, panel, first, end, scratch)
            _multiply_floats(product, first, end, num_rows, first_word(product, panel, end), scratch)
