# Numba infers the types.
# mypy: allow-untyped-defs, allow-untyped-calls
"""Weights of 4, 8 or 16 bits in panels, and the form of the rows that they are multiplied with.

Outputs lie in panels of 32, as two vectors. A panel has words of 32 bits: one for each 8, 4 or 2 inputs and each
output, the first input's code lowest. For each group of inputs there are 32 scales and, if there are any, 32 offsets;
codes of 16 bits are bfloat16 numbers and have neither.

Of each word two operands are made, of every other input each: 4 bytes, 2 numbers of 16 bits, or 1 float32. The inputs
of a row are put into the same order and type. Beside codes of 4 bits, inputs are rounded to 8 bits (as in llama.cpp's
Q8_1), beside codes of 8 bits to 16: a chunk of 32 inputs (16, where groups need it) has one factor. The products of a
chunk are then added up in integers, exactly.

One output of one row is always the same sequence of operations. Of integers: a chunk's sum, times the row's factor,
times the scale, added to the chunks before with a fused multiply-add; then the sum of the row's inputs times the offset
likewise. Of bfloat16: a tile of inputs is a chain of fused multiply-adds from zero, and the tiles are added up; where
the processor multiplies pairs of bfloat16 numbers, the chain is one of pairs. The number of rows decides only where the
operands stand: in registers, made anew for every few rows; or, of bfloat16 and many rows, in a tile that stays in the
first cache for all rows of a block. A single row is multiplied with two panels at once.
`kernels.cpu.panel_integers` and `panel_floats` have the products.

M rows, N outputs, K inputs.
"""

from typing import Any, NamedTuple

import numpy as np

from octavo.kernels.cpu.jit import routine
from octavo.kernels.cpu.lanes import LANES, REGISTER_LANES
from octavo.kernels.cpu.memory import (
    load,
    load_half,
    load_part,
    pointer,
    prefetch,
    store,
    store_low_i8,
    store_low_i16,
)
from octavo.kernels.cpu.simd import (
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
)

PANEL = 2 * LANES  # outputs
TILE = 128  # inputs: a panel's operands of float32 take 16 KiB of the first cache
CACHE_LINE = 16  # float32
BLOCK = 96  # rows at most, whose tile of inputs stays in the second cache
ROWS = 8 if REGISTER_LANES == LANES else 4  # at once, of integers and of pairs
FLOAT_ROWS = 12 if REGISTER_LANES == LANES else 6  # at once, of float32: as many sums as fit into registers
AHEAD = 64 * PANEL  # words between the operands in use and the memory that is prefetched
AHEAD_OF_ROW = 8 * PANEL  # the same for a single row, where two parts of memory are read at once

_ZERO, _ONE = np.float32(0.0), np.float32(1.0)
_LEAST = np.float32(1e-30)  # smaller maxima count as zero: their factor would be infinite
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
    """Vectors that turn the codes of 16 outputs in one group of inputs into weights."""

    scales: Any
    offsets: Any


class Scratch(NamedTuple):
    """One thread's memory: sizes, and addresses of float32 (an array would be counted at every call).

    A block of rows lies tile by tile: the tile's inputs of the first row, of the second, ...
    """

    chunk: int  # inputs; a divisor of the group
    chunk_shift: int  # a shift that divides by it: a division takes as long as ten products
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
    """Return how many rows need room where `num_rows` are multiplied: the last ones are filled up to a whole group."""
    return round_up(round_up(num_rows, rows_at_once(product)), ROWS)


@routine(forceinline=True)
def _x_words(product, num_inputs):
    """Return how many words of x hold `num_inputs` of one row."""
    return num_inputs // 2 if product.in_pairs else num_inputs * product.bits // 16


@routine()
def new_scratch(product):
    """Return a Scratch for blocks of the product, and the array that it lies in, which must live as long."""
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
def floats(address):
    return pointer(address, np.float32)


# The inputs.


@routine(forceinline=True)
def _load_x(product, index, count):
    if product.x_bytes == 4:
        return load_part(pointer(product.x, np.float32), index, count)
    return load_part(pointer(product.x, np.uint16), index, count)


@routine(forceinline=True)
def place_of_x(product, row, k, scratch):
    """Return where in scratch.x the word of input k of a block's row is."""
    return k // TILE * scratch.tile_words + row * scratch.row_words + _x_words(product, k % TILE)


@routine(forceinline=True)
def _store_rounded(product, lanes, inverse, at, scratch):
    """Write 16 inputs times `inverse` as whole numbers, which are returned. A NaN becomes some number."""
    shifted = fma(lanes, inverse, splat(_ROUND_MAGIC))
    if product.bits == 4:
        store_low_i8(floats(scratch.x), at, shifted)
    else:
        store_low_i16(floats(scratch.x), at, shifted)
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
        rounded = _store_rounded(product, low, inverse, place_of_x(product, row, k, scratch), scratch)
        if chunk == 32:
            rounded = rounded + _store_rounded(
                product, high, inverse, place_of_x(product, row, k + LANES, scratch), scratch
            )
        factor = size / largest
        floats(scratch.factors_MC)[at] = factor
        floats(scratch.x_sums_MC)[at] = factor * sum_of_lanes(rounded)
        at += 1
    floats(scratch.factors_MC)[first] += sum_of_lanes(nan_or_zero)


@routine()
def _copy_row(product, source, row, scratch):
    """Write a row of bfloat16 inputs as it is. An odd last one is followed by a zero."""
    x, target = pointer(product.x, np.uint16), pointer(scratch.x, np.uint16)
    for first in range(0, product.num_inputs, TILE):
        at = 2 * place_of_x(product, row, first, scratch)
        for k in range(first, min(first + TILE, product.num_inputs)):
            target[at + k - first] = x[source + k]


@routine()
def _widen_row(product, source, row, scratch):
    """Write a row of inputs as float32."""
    for k in range(0, product.num_inputs, LANES):
        lanes = _load_x(product, source + k, product.num_inputs - k)
        store(floats(scratch.x), place_of_x(product, row, k, scratch), lanes)


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
def fetch_first_words(product, panel):
    """Ask memory for the beginning of a panel: it comes while something else is done."""
    words, at = pointer(product.codes, np.float32), first_word(product, panel, 0)
    for word in range(0, AHEAD_OF_ROW, CACHE_LINE):
        prefetch(words, at + word)


@routine(forceinline=True)
def first_operand(words, bits):
    if bits == 16:
        return shift_left_i32(words, 16)
    return and_i32(words, 0x0F0F0F0F if bits == 4 else 0x00FF00FF)


@routine(forceinline=True)
def second_operand(words, bits):
    if bits == 16:
        return upper_halves(words)
    return and_i32(shift_right_i32(words, bits), 0x0F0F0F0F if bits == 4 else 0x00FF00FF)


# The sums.


@routine()
def clear_sums(num_rows, scratch):
    for at in range(0, num_rows * PANEL, LANES):
        store(floats(scratch.sums_MN), at, splat(_ZERO))


@routine(forceinline=True)
def add_to_sums(total, target, scratch):
    store(floats(scratch.sums_MN), target, load(floats(scratch.sums_MN), target) + total)
