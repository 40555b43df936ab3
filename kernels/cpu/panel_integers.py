# Numba infers the types.
# mypy: allow-untyped-defs, allow-untyped-calls
"""Products of rounded rows with a panel of 4 or 8 bits (see `kernels.cpu.panels`)."""

import numpy as np

from octavo.kernels.cpu.jit import routine
from octavo.kernels.cpu.lanes import LANES
from octavo.kernels.cpu.memory import load, pointer, prefetch
from octavo.kernels.cpu.multiply_add import add_scaled, products_i8, products_i16
from octavo.kernels.cpu.panels import (
    AHEAD,
    AHEAD_OF_ROW,
    PANEL,
    ROWS,
    TILE,
    first_operand,
    first_word,
    floats,
    load_group,
    place_of_x,
    second_operand,
)
from octavo.kernels.cpu.simd import zeros


@routine(forceinline=True)
def _add_chunk(sums, group, chunk, row, target, scratch):
    """Add one chunk's sums of some rows, which begin with `row`, to scratch.sums_MN from `target` on."""
    add_scaled(
        sums,
        *(
            floats(scratch.factors_MC),
            floats(scratch.x_sums_MC),
            row * scratch.num_chunks + chunk,
            scratch.num_chunks,
        ),
        *(group.scales, group.offsets),
        *(floats(scratch.sums_MN), target, PANEL),
    )


def _group_of(bits, num_rows, ahead):
    """Return a routine that multiplies codes with this number of rows, whose sums stay in registers."""
    products = {4: products_i8, 8: products_i16}[bits]
    add, total, inputs_of_word = products.add, products.total, 32 // bits

    @routine(forceinline=True)
    def multiply_group(product, group, at, first, end, row, target, scratch):
        """Add products with inputs first to end, of one group and tile, whose codes begin at `at`.

        The products of rows from `row` on are added to scratch.sums_MN from `target` on.
        """
        words, x, x_at = pointer(product.codes, np.float32), floats(scratch.x), place_of_x(product, row, first, scratch)
        stride, chunk = scratch.row_words, first >> scratch.chunk_shift
        for _ in range(first, end, scratch.chunk):
            sums = zeros(num_rows)
            for _ in range(0, scratch.chunk, inputs_of_word):
                codes = load(words, at)
                prefetch(words, at + ahead)
                sums = add(sums, x, x_at, stride, first_operand(codes, bits))
                sums = add(sums, x, x_at + 1, stride, second_operand(codes, bits))
                x_at, at = x_at + 2, at + PANEL
            _add_chunk(total(sums), group, chunk, row, target, scratch)
            chunk += 1

    return multiply_group


_multiply_group_4, _multiply_group_8 = _group_of(4, ROWS, AHEAD), _group_of(8, ROWS, AHEAD)
_multiply_row_4, _multiply_row_8 = _group_of(4, 1, AHEAD_OF_ROW), _group_of(8, 1, AHEAD_OF_ROW)


@routine(forceinline=True)
def _end_of_run(product, group, first):
    """Return the end of the inputs of one group and one tile: a row's inputs lie side by side within a tile only."""
    return min(first // TILE * TILE + TILE, (group + 1) * product.group_size)


@routine()
def multiply_rounded(product, panel, num_rows, scratch):
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
def multiply_rounded_row(product, panels, scratch):
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
