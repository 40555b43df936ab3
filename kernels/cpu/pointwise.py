# Numba infers the types.
# mypy: allow-untyped-defs, allow-untyped-calls
"""Norms, rotary embedding, gated activation and the cache write on the CPU.

Each operation works row by row (a row is a token, or one head of a token) in float32 and rounds once when it stores. A
row is the same sequence of operations whichever thread computes it. Memory is given as int64 addresses, its dtype by
the array `like`; strides are in elements.

For each operation there is a kernel for the rows `first` to `end`, and one that shares all rows among threads.
"""

import numpy as np
from numba import prange

from octavo.kernels.cpu.elementary import exp
from octavo.kernels.cpu.jit import kernel, routine
from octavo.kernels.cpu.lanes import LANES
from octavo.kernels.cpu.memory import load_part, pointer, store_part
from octavo.kernels.cpu.simd import fma, splat, sum_of_lanes

_ZERO = np.float32(0.0)
_ONE = np.float32(1.0)


@routine()
def _inverse_root_mean_square(x, start, size, eps):
    """Return 1 / sqrt(mean(x**2) + eps) of one row, in every lane."""
    squares = splat(_ZERO)
    for e in range(0, size, LANES):
        lanes = load_part(x, start + e, size - e)
        squares = fma(lanes, lanes, squares)
    return splat(_ONE / np.sqrt(sum_of_lanes(squares) / np.float32(size) + np.float32(eps)))


@routine()
def _write_normed(out, out_start, x, start, weight, size, factor):
    """Write one row times `factor` times `weight`."""
    for e in range(0, size, LANES):
        normed = load_part(x, start + e, size - e) * factor * load_part(weight, e, size - e)
        store_part(out, out_start + e, size - e, normed)


@routine()
def _add_to(residual, x, start, size):
    """residual += x for one row."""
    for e in range(0, size, LANES):
        total = load_part(residual, start + e, size - e) + load_part(x, start + e, size - e)
        store_part(residual, start + e, size - e, total)


@routine()
def _rotate_head(x, start, cos_sin, table_start, half):
    """Rotate the pairs (i, i + half) of one head."""
    for i in range(0, half, LANES):
        count = half - i
        cos, sin = load_part(cos_sin, table_start + i, count), load_part(cos_sin, table_start + half + i, count)
        left, right = load_part(x, start + i, count), load_part(x, start + half + i, count)
        store_part(x, start + i, count, left * cos - right * sin)
        store_part(x, start + half + i, count, fma(right, cos, left * sin))


@kernel()
def rms_norm(like, addresses, sizes, eps, first, end):
    out, x, weight = pointer(addresses[0], like), pointer(addresses[1], like), pointer(addresses[2], like)
    rows_per_token, token_stride, size = sizes
    for row in range(first, end):
        start = row // rows_per_token * token_stride + row % rows_per_token * size
        factor = _inverse_root_mean_square(x, start, size, eps)
        _write_normed(out, row * size, x, start, weight, size, factor)


@kernel()
def add_rms_norm(like, addresses, size, eps, first, end):
    out, x, weight = pointer(addresses[0], like), pointer(addresses[1], like), pointer(addresses[3], like)
    residual = pointer(addresses[2], np.float32)
    for start in range(first * size, end * size, size):
        _add_to(residual, x, start, size)
        factor = _inverse_root_mean_square(residual, start, size, eps)
        _write_normed(out, start, residual, start, weight, size, factor)


@kernel()
def rotary_embedding(like, addresses, sizes, first, end):
    q, k = pointer(addresses[0], like), pointer(addresses[1], like)
    cos_sin, positions = pointer(addresses[2], np.float32), pointer(addresses[3], np.int64)
    num_heads, num_kv_heads, head_size, rotary_size, q_stride, k_stride = sizes
    half = rotary_size // 2
    for token in range(first, end):
        table_start = positions[token] * rotary_size
        for head in range(num_heads):
            _rotate_head(q, token * q_stride + head * head_size, cos_sin, table_start, half)
        for head in range(num_kv_heads):
            _rotate_head(k, token * k_stride + head * head_size, cos_sin, table_start, half)


@kernel()
def silu_and_mul(like, addresses, size, first, end):
    out, gate_up = pointer(addresses[0], like), pointer(addresses[1], like)
    for row in range(first, end):
        for i in range(0, size, LANES):
            gate = load_part(gate_up, row * 2 * size + i, size - i)
            up = load_part(gate_up, (row * 2 + 1) * size + i, size - i)
            gated = gate / (splat(_ONE) + exp(splat(_ZERO) - gate)) * up
            store_part(out, row * size + i, size - i, gated)


@kernel()
def store_kv(like, addresses, sizes, first, end):
    k, v = pointer(addresses[0], like), pointer(addresses[1], like)
    k_cache, v_cache = pointer(addresses[2], like), pointer(addresses[3], like)
    slots = pointer(addresses[4], np.int64)
    num_kv_heads, head_size, value_size, block_size, k_stride, v_stride = sizes
    for token in range(first, end):
        if slots[token] < 0:
            continue
        block, offset = slots[token] // block_size, slots[token] % block_size
        for head in range(num_kv_heads):
            source = token * k_stride + head * head_size
            target = (block * num_kv_heads + head) * head_size * block_size + offset
            for d in range(head_size):
                k_cache[target + d * block_size] = k[source + d]
            source = token * v_stride + head * value_size
            target = ((block * num_kv_heads + head) * block_size + offset) * value_size
            for d in range(value_size):
                v_cache[target + d] = v[source + d]


@kernel()
def first_outside(address, count, least, limit):
    """Return the first index whose int64 value is not in least <= value < limit, or -1."""
    values = pointer(address, np.int64)
    for index in range(count):
        if values[index] < least or values[index] >= limit:
            return index
    return -1


@kernel(parallel=True)
def rms_norm_parallel(like, addresses, sizes, eps, num_rows, num_threads):
    for thread in prange(num_threads):
        first, end = num_rows * thread // num_threads, num_rows * (thread + 1) // num_threads
        rms_norm(like, addresses, sizes, eps, first, end)


@kernel(parallel=True)
def add_rms_norm_parallel(like, addresses, size, eps, num_rows, num_threads):
    for thread in prange(num_threads):
        first, end = num_rows * thread // num_threads, num_rows * (thread + 1) // num_threads
        add_rms_norm(like, addresses, size, eps, first, end)


@kernel(parallel=True)
def rotary_embedding_parallel(like, addresses, sizes, num_rows, num_threads):
    for thread in prange(num_threads):
        first, end = num_rows * thread // num_threads, num_rows * (thread + 1) // num_threads
        rotary_embedding(like, addresses, sizes, first, end)


@kernel(parallel=True)
def silu_and_mul_parallel(like, addresses, size, num_rows, num_threads):
    for thread in prange(num_threads):
        first, end = num_rows * thread // num_threads, num_rows * (thread + 1) // num_threads
        silu_and_mul(like, addresses, size, first, end)


@kernel(parallel=True)
def store_kv_parallel(like, addresses, sizes, num_rows, num_threads):
    for thread in prange(num_threads):
        first, end = num_rows * thread // num_threads, num_rows * (thread + 1) // num_threads
        store_kv(like, addresses, sizes, first, end)
