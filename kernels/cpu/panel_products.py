# Numba infers the types.
# mypy: allow-untyped-defs, allow-untyped-calls
"""Products of rows with all panels of a weight (see `kernels.cpu.panels`), shared among threads; rows of a weight."""

import numpy as np
from numba import prange

from octavo.kernels.cpu.jit import kernel, routine
from octavo.kernels.cpu.lanes import LANES
from octavo.kernels.cpu.memory import fetch_add, load, load_part, load_splat, pointer, store_part
from octavo.kernels.cpu.panel_floats import multiply_float_row, multiply_floats
from octavo.kernels.cpu.panel_integers import multiply_rounded, multiply_rounded_row
from octavo.kernels.cpu.panels import (
    BLOCK,
    PANEL,
    Product,
    clear_sums,
    fetch_first_words,
    first_word,
    load_group,
    load_rows,
    new_scratch,
    num_panels,
    padded_rows,
    rows_of_block,
)
from octavo.kernels.cpu.simd import fma, lane, splat

LEAST_PARALLEL_WORK = 200_000  # multiply-adds; below, a second thread costs more than it brings
TASKS_PER_WORKER = 4
TASKS_PER_WORKER_OF_ROW = 2  # memory takes the time, and is faster in longer parts

_ZERO = np.float32(0.0)


@routine()
def _write_out(product, panel, first_row, num_rows, first_sum, scratch):
    sums = pointer(scratch.sums_MN, np.float32)
    out, out_bfloat16 = pointer(product.out, np.float32), pointer(product.out, np.uint16)
    for column in range(0, PANEL, LANES):
        output = panel * PANEL + column
        count = max(0, product.num_outputs - output)
        bias = splat(_ZERO)
        if product.bias != 0:
            bias = load(pointer(product.bias, np.float32), output)
        for row in range(num_rows):
            total = load(sums, first_sum + row * PANEL + column) + bias
            target = (first_row + row) * product.num_outputs + output
            if product.out_bytes == 4:
                store_part(out, target, count, total)
            else:
                store_part(out_bfloat16, target, count, total)


@routine()
def num_tasks_of(product, num_workers):
    """Return the number of tasks, and the number of chunks of panels, for as many threads."""
    num_blocks = (product.num_rows + BLOCK - 1) // BLOCK
    num_chunks = 1
    if product.num_rows == 1 and num_workers > 1:
        num_chunks = min((num_panels(product) + 1) // 2, TASKS_PER_WORKER_OF_ROW * num_workers)
    elif num_workers > 1:
        num_chunks = min(num_panels(product), (TASKS_PER_WORKER * num_workers + num_blocks - 1) // num_blocks)
    return num_blocks * num_chunks, num_chunks


@routine()
def _multiply(product, panel, num_rows, scratch):
    """Fill scratch.sums_MN with the products of a block of several rows, which is loaded, with a panel."""
    clear_sums(padded_rows(product, num_rows), scratch)
    if product.bits < 16:
        multiply_rounded(product, panel, num_rows, scratch)
    else:
        multiply_floats(product, panel, num_rows, scratch)


@routine()
def _multiply_row(product, panels, scratch):
    """Fill the first two rows of scratch.sums_MN with the products of the only row, which is loaded, with two panels.

    Memory is faster when two parts of it are read at once: a core's prefetcher follows both.
    """
    clear_sums(2, scratch)
    if product.bits < 16:
        multiply_rounded_row(product, panels, scratch)
    else:
        multiply_float_row(product, panels, scratch)


@routine()
def _multiply_row_with(product, first, end, scratch):
    """Write out the products of the only row with panels first to end, those of the two halves side by side.

    Of an odd number of panels the last one is done twice, the second time from the caches.
    """
    half = (end - first + 1) // 2
    for panel in range(first, first + half):
        other = min(panel + half, end - 1)
        _multiply_row(product, (panel, other), scratch)
        _write_out(product, panel, 0, 1, 0, scratch)
        _write_out(product, other, 0, 1, PANEL, scratch)


@routine()
def work(product, num_tasks, num_chunks, next_task):
    """Take tasks, each a block of rows and a chunk of panels, until none is left."""
    scratch, memory = new_scratch(product)
    loaded_row = -1
    all_panels, stride = num_panels(product), rows_of_block(product)
    while True:
        task = fetch_add(next_task, 1)
        if task >= num_tasks:
            memory[0] = _ZERO  # keeps the array alive until here
            return
        first_row, chunk = task // num_chunks * stride, task % num_chunks
        num_rows = min(stride, product.num_rows - first_row)
        first, end = all_panels * chunk // num_chunks, all_panels * (chunk + 1) // num_chunks
        if first_row != loaded_row:
            for panel in (first, (first + end + 1) // 2):  # the first panels of both halves, for a single row
                fetch_first_words(product, panel)
            load_rows(product, first_row, num_rows, scratch)
            loaded_row = first_row
        if product.num_rows == 1:
            _multiply_row_with(product, first, end, scratch)
            continue
        for panel in range(first, end):
            _multiply(product, panel, num_rows, scratch)
            _write_out(product, panel, first_row, num_rows, 0, scratch)


@routine(parallel=True)
def _work_in_parallel(product, num_tasks, num_chunks, next_task, num_workers):
    for _ in prange(num_workers):
        work(product, num_tasks, num_chunks, next_task)


@kernel()
def linear(fields, num_threads):
    """Compute the product that the tuple `fields` describes."""
    product = Product(*fields)
    num_workers = num_threads
    if product.num_rows * product.num_outputs * product.num_inputs < LEAST_PARALLEL_WORK:
        num_workers = 1
    num_tasks, num_chunks = num_tasks_of(product, num_workers)
    next_task = np.zeros(1, np.int64)
    if num_workers > 1:
        _work_in_parallel(product, num_tasks, num_chunks, next_task, num_workers)
    else:
        work(product, num_tasks, num_chunks, next_task)


@routine()
def _fill_row(product, output, row_K):
    """Fill row_K with the weights of one output."""
    words, words_bfloat16 = pointer(product.codes, np.uint32), pointer(product.codes, np.uint16)
    per_word, mask = 32 // product.bits, (1 << product.bits) - 1
    panel, column = output // PANEL, output % PANEL
    if product.bits == 16:
        for k in range(product.num_inputs):
            word = first_word(product, panel, k) + column
            row_K[k] = lane(load_splat(words_bfloat16, 2 * word + k % 2), 0)
        return
    num_groups = product.num_inputs // product.group_size
    for index in range(num_groups):
        group = load_group(product, panel, num_groups, index, column // LANES * LANES)
        scale, offset = splat(lane(group.scales, column % LANES)), splat(lane(group.offsets, column % LANES))
        for k in range(index * product.group_size, (index + 1) * product.group_size):
            word = words[first_word(product, panel, k) + column]
            code = (word >> (k % per_word * product.bits)) & mask
            row_K[k] = lane(fma(splat(np.float32(code)), scale, offset), 0)


@routine()
def write_rows(product, token_ids_T):
    """Write the weights of the outputs `token_ids_T`, a row each, into the product's out."""
    out, out_bfloat16 = pointer(product.out, np.float32), pointer(product.out, np.uint16)
    row_K = np.empty(product.num_inputs, np.float32)
    for token in range(len(token_ids_T)):
        _fill_row(product, token_ids_T[token], row_K)
        for k in range(0, product.num_inputs, LANES):
            target, count = token * product.num_inputs + k, product.num_inputs - k
            if product.out_bytes == 4:
                store_part(out, target, count, load_part(row_K, k, count))
            else:
                store_part(out_bfloat16, target, count, load_part(row_K, k, count))


@kernel()
def embedding(fields, token_ids_T):
    """Write the weights of the outputs `token_ids_T`, a row each, where the tuple `fields` of a Product says."""
    write_rows(Product(*fields), token_ids_T)
