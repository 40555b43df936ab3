# Numba infers the types.
# mypy: allow-untyped-defs, allow-untyped-calls
"""What a step of paged attention is made of: tasks for threads, each some queries over some partitions.

The legend stands in `kernels.cpu.attention`.
"""

from typing import NamedTuple

import numpy as np
from llvmlite import binding  # type: ignore[import-untyped]

from kernels.cpu.jit import routine
from kernels.cpu.lanes import LANES
from kernels.cpu.memory import pointer

MANY = 12 if binding.get_host_cpu_features().get("avx512f") else 6  # rows at once: what the registers hold
PARTITION = 512  # tokens, a multiple of attention_tiles.TILE
TARGET_ROWS = 36
TASKS_PER_WORKER = 4

# What a task is of a tile of queries. Key/value heads, which lie side by side in a block, are read together where there
# are tasks enough: memory is then read from start to end, which its prefetchers follow.
TOGETHER, IN_PARTITIONS, APART = 0, 1, 2  # some heads; some heads and one partition; one head and one partition


class Step(NamedTuple):
    """The call: addresses, then sizes, then numbers. Without sinks or slopes their address is 0, without cap it is."""

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
    return round_up(queries_of_tile(step) * (step.num_heads // step.num_kv_heads), MANY)


@routine()
def rows_of_head(step, num_queries):
    """Return how many rows so many queries of one key/value head take."""
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
def choose_form(step, num_workers):
    """Return the form of the tasks, and their number: the first that gives enough for all workers, or the most."""
    nothing = np.empty((0, TASK_SIZE), np.int64)
    chosen, most = TOGETHER, plan(step, nothing, TOGETHER)
    for form in (IN_PARTITIONS, APART):
        if num_workers > 1 and most < TASKS_PER_WORKER * num_workers:
            num_tasks = plan(step, nothing, form)
            if num_tasks > most:
                chosen, most = form, num_tasks
    return chosen, most


@routine()
def plan(step, tasks, form):
    """Write the step's tasks into the rows of `tasks`; return their number. An empty `tasks` only counts.

    Within a sequence the tiles with the longest context come first, so that threads end together.
    """
    starts, seq_lens = pointer(step.cu_seqlens_q, np.int32), pointer(step.seq_lens, np.int32)
    tile_queries = queries_of_tile(step)
    num_tasks = 0
    for seq in range(step.num_seqs):
        num_queries = np.int64(starts[seq + 1] - starts[seq])
        num_computed = seq_lens[seq] - num_queries
        num_parts_of_heads = step.num_kv_heads
        if form != APART:
            heads_at_once = max(1, padded_rows(step) // rows_of_head(step, max(1, min(num_queries, tile_queries))))
            num_parts_of_heads = (step.num_kv_heads + heads_at_once - 1) // heads_at_once
        for part_of_heads in range(num_parts_of_heads):
            for first in range((num_queries - 1) // tile_queries * tile_queries, -1, -tile_queries):
                count = min(tile_queries, num_queries - first)
                first_partition = max(0, num_computed + first - step.window + 1) // PARTITION
                end_partition = (num_computed + first + count - 1) // PARTITION + 1
                num_parts = end_partition - first_partition if form != TOGETHER else 1
                for part in range(num_parts):
                    if len(tasks) > 0:
                        tasks[num_tasks, 0] = seq
                        tasks[num_tasks, 1] = step.num_kv_heads * part_of_heads // num_parts_of_heads
                        tasks[num_tasks, 2] = step.num_kv_heads * (part_of_heads + 1) // num_parts_of_heads
                        tasks[num_tasks, 3] = starts[seq] + first
                        tasks[num_tasks, 4] = count
                        tasks[num_tasks, 5] = num_computed + first
                        tasks[num_tasks, 6] = first_partition + part
                        tasks[num_tasks, 7] = first_partition + part + 1 if form != TOGETHER else end_partition
                        tasks[num_tasks, 8] = part if form != TOGETHER else -1
                    num_tasks += 1
    return num_tasks


@routine()
def task_of(row):
    return Task(row[0], row[1], row[2], row[3], row[4], row[5], row[6], row[7], row[8])


@routine()
def total_work(step):
    """Return about how many multiply-adds the step takes."""
    starts, seq_lens = pointer(step.cu_seqlens_q, np.int32), pointer(step.seq_lens, np.int32)
    num_pairs = np.int64(0)
    for seq in range(step.num_seqs):
        num_pairs += np.int64(starts[seq + 1] - starts[seq]) * min(seq_lens[seq], step.window)
    return num_pairs * step.num_heads * (step.head_size + step.value_size)
