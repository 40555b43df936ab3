# Triton infers the types of what it compiles.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""The kernels of paged attention: tiles of queries for prompts and chunks, split contexts for single tokens.

Prefill and decode run `_attend`, the loop of FlashAttention-2 (Dao, 2023): a tile of rows keeps a running maximum, sum
and output while tiles of keys and values go by, with the softmax in base 2. The rows of a tile are queries times the
query heads that share a key/value head, so that loaded keys and values serve all of them and fill the tensor cores.

* `prefill_kernel` takes any batch. Each program finds its sequence by binary search in cu_seqlens_q. Tiles of keys that
  every row sees go through a loop without masks.
* `decode_kernel` takes a batch of single tokens, and splits each context among programs that leave partial results to
  `merge_kernel` (FlashDecoding, Dao et al., 2023). How much of a context each takes follows from its length.

The content of unused slots is never part of a result: scores of keys that a row does not see are replaced, and values
are masked when they are loaded. Keys are masked by whole blocks, since a mask by tokens would keep them from being
loaded as vectors. The blocks before a sliding window may be gone; they are not read, nor are their entries in the
table.

Letters beyond those of `kernels.backend`: M rows of a tile (in names of kernels' tensors), N keys of a tile, D and V
components of keys and values, padded to powers of two, L splits.
"""

import math

import triton
import triton.language as tl

from octavo.kernels.triton.dots import dot

SPLIT_TILES = tl.constexpr(4)  # a split has at least as many tiles of keys
LOG2_E = tl.constexpr(math.log2(math.e))

# Arguments that vary from call to call must not make Triton compile anew where one is 1 or a multiple of 16.
VARYING = [
    "scale",
    "soft_cap",
    "window",
    "has_sinks",
    "has_alibi",
    "num_seqs",
    "max_blocks",
    "num_heads",
    "num_kv_heads",
    "num_splits",
]


@triton.jit(do_not_specialize=VARYING)
def prefill_kernel(
    out,
    q,
    k_cache,
    v_cache,
    block_tables,
    cu_seqlens_q,
    seq_lens,
    sinks,
    alibi_slopes,
    scale,
    soft_cap,
    window,
    has_sinks,
    has_alibi,
    num_seqs,
    max_blocks,
    num_heads,
    num_kv_heads,
    q_stride,
    BLOCK_M: tl.constexpr,
    TILE: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    CHANGES_SCORES: tl.constexpr,
):
    """Attend from one tile of queries of one sequence to all that they see. Grid: (T // queries + S, head tiles)."""
    group_size = num_heads // num_kv_heads
    heads_of_tile = tl.minimum(group_size, BLOCK_M)
    queries_of_tile = BLOCK_M // heads_of_tile
    kv_head, first_head = _head_tile(tl.program_id(1), group_size, heads_of_tile)

    seq = _find_sequence(cu_seqlens_q, num_seqs, queries_of_tile, tl.program_id(0))
    first_token = tl.load(cu_seqlens_q + seq)
    num_queries = tl.load(cu_seqlens_q + seq + 1) - first_token
    first_query = (tl.program_id(0) - (first_token // queries_of_tile + seq)) * queries_of_tile
    if first_query >= num_queries:
        return
    context = tl.load(seq_lens + seq) - num_queries

    row_M = tl.arange(0, BLOCK_M)
    query_M = first_query + row_M // heads_of_tile
    head_M = first_head + row_M % heads_of_tile
    is_row_M = (row_M < queries_of_tile * heads_of_tile) & (query_M < num_queries) & (head_M < group_size)
    head_M += kv_head * group_size
    position_M = context + query_M
    token_M = first_token + query_M

    q_MD = _load_queries(q, token_M, head_M, is_row_M, q_stride, HEAD_SIZE, BLOCK_D)
    max_M, sum_M = _begin(sinks, head_M, is_row_M & (has_sinks != 0))
    slope_M = tl.load(alibi_slopes + head_M, mask=is_row_M & (has_alibi != 0), other=0.0)
    acc_MV = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)

    first_position = context + first_query
    last_position = context + tl.minimum(first_query + queries_of_tile, num_queries) - 1
    first_key = tl.maximum(first_position - window + 1, 0)
    end_key = last_position + 1
    first_tile = first_key // TILE
    end_tile = tl.cdiv(end_key, TILE)
    # Tiles of keys that every row sees.
    first_whole = tl.cdiv(tl.maximum(last_position - window + 1, 0), TILE)
    end_whole = tl.maximum((first_position + 1) // TILE, first_whole)
    end_whole = tl.minimum(end_whole, end_tile)
    first_whole = tl.minimum(first_whole, end_whole)

    k_head = k_cache + kv_head * (HEAD_SIZE * BLOCK_SIZE)
    v_head = v_cache + kv_head * (VALUE_SIZE * BLOCK_SIZE)
    block_table = block_tables + seq.to(tl.int64) * max_blocks
    for is_masked in tl.static_range(2):
        acc_MV, max_M, sum_M = _attend(
            acc_MV,
            max_M,
            sum_M,
            q_MD,
            k_head,
            v_head,
            block_table,
            first_tile if is_masked else first_whole,
            end_tile if is_masked else end_whole,
            first_whole,
            end_whole - first_whole if is_masked else 0,
            first_key,
            end_key,
            position_M,
            slope_M,
            scale,
            soft_cap,
            window,
            num_kv_heads,
            TILE,
            HEAD_SIZE,
            VALUE_SIZE,
            BLOCK_D,
            BLOCK_V,
            BLOCK_SIZE,
            CHANGES_SCORES,
            is_masked,
        )
    out_MV = acc_MV / tl.where(sum_M > 0, sum_M, 1.0)[:, None]
    _store_rows(out, out_MV, token_M * num_heads + head_M, is_row_M, VALUE_SIZE, BLOCK_V)


@triton.jit(do_not_specialize=VARYING)
def decode_kernel(
    out,
    partial_out,
    partial_lse,
    q,
    k_cache,
    v_cache,
    block_tables,
    seq_lens,
    sinks,
    alibi_slopes,
    scale,
    soft_cap,
    window,
    has_sinks,
    has_alibi,
    max_blocks,
    num_heads,
    num_kv_heads,
    q_stride,
    num_splits,
    BLOCK_M: tl.constexpr,
    TILE: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    CHANGES_SCORES: tl.constexpr,
):
    """Attend from one sequence's only query to one split of what it sees. Grid: (S, head tiles, splits)."""
    seq = tl.program_id(0)
    split = tl.program_id(2)
    group_size = num_heads // num_kv_heads
    heads_of_tile = tl.minimum(group_size, BLOCK_M)
    kv_head, first_head = _head_tile(tl.program_id(1), group_size, heads_of_tile)
    seq_len = tl.load(seq_lens + seq)
    first_key, first_tile, end_tile, tiles_of_split, used_splits = _split(seq_len, window, num_splits, TILE)
    if split >= used_splits:
        return

    row_M = tl.arange(0, BLOCK_M)
    head_M = first_head + row_M
    is_row_M = (row_M < heads_of_tile) & (head_M < group_size)
    head_M += kv_head * group_size
    token_M = tl.zeros_like(row_M) + seq

    q_MD = _load_queries(q, token_M, head_M, is_row_M, q_stride, HEAD_SIZE, BLOCK_D)
    max_M, sum_M = _begin(sinks, head_M, is_row_M & (has_sinks != 0) & (split == 0))
    slope_M = tl.load(alibi_slopes + head_M, mask=is_row_M & (has_alibi != 0), other=0.0)
    acc_MV = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    first_tile += split * tiles_of_split
    acc_MV, max_M, sum_M = _attend(
        acc_MV,
        max_M,
        sum_M,
        q_MD,
        k_cache + kv_head * (HEAD_SIZE * BLOCK_SIZE),
        v_cache + kv_head * (VALUE_SIZE * BLOCK_SIZE),
        block_tables + seq.to(tl.int64) * max_blocks,
        first_tile,
        tl.minimum(first_tile + tiles_of_split, end_tile),
        0,
        0,
        first_key,
        seq_len,
        tl.zeros_like(row_M) + seq_len - 1,
        slope_M,
        scale,
        soft_cap,
        window,
        num_kv_heads,
        TILE,
        HEAD_SIZE,
        VALUE_SIZE,
        BLOCK_D,
        BLOCK_V,
        BLOCK_SIZE,
        CHANGES_SCORES,
        True,
    )
    out_MV = acc_MV / tl.where(sum_M > 0, sum_M, 1.0)[:, None]
    row_index_M = token_M * num_heads + head_M
    if num_splits == 1:
        _store_rows(out, out_MV, row_index_M, is_row_M, VALUE_SIZE, BLOCK_V)
    else:
        partial_M = row_index_M * num_splits + split
        _store_rows(partial_out, out_MV, partial_M, is_row_M, VALUE_SIZE, BLOCK_V)
        tl.store(partial_lse + partial_M, max_M + tl.log2(sum_M), mask=is_row_M)


@triton.jit(do_not_specialize=VARYING)
def merge_kernel(
    out,
    partial_out,
    partial_lse,
    seq_lens,
    window,
    num_heads,
    num_splits,
    TILE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Merge the splits of one query of one head, BLOCK_V components of it. Grid: (T, H, component blocks)."""
    row = tl.program_id(0).to(tl.int64) * num_heads + tl.program_id(1)
    component_V = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    is_component_V = component_V < VALUE_SIZE
    _, _, _, _, used_splits = _split(tl.load(seq_lens + tl.program_id(0)), window, num_splits, TILE)

    largest = -float("inf")
    total = 0.0
    acc_V = tl.zeros([BLOCK_V], tl.float32)
    for first_split in range(0, used_splits, BLOCK_L):
        split_L = first_split + tl.arange(0, BLOCK_L)
        is_split_L = split_L < used_splits
        lse_L = tl.load(partial_lse + row * num_splits + split_L, mask=is_split_L, other=-float("inf"))
        new_largest = tl.maximum(largest, tl.max(lse_L, 0))
        safe_largest = tl.where(new_largest == -float("inf"), 0.0, new_largest)
        weight_L = tl.exp2(lse_L - safe_largest)
        correction = tl.exp2(largest - safe_largest)
        out_LV = tl.load(
            partial_out + (row * num_splits + split_L)[:, None] * VALUE_SIZE + component_V[None, :],
            mask=is_split_L[:, None] & is_component_V[None, :],
            other=0.0,
        )
        acc_V = acc_V * correction + tl.sum(weight_L[:, None] * out_LV, 0)
        total = total * correction + tl.sum(weight_L, 0)
        largest = new_largest
    out_V = acc_V / tl.where(total > 0, total, 1.0)
    tl.store(out + row * VALUE_SIZE + component_V, out_V.to(out.dtype.element_ty), mask=is_component_V)


@triton.jit
def _attend(
    acc_MV,
    max_M,
    sum_M,
    q_MD,
    k_head,
    v_head,
    block_table,
    first_tile,
    end_tile,
    gap_tile,
    gap_size,
    first_key,
    end_key,
    position_M,
    slope_M,
    scale,
    soft_cap,
    window,
    num_kv_heads,
    TILE: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    CHANGES_SCORES: tl.constexpr,
    IS_MASKED: tl.constexpr,
):
    """Let tiles `first_tile` to `end_tile` of keys, less `gap_size` ones at `gap_tile`, go by; return the new state.

    The rows see the keys from first_key to end_key at most. Unless IS_MASKED, they all see all keys of all tiles.
    """
    k_block_stride = num_kv_heads.to(tl.int64) * (HEAD_SIZE * BLOCK_SIZE)
    v_block_stride = num_kv_heads.to(tl.int64) * (VALUE_SIZE * BLOCK_SIZE)
    component_D = tl.arange(0, BLOCK_D)
    component_V = tl.arange(0, BLOCK_V)
    ALIGNED: tl.constexpr = BLOCK_SIZE & -BLOCK_SIZE
    SAME_BLOCK: tl.constexpr = ALIGNED if ALIGNED < TILE else TILE
    for index in range(first_tile, end_tile - gap_size):
        tile = index + tl.where(index >= gap_tile, gap_size, 0) if IS_MASKED else index
        position_N = tile * TILE + tl.arange(0, TILE)
        offset_N = position_N % BLOCK_SIZE
        index_N = position_N // BLOCK_SIZE
        if IS_MASKED:
            # Beyond the ends, tokens of the blocks there stand in.
            index_N = tl.minimum(tl.maximum(index_N, first_key // BLOCK_SIZE), (end_key - 1) // BLOCK_SIZE)
        # Tokens side by side in a block have the same block, which the compiler forgets when it prefetches the table.
        block_N = tl.max_constancy(tl.load(block_table + index_N).to(tl.int64), SAME_BLOCK)
        k_pointers_DN = k_head + (block_N * k_block_stride + offset_N)[None, :] + (component_D * BLOCK_SIZE)[:, None]
        v_pointers_NV = v_head + (block_N * v_block_stride + offset_N * VALUE_SIZE)[:, None] + component_V[None, :]
        if HEAD_SIZE == BLOCK_D:
            k_DN = tl.load(k_pointers_DN)
        else:
            k_DN = tl.load(k_pointers_DN, mask=(component_D < HEAD_SIZE)[:, None], other=0.0)
        if IS_MASKED:
            v_mask_NV = ((position_N >= first_key) & (position_N < end_key))[:, None]
            if VALUE_SIZE < BLOCK_V:
                v_mask_NV = v_mask_NV & (component_V < VALUE_SIZE)[None, :]
            v_NV = tl.load(v_pointers_NV, mask=v_mask_NV, other=0.0)
        elif VALUE_SIZE < BLOCK_V:
            v_NV = tl.load(v_pointers_NV, mask=(component_V < VALUE_SIZE)[None, :], other=0.0)
        else:
            v_NV = tl.load(v_pointers_NV)
        score_MN = dot(q_MD, _widened(k_DN, q_MD.dtype))
        if CHANGES_SCORES:
            score_MN = _changed_scores(score_MN * scale, soft_cap, slope_M, position_N, position_M) * LOG2_E
        else:
            score_MN = score_MN * (scale * LOG2_E)
        if IS_MASKED:
            # A key after the query lies at a negative distance, unsigned a huge one: one comparison does for both ends.
            distance_MN = (position_M[:, None] - position_N[None, :]).to(tl.uint32, bitcast=True)
            score_MN = tl.where(distance_MN < window.to(tl.uint32, bitcast=True), score_MN, -float("inf"))
        new_max_M = tl.maximum(max_M, tl.max(score_MN, 1))
        # A row that has seen nothing yet has no maximum: infinity less infinity would be NaN.
        safe_max_M = tl.where(new_max_M == -float("inf"), 0.0, new_max_M)
        weight_MN = tl.exp2(score_MN - safe_max_M[:, None])
        correction_M = tl.exp2(max_M - safe_max_M)
        acc_MV = acc_MV * correction_M[:, None] + dot(weight_MN.to(q_MD.dtype), _widened(v_NV, q_MD.dtype))
        sum_M = sum_M * correction_M + tl.sum(weight_MN, 1)
        max_M = new_max_M
    return acc_MV, max_M, sum_M


@triton.jit
def _widened(x, dtype: tl.constexpr):
    """Return `x` in `dtype`. float8_e4m3fn is read by its bits: in float16's place they are the same number over 2**8.

    Where the GPU has no instruction for it, Triton's own conversion takes so many registers that they spill. A NaN,
    which stands only for a stored NaN, becomes 480.
    """
    if x.dtype == tl.float8e4nv:
        bits = x.to(tl.uint8, bitcast=True).to(tl.uint16)
        half = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True)
        return (half * 256).to(dtype)
    return x.to(dtype)


@triton.jit
def _changed_scores(score_MN, soft_cap, slope_M, position_N, position_M):
    """Return scores after the soft cap (none if 0) and ALiBi's slopes."""
    # tanh, by a power of 2 that cannot overflow
    power_MN = tl.exp2(tl.abs(score_MN) * (-2 * LOG2_E / tl.where(soft_cap > 0, soft_cap, 1.0)))
    capped_MN = soft_cap * ((1 - power_MN) / (1 + power_MN))
    score_MN = tl.where(soft_cap > 0, tl.where(score_MN < 0, -capped_MN, capped_MN), score_MN)
    return score_MN + slope_M[:, None] * (position_N[None, :] - position_M[:, None]).to(tl.float32)


@triton.jit
def _begin(sinks, head_M, has_sink_M):
    """Return maximum and sum of rows that have seen nothing but their sinks: scores without a value."""
    max_M = tl.load(sinks + head_M, mask=has_sink_M, other=-float("inf")) * LOG2_E
    return max_M, has_sink_M.to(tl.float32)


@triton.jit
def _head_tile(index, group_size, heads_of_tile):
    """Return the key/value head of a head tile, and the first of its group's query heads in the tile."""
    tiles_of_group = tl.cdiv(group_size, heads_of_tile)
    return index // tiles_of_group, index % tiles_of_group * heads_of_tile


@triton.jit
def _find_sequence(cu_seqlens_q, num_seqs, queries_of_tile, tile):
    """Return the sequence that a tile belongs to: that of s begin at cu_seqlens_q[s] // queries_of_tile + s."""
    low = 0
    high = num_seqs
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(cu_seqlens_q + middle) // queries_of_tile + middle <= tile:
            low = middle
        else:
            high = middle
    return low


@triton.jit
def _split(seq_len, window, num_splits, TILE: tl.constexpr):
    """Return how a context is split: first key, first and end tile, tiles of a split, splits with any (at least 1)."""
    first_key = tl.maximum(seq_len - window, 0)
    first_tile = first_key // TILE
    end_tile = tl.cdiv(seq_len, TILE)
    tiles_of_split = tl.maximum(tl.cdiv(end_tile - first_tile, num_splits), SPLIT_TILES)
    tiles_of_split = tl.where(num_splits == 1, end_tile - first_tile, tiles_of_split)
    used_splits = tl.maximum(tl.cdiv(end_tile - first_tile, tl.maximum(tiles_of_split, 1)), 1)
    return first_key, first_tile, end_tile, tiles_of_split, used_splits


@triton.jit
def _load_queries(q, token_M, head_M, is_row_M, q_stride, head_size, BLOCK_D: tl.constexpr):
    component_D = tl.arange(0, BLOCK_D)
    pointers_MD = q + (token_M.to(tl.int64) * q_stride + head_M * head_size)[:, None] + component_D[None, :]
    return tl.load(pointers_MD, mask=is_row_M[:, None] & (component_D < head_size)[None, :], other=0.0)


@triton.jit
def _store_rows(out, out_MV, row_M, is_row_M, value_size, BLOCK_V: tl.constexpr):
    component_V = tl.arange(0, BLOCK_V)
    pointers_MV = out + (row_M.to(tl.int64) * value_size)[:, None] + component_V[None, :]
    mask_MV = is_row_M[:, None] & (component_V < value_size)[None, :]
    tl.store(pointers_MV, out_MV.to(out.dtype.element_ty), mask=mask_MV)
