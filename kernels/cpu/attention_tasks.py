# Numba infers the types.
# mypy: allow-untyped-defs, allow-untyped-calls
"""The tasks into which threads divide a step of paged attention: some queries over some partitions each.

The legend stands in `kernels.cpu.attention`.
"""

from typing import NamedTuple

import numpy as np

from octavo.kernels.cpu.jit import FEATURES, routine
from octavo.kernels.cpu.lanes import LANES
from octavo.kernels.cpu.memory import pointer

MANY = 12 if FEATURES.get("avx512f") else 6  # rows at once: as many as the registers hold
PARTITION = 512  # tokens, a multiple of attention_tiles.TILE
TARGET_ROWS = 36
TASKS_PER_WORKER = 3  # at least, so that threads end together


class Step(NamedTuple):
    """The call: addresses, then sizes, then numbers. Absent sinks and slopes have the address 0; an absent cap is 0."""

    out: int
    q: int
    k_cache: int
    v_cache: int
    block_tables: int
    cu_seqlens_q: int
    seq_lens: int
    sinks: int
    alibi_slopes: int
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
    soft_cap: float


class Task(NamedTuple):
    """The queries of one tile that one thread computes, of some heads, over some partitions of the context."""

    seq: int
    first_kv_head: int
    end_kv_head: int
    first_token: int  # in the packed batch
    num_queries: int
    first_position: int
    first_partition: int
    end_partition: int
    part: int  # this task is the part-th of the queries' partitions; -1: all of them


TASK_SIZE = len(Task._fields)


@routine()
def round_up(value, multiple):
    return (value + multiple - 1) // multiple * multiple


@routine()
def queries_of_tile(step):
    return max(1, TARGET_ROWS // (step.num_heads // step.num_kv_heads))


@routine()
def padded_rows(step):
    """Return how many rows any task has at most."""
    return round_up(queries_of_tile(step) * (step.num_heads // step.num_kv_heads), MANY)


@routine()
def rows_of_head(step, num_queries):
    """Return how many rows `num_queries` queries of one key/value head take."""
    return round_up(num_queries * (step.num_heads // step.num_kv_heads), MANY)


@routine()
def state_stride(step):
    return 2 * LANES + round_up(step.value_size, LANES)


@routine()
def first_malformed(step):
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
def plan(step, tasks, num_workers):
    """Write the step's tasks into the rows of `tasks`; return their number, and how many do one of several partitions.

    With an empty `tasks` they are only counted. The key/value heads of a block lie side by side and are one task,
    unless it is too large: memory is then read from start to end, as its prefetchers expect. A task that is too large
    is divided by partitions, then by heads. Within a sequence the tiles with the longest context come first.
    """
    starts, seq_lens = pointer(step.cu_seqlens_q, np.int32), pointer(step.seq_lens, np.int32)
    tile_queries, group = queries_of_tile(step), step.num_heads // step.num_kv_heads
    most_pairs = num_pairs(step) * step.num_heads // (TASKS_PER_WORKER * num_workers if num_workers > 1 else 1)
    num_tasks, num_parts = 0, 0
    for seq in range(step.num_seqs):
        num_queries = np.int64(starts[seq + 1] - starts[seq])
        num_computed = seq_lens[seq] - num_queries
        for first in range((num_queries - 1) // tile_queries * tile_queries, -1, -tile_queries):
            count, position = min(tile_queries, num_queries - first), num_computed + first
            first_partition = max(0, position - step.window + 1) // PARTITION
            num_partitions = (position + count - 1) // PARTITION + 1 - first_partition
            heads_at_once = padded_rows(step) // rows_of_head(step, count)
            num_shares = (step.num_kv_heads + heads_at_once - 1) // heads_at_once  # of the heads
            pairs_of_share = count * group * min(position + count, step.window) * step.num_kv_heads // num_shares
            num_divided = num_partitions if pairs_of_share > most_pairs else 1
            if pairs_of_share > most_pairs * num_divided:
                num_shares = step.num_kv_heads
            for task in range(num_shares * num_divided if len(tasks) > 0 else 0):
                share, part = task // num_divided, task % num_divided
                row = num_tasks + task
                tasks[row, 0] = seq
                tasks[row, 1] = step.num_kv_heads * share // num_shares
                tasks[row, 2] = step.num_kv_heads * (share + 1) // num_shares
                tasks[row, 3] = starts[seq] + first
                tasks[row, 4] = count
                tasks[row, 5] = position
                tasks[row, 6] = first_partition + part
                tasks[row, 7] = first_partition + (part + 1 if num_divided > 1 else num_partitions)
                tasks[row, 8] = part if num_divided > 1 else -1
            num_tasks += num_shares * num_divided
            num_parts += num_shares * num_divided if num_divided > 1 else 0
    return num_tasks, num_parts


@routine()
def task_of(row):
    return Task(row[0], row[1], row[2], row[3], row[4], row[5], row[6], row[7], row[8])


@routine()
def num_pairs(step):
    """Return about how many queries meet how many keys."""
    starts, seq_lens = pointer(step.cu_seqlens_q, np.int32), pointer(step.seq_lens, np.int32)
    pairs = np.int64(0)
    for seq in range(step.num_seqs):
        pairs += np.int64(starts[seq + 1] - starts[seq]) * min(seq_lens[seq], step.window)
    return pairs
