# Numba infers the types.
# mypy: allow-untyped-defs, allow-untyped-calls
"""Products of rows with a panel of bfloat16 numbers (see `kernels.cpu.panels`)."""

import numpy as np

from octavo.kernels.cpu.jit import routine
from octavo.kernels.cpu.lanes import LANES
from octavo.kernels.cpu.memory import load, load_splat, pointer, prefetch, store
from octavo.kernels.cpu.multiply_add import add_products
from octavo.kernels.cpu.multiply_add import products_bfloat16 as add_pairs
from octavo.kernels.cpu.panels import (
    AHEAD,
    AHEAD_OF_ROW,
    CACHE_LINE,
    FLOAT_ROWS,
    PANEL,
    ROWS,
    TILE,
    add_to_sums,
    first_operand,
    first_word,
    floats,
    place_of_x,
    round_up,
    second_operand,
)
from octavo.kernels.cpu.simd import fma, shift_left_i32, splat, upper_halves, zeros

FEW = 16  # rows, for which operands are not worth writing down
PAIRED = FLOAT_ROWS * 2 // 3  # rows beyond whole FLOAT_ROWS that are faster done in pairs

_ZERO = np.float32(0.0)


@routine()
def _load_operands(product, panel, first, end, scratch):
    """Fill scratch.operands with a panel's of inputs first to end, of bfloat16 weights."""
    words, operands = pointer(product.codes, np.float32), floats(scratch.operands)
    at = first_word(product, panel, first)
    for target in range(0, (end - first + 1) // 2 * 2 * PANEL, 2 * PANEL):
        for column in range(0, PANEL, LANES):
            codes = load(words, at + column)
            store(operands, target + column, first_operand(codes, 16))
            store(operands, target + PANEL + column, second_operand(codes, 16))
        at += PANEL


@routine()
def _multiply_float_group(scratch, x_at, num_words, row):
    """Add the products of FLOAT_ROWS rows with a tile's operands to their sums."""
    for column in range(0, PANEL, LANES):
        sums = zeros(FLOAT_ROWS)
        for word in range(num_words):
            operand = load(floats(scratch.operands), word * PANEL + column)
            sums = add_products(sums, floats(scratch.x), x_at + word, TILE, operand)
        for r in range(FLOAT_ROWS):
            add_to_sums(sums[r], (row + r) * PANEL + column, scratch)


@routine()
def _multiply_pair(scratch, x_at, num_words, row):
    """The same for two rows."""
    sums_0, sums_1 = zeros(2), zeros(2)
    for word in range(num_words):
        operand_0 = load(floats(scratch.operands), word * PANEL)
        operand_1 = load(floats(scratch.operands), word * PANEL + LANES)
        sums_0 = add_products(sums_0, floats(scratch.x), x_at + word, TILE, operand_0)
        sums_1 = add_products(sums_1, floats(scratch.x), x_at + word, TILE, operand_1)
    for r in range(2):
        add_to_sums(sums_0[r], (row + r) * PANEL, scratch)
        add_to_sums(sums_1[r], (row + r) * PANEL + LANES, scratch)


@routine(forceinline=True)
def _fetch(product, at, row, num_rows):
    """Prefetch a part of the tile whose words begin at `at`: as large a part as the next rows are of all rows."""
    words, num_words = pointer(product.codes, np.float32), TILE // 2 * PANEL
    first, end = num_words * row // num_rows, num_words * min(row + FLOAT_ROWS, num_rows) // num_rows
    for word in range(first, end, CACHE_LINE):
        prefetch(words, at + word)


@routine(forceinline=True)
def _rows_in_groups(num_rows):
    """Return how many rows are done FLOAT_ROWS at a time; the other rows are done in pairs."""
    return (num_rows + FLOAT_ROWS - 1 - PAIRED) // FLOAT_ROWS * FLOAT_ROWS


@routine()
def _multiply_tile_of_many(product, first, end, num_rows, next_at, scratch):
    """Add the products of a block's rows with a tile's operands to their sums; ask memory for what is at next_at."""
    in_groups = _rows_in_groups(num_rows)
    num_words = round_up(end - first, 2)  # an odd last input is followed by a zero
    for row in range(0, in_groups, FLOAT_ROWS):
        _fetch(product, next_at, row, num_rows)
        _multiply_float_group(scratch, place_of_x(product, row, first, scratch), num_words, row)
    for row in range(in_groups, num_rows, 2):
        _multiply_pair(scratch, place_of_x(product, row, first, scratch), num_words, row)


@routine(forceinline=True)
def _add_word(sums, words, at, x_low, x_high):
    """Return the sums of 16 outputs, with the products of two inputs added."""
    codes = load(words, at)
    prefetch(words, at + AHEAD_OF_ROW)
    return fma(x_high, second_operand(codes, 16), fma(x_low, first_operand(codes, 16), sums))


@routine()
def _multiply_row_widened(product, panels, scratch):
    """Add the products of the only row with two panels to the sums of two rows, without writing operands down."""
    words, x = pointer(product.codes, np.float32), floats(scratch.x)
    for first in range(0, product.num_inputs, TILE):
        x_at = place_of_x(product, 0, first, scratch)
        at, other_at = first_word(product, panels[0], first), first_word(product, panels[1], first)
        sums_0 = sums_1 = other_sums_0 = other_sums_1 = splat(_ZERO)
        for _ in range(first, min(first + TILE, product.num_inputs), 2):
            x_low, x_high = load_splat(x, x_at), load_splat(x, x_at + 1)
            sums_0 = _add_word(sums_0, words, at, x_low, x_high)
            sums_1 = _add_word(sums_1, words, at + LANES, x_low, x_high)
            other_sums_0 = _add_word(other_sums_0, words, other_at, x_low, x_high)
            other_sums_1 = _add_word(other_sums_1, words, other_at + LANES, x_low, x_high)
            x_at, at, other_at = x_at + 2, at + PANEL, other_at + PANEL
        add_to_sums(sums_0, 0, scratch)
        add_to_sums(sums_1, LANES, scratch)
        add_to_sums(other_sums_0, PANEL, scratch)
        add_to_sums(other_sums_1, PANEL + LANES, scratch)


@routine()
def _multiply_few_group(product, first, end, first_at, row, scratch):
    """Add the products of FLOAT_ROWS rows with a tile, whose codes begin at `first_at`, to their sums."""
    words, x = pointer(product.codes, np.float32), floats(scratch.x)
    for column in range(0, PANEL, LANES):
        at, x_at, sums = first_at + column, place_of_x(product, row, first, scratch), zeros(FLOAT_ROWS)
        shift = 16  # one operand at a time: with both, sums would not stay in registers
        for _ in range(first, round_up(end, 2)):
            operand = upper_halves(shift_left_i32(load(words, at), shift))
            prefetch(words, at + AHEAD)
            sums = add_products(sums, x, x_at, TILE, operand)
            x_at, at, shift = x_at + 1, at + (16 - shift) // 16 * PANEL, 16 - shift
        for r in range(FLOAT_ROWS):
            add_to_sums(sums[r], (row + r) * PANEL + column, scratch)


@routine()
def _multiply_few_pair(product, first, end, at, row, scratch):
    """The same for two rows."""
    words, x, x_at = pointer(product.codes, np.float32), floats(scratch.x), place_of_x(product, row, first, scratch)
    sums_0, sums_1 = zeros(2), zeros(2)
    for _ in range(first, end, 2):
        codes_0, codes_1 = load(words, at), load(words, at + LANES)
        prefetch(words, at + AHEAD)
        prefetch(words, at + AHEAD + LANES)
        sums_0 = add_products(sums_0, x, x_at, TILE, first_operand(codes_0, 16))
        sums_1 = add_products(sums_1, x, x_at, TILE, first_operand(codes_1, 16))
        sums_0 = add_products(sums_0, x, x_at + 1, TILE, second_operand(codes_0, 16))
        sums_1 = add_products(sums_1, x, x_at + 1, TILE, second_operand(codes_1, 16))
        x_at, at = x_at + 2, at + PANEL
    for r in range(2):
        add_to_sums(sums_0[r], (row + r) * PANEL, scratch)
        add_to_sums(sums_1[r], (row + r) * PANEL + LANES, scratch)


@routine()
def _multiply_few(product, panel, num_rows, scratch):
    """Add the products of few rows with a panel to their sums, without writing operands down."""
    in_groups = _rows_in_groups(num_rows)
    for first in range(0, product.num_inputs, TILE):
        at, end = first_word(product, panel, first), min(first + TILE, product.num_inputs)
        for row in range(0, in_groups, FLOAT_ROWS):
            _multiply_few_group(product, first, end, at, row, scratch)
        for row in range(in_groups, num_rows, 2):
            _multiply_few_pair(product, first, end, at, row, scratch)


def _tile_of(num_rows, ahead):
    """Return a routine that multiplies this number of rows in pairs."""

    @routine(forceinline=True)
    def multiply_tile(product, at, first, end, row, target, scratch):
        """Add products of rows from `row` on with inputs first to end, of one tile, whose codes begin at `at`."""
        words, x, sums = pointer(product.codes, np.float32), floats(scratch.x), zeros(num_rows)
        x_at = place_of_x(product, row, first, scratch)
        for _ in range(first, end, 2):
            codes = load(words, at)
            prefetch(words, at + ahead)
            sums = add_pairs(sums, x, x_at, scratch.row_words, codes)
            x_at, at = x_at + 1, at + PANEL
        for r in range(num_rows):
            add_to_sums(sums[r], target + r * PANEL, scratch)

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
def multiply_floats(product, panel, num_rows, scratch):
    """Add the products of a block's rows with a panel to their sums."""
    if product.in_pairs:
        _multiply_in_pairs(product, panel, num_rows, scratch)
    elif num_rows <= FEW:
        _multiply_few(product, panel, num_rows, scratch)
    else:
        for first in range(0, product.num_inputs, TILE):
            end = min(first + TILE, product.num_inputs)
            _load_operands(product, panel, first, end, scratch)
            _multiply_tile_of_many(product, first, end, num_rows, first_word(product, panel, end), scratch)


@routine()
def multiply_float_row(product, panels, scratch):
    """Add the products of the only row with two panels to the sums of two rows."""
    if product.in_pairs:
        _multiply_row_in_pairs(product, panels, scratch)
    else:
        _multiply_row_widened(product, panels, scratch)
