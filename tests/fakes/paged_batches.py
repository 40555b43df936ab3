"""Paged batches for the tests of attention: sequences laid out in scattered blocks among rubbish."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sequences:
    """Whole sequences: queries, keys and values of every token."""

    q: list[Tensor]
    k: list[Tensor]
    v: list[Tensor]


def random_sequences(
    lengths: list[int],
    num_heads: int,
    num_kv_heads: int,
    head_size: int,
    dtype: torch.dtype,
    value_size: int | None = None,
) -> Sequences:
    generator = torch.Generator().manual_seed(1)

    def draw(heads: int, size: int) -> list[Tensor]:
        return [torch.randn(length, heads, size, generator=generator).to(dtype) for length in lengths]

    return Sequences(
        draw(num_heads, head_size), draw(num_kv_heads, head_size), draw(num_kv_heads, value_size or head_size)
    )


def paged_batch(
    sequences: Sequences, computed: list[tuple[int, int, int]], block_size: int, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return q, caches, tables, cu_seqlens_q and seq_lens for a step.

    `computed` holds (sequence, first, end): its queries `first` to `end` are in the step, its keys up to `end` in the
    cache. Blocks are scattered and every slot that holds no token is NaN.
    """
    generator = torch.Generator().manual_seed(seed)
    num_blocks = [-(-end // block_size) for _, _, end in computed]
    order = torch.randperm(sum(num_blocks) + 3, generator=generator).to(torch.int32)
    k, v = sequences.k[0], sequences.v[0]
    k_cache = torch.full((len(order), k.shape[1], k.shape[2], block_size), torch.nan, dtype=k.dtype)
    v_cache = torch.full((len(order), v.shape[1], block_size, v.shape[2]), torch.nan, dtype=v.dtype)
    tables = torch.zeros(len(computed), max(num_blocks) + 1, dtype=torch.int32)
    for row, (seq, _, end) in enumerate(computed):
        first_block = sum(num_blocks[:row])
        blocks = order[first_block : first_block + num_blocks[row]]
        tables[row, : len(blocks)] = blocks
        position = torch.arange(end)
        block, offset = blocks[position // block_size].long(), position % block_size
        k_cache[block, :, :, offset] = sequences.k[seq][:end]
        v_cache[block, :, offset] = sequences.v[seq][:end]
    q = torch.cat([sequences.q[seq][first:end] for seq, first, end in computed])
    lengths = torch.tensor([0] + [end - first for _, first, end in computed])
    seq_lens = torch.tensor([end for _, _, end in computed], dtype=torch.int32)
    return q, k_cache, v_cache, tables, lengths.cumsum(0).to(torch.int32), seq_lens
