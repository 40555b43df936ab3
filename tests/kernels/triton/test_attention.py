import pytest
import torch
from torch import Tensor

from octavo.kernels import reference
from octavo.kernels.triton import attention, kv
from octavo.kernels.triton.attention import choose_num_splits, paged_attention
from octavo.kernels.triton.checks import FLOAT8
from tests.fakes.paged_batches import paged_batch, random_sequences

FLOAT32, FLOAT16, BFLOAT16 = torch.float32, torch.float16, torch.bfloat16
# Weights and outputs are rounded to the dtype of the queries; the interpreter rounds bfloat16 towards zero.
TOLERANCE = {
    FLOAT32: {"rtol": 1e-5, "atol": 5e-6},
    FLOAT16: {"rtol": 2**-9, "atol": 2e-3},
    BFLOAT16: {"rtol": 2**-6, "atol": 2e-2},
}
# A prompt, a chunk over more tiles of keys than one, single steps (also the very first).
MIXED = [(0, 0, 19), (1, 145, 150), (2, 36, 37), (3, 0, 1)]
SINGLE = [(0, 18, 19), (1, 149, 150), (3, 0, 1)]


@pytest.mark.parametrize(
    ("heads", "sizes", "block_size", "dtype", "cache_dtype", "window", "changes"),
    [
        ((4, 2), (64, 64), 16, BFLOAT16, BFLOAT16, None, ""),
        ((3, 1), (80, 80), 16, FLOAT16, FLOAT16, 40, "soft cap"),
        ((2, 2), (96, 96), 32, BFLOAT16, FLOAT8, 1, "sinks"),
        ((6, 1), (128, 128), 1024, FLOAT16, FLOAT8, None, "ALiBi"),
        ((1, 1), (192, 128), 24, BFLOAT16, BFLOAT16, 100, ""),
        ((2, 1), (256, 256), 16, FLOAT16, FLOAT16, None, "sinks soft cap ALiBi"),
        ((4, 2), (20, 24), 1, FLOAT32, FLOAT32, 33, "sinks ALiBi"),
        ((17, 1), (7, 9), 7, FLOAT32, FLOAT32, 50, "soft cap"),
        ((70, 1), (1, 1), 16, BFLOAT16, BFLOAT16, 64, ""),
    ],
    ids=str,
)
@pytest.mark.parametrize("computed", [MIXED, SINGLE], ids=["mixed", "single"])
def test_attention_equals_reference(
    computed: list[tuple[int, int, int]],
    heads: tuple[int, int],
    sizes: tuple[int, int],
    block_size: int,
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
    window: int | None,
    changes: str,
) -> None:
    batch = _batch([19, 150, 37, 1], computed, heads, sizes, block_size, dtype, cache_dtype)
    options = _options(heads[0], changes)
    scale = 0.3 if sizes[0] < 64 else 0.1
    out = paged_attention(*batch, scale, window, **options)
    assert (out.dtype, out.shape) == (dtype, (*batch[0].shape[:2], sizes[1]))
    expected = reference.paged_attention(*_plain(batch), scale, window, **options)
    torch.testing.assert_close(out, expected, **TOLERANCE[dtype])


@pytest.mark.parametrize(("window", "dtype"), [(None, BFLOAT16), (70, FLOAT32), (400, FLOAT16)], ids=str)
def test_split_contexts_equal_reference(window: int | None, dtype: torch.dtype) -> None:
    lengths = [700, 3, 300]
    batch = _batch(
        lengths, [(seq, end - 1, end) for seq, end in enumerate(lengths)], (2, 1), (32, 72), 16, dtype, dtype
    )
    tile = attention.choose_tiling(True, 32, 128, dtype, dtype).keys
    assert choose_num_splits(3, batch[3].shape[1] * 16, tile, attention.num_processors(batch[0].device)) > 1
    options = _options(2, "sinks")
    expected = reference.paged_attention(*_plain(batch), 0.2, window, **options)
    torch.testing.assert_close(paged_attention(*batch, 0.2, window, **options), expected, **TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [FLOAT16, BFLOAT16], ids=str)
def test_every_number_of_a_float8_cache_is_read_as_it_is(dtype: torch.dtype) -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    codes[[0x7F, 0xFF]] = 0  # NaN
    query = torch.ones(1, 1, 16, dtype=dtype)
    keys = torch.zeros(1, 1, 16, 16).to(FLOAT8)  # NKDP
    values = torch.zeros(1, 1, 16, 256, dtype=torch.uint8)  # NKPV
    values[0, 0, 0] = codes
    index = {
        name: torch.tensor(row, dtype=torch.int32) for name, row in (("table", [[0]]), ("cu", [0, 1]), ("len", [1]))
    }
    out = paged_attention(query, keys, values.view(FLOAT8), index["table"], index["cu"], index["len"], 0.1)
    assert torch.equal(out[0, 0], codes.view(FLOAT8).to(dtype))


def test_splits_fill_the_device_but_are_not_too_short() -> None:
    assert choose_num_splits(8, 131_072, 64, 132) == 66
    assert choose_num_splits(8, 1_000, 64, 132) == 3
    assert choose_num_splits(256 * 8, 131_072, 64, 132) == 1
    assert choose_num_splits(1, 10**6, 64, 132) == attention.MAX_SPLITS


@pytest.mark.parametrize("computed", [[(0, 90, 100)], [(0, 99, 100)]], ids=["chunk", "single"])
def test_blocks_before_the_window_and_their_table_entries_are_not_read(computed: list[tuple[int, int, int]]) -> None:
    batch = _batch([100], computed, (2, 1), (16, 16), 8, FLOAT32, FLOAT32)
    expected = reference.paged_attention(*_plain(batch), 0.3, 20)
    tables = batch[3]
    tables[0, : (computed[0][1] - 19) // 8] = 2**30  # to read there would be a segmentation fault
    tables[0, 13:] = 2**30
    torch.testing.assert_close(paged_attention(*batch, 0.3, 20), expected, **TOLERANCE[FLOAT32])


def test_rows_without_a_sequence_are_zero() -> None:
    batch = _batch([30, 20, 1], [(0, 29, 30), (1, 19, 20), (2, 0, 1)], (2, 1), (16, 16), 8, FLOAT32, FLOAT32)
    expected = reference.paged_attention(*_plain(batch), 0.3)
    batch[5][2] = 0
    out = paged_attention(*batch, 0.3)
    torch.testing.assert_close(out[:2], expected[:2], **TOLERANCE[FLOAT32])
    assert not out[2].any()


def test_large_scores_do_not_overflow_and_queries_may_be_a_slice() -> None:
    q, *rest = _batch([90], [(0, 60, 90)], (2, 2), (16, 16), 16, FLOAT32, FLOAT32)
    q *= 1e4
    qkv = torch.cat([q, q], dim=1)
    expected = reference.paged_attention(*_plain([q, *rest]), 1.0)
    torch.testing.assert_close(paged_attention(qkv[:, :2], *rest, 1.0), expected, rtol=1e-4, atol=1e-4)


def test_what_does_not_fit_attention_is_refused() -> None:
    q, k_cache, v_cache, *rest = _batch([20], [(0, 19, 20)], (4, 2), (16, 16), 16, FLOAT32, FLOAT32)
    tables, cu_seqlens_q, seq_lens = rest
    with pytest.raises(ValueError, match=r"k_cache is torch\.float32, expected torch\.float16"):
        paged_attention(q.half(), k_cache, v_cache, *rest, 0.1)
    with pytest.raises(ValueError, match="float64"):
        paged_attention(q.double(), k_cache, v_cache, *rest, 0.1)
    with pytest.raises(ValueError, match="k_cache has shape"):
        paged_attention(q, k_cache, v_cache[1:], *rest, 0.1)
    with pytest.raises(ValueError, match="not contiguous"):
        paged_attention(q, k_cache[..., ::2], v_cache[:, :, ::2], *rest, 0.1)
    with pytest.raises(ValueError, match="evenly"):
        paged_attention(q[:, :3], k_cache, v_cache, *rest, 0.1)
    with pytest.raises(ValueError, match=r"block_tables_SM is torch\.int64"):
        paged_attention(q, k_cache, v_cache, tables.long(), cu_seqlens_q, seq_lens, 0.1)
    with pytest.raises(ValueError, match="sinks_H has shape"):
        paged_attention(q, k_cache, v_cache, *rest, 0.1, sinks_H=torch.zeros(3))
    with pytest.raises(ValueError, match="sliding_window"):
        paged_attention(q, k_cache, v_cache, *rest, 0.1, 0)
    wide = _batch([20], [(0, 19, 20)], (1, 1), (257, 16), 16, FLOAT32, FLOAT32)
    with pytest.raises(ValueError, match="up to 256"):
        paged_attention(*wide, 0.1)
    with pytest.raises(ValueError, match="expected meta"):
        paged_attention(q.to("meta"), k_cache, v_cache, *rest, 0.1)


@pytest.mark.parametrize(
    ("heads", "sizes", "rotary_size", "block_size", "dtype", "cache_dtype"),
    [
        ((4, 2), (64, 64), 64, 16, BFLOAT16, BFLOAT16),
        ((6, 2), (80, 96), 32, 1, FLOAT16, FLOAT16),
        ((3, 3), (10, 7), 6, 24, FLOAT32, FLOAT32),
        ((9, 1), (128, 128), 128, 1024, BFLOAT16, FLOAT8),
        ((2, 1), (96, 256), 48, 32, FLOAT16, FLOAT8),
    ],
    ids=str,
)
def test_rotating_and_storing_equal_reference(
    heads: tuple[int, int],
    sizes: tuple[int, int],
    rotary_size: int,
    block_size: int,
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
) -> None:
    generator = torch.Generator().manual_seed(1)
    qk = torch.randn(5, sum(heads), sizes[0], generator=generator).to(cache_dtype).to(dtype)
    q, k = qk[:, : heads[0]], qk[:, heads[0] :]
    v = torch.randn(5, heads[1], sizes[1], generator=generator).to(cache_dtype).to(dtype)
    slots = torch.tensor([2 * block_size, -1, 3 * block_size - 1, 0, 4 * block_size - 1])
    caches, expected = (
        (
            torch.zeros(4, heads[1], sizes[0], block_size, dtype=cache_dtype),
            torch.zeros(4, heads[1], block_size, sizes[1], dtype=cache_dtype),
        )
        for _ in range(2)
    )
    kv.store_kv(k, v, *caches, slots)
    reference.store_kv(k, v, *expected, slots)
    assert all(torch.equal(cache.float(), wanted.float()) for cache, wanted in zip(caches, expected, strict=True))

    quarters = torch.randint(4, (9, rotary_size // 2), generator=generator) * (torch.pi / 2)
    table = torch.cat([quarters.cos(), quarters.sin()], dim=1).round()  # all exact, in whatever dtype
    if cache_dtype is not FLOAT8:
        table = torch.randn(9, rotary_size, generator=generator)
    positions = torch.tensor([8, 1, 0, 5, 5])
    wanted_q = q.clone()
    reference.rotate_and_store_kv(wanted_q, k.clone(), v, table, positions, *expected, slots)
    kv.rotate_and_store_kv(q, k, v, table, positions, *caches, slots)
    last_bit = torch.finfo(dtype).eps  # the interpreter rounds bfloat16 towards zero
    for rotated, wanted in zip([q, *caches], [wanted_q, *expected], strict=True):
        torch.testing.assert_close(rotated.float(), wanted.float(), rtol=last_bit, atol=1e-6)


def test_what_does_not_fit_storing_is_refused() -> None:
    k = torch.zeros(3, 2, 8)
    k_cache, v_cache, slots = torch.zeros(4, 2, 8, 4), torch.zeros(4, 2, 4, 8), torch.zeros(3, dtype=torch.int64)
    table, positions = torch.zeros(9, 8), torch.zeros(3, dtype=torch.int64)
    with pytest.raises(ValueError, match="v_cache has shape"):
        kv.store_kv(k, k[..., :7].contiguous(), k_cache, v_cache, slots)
    with pytest.raises(ValueError, match="side by side"):
        kv.store_kv(k.transpose(1, 2).contiguous().transpose(1, 2), k, k_cache, v_cache, slots)
    with pytest.raises(ValueError, match=r"slot_mapping_T is torch\.int32"):
        kv.store_kv(k, k, k_cache, v_cache, slots.int())
    with pytest.raises(ValueError, match=r"k_cache is torch\.float16"):
        kv.store_kv(k, k, k_cache.half(), v_cache, slots)
    with pytest.raises(ValueError, match="10 columns"):
        kv.rotate_and_store_kv(k.clone(), k, k, torch.zeros(9, 10), positions, k_cache, v_cache, slots)
    with pytest.raises(ValueError, match=r"cos_sin_PR is torch\.float16"):
        kv.rotate_and_store_kv(k.clone(), k, k, table.half(), positions, k_cache, v_cache, slots)


def _batch(
    lengths: list[int],
    computed: list[tuple[int, int, int]],
    heads: tuple[int, int],
    sizes: tuple[int, int],
    block_size: int,
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
) -> list[Tensor]:
    sequences = random_sequences(lengths, *heads, sizes[0], dtype, sizes[1])
    q, k_cache, v_cache, *rest = paged_batch(sequences, computed, block_size)
    return [q, k_cache.to(cache_dtype), v_cache.to(cache_dtype), *rest]


def _plain(batch: list[Tensor]) -> list[Tensor]:
    """Return the batch as the reference takes it: it multiplies masked values, NaN in unused slots, by 0."""
    return [tensor.float().nan_to_num(0.0).to(batch[0].dtype) for tensor in batch[:3]] + batch[3:]


def _options(num_heads: int, changes: str) -> dict[str, float | Tensor]:
    generator = torch.Generator().manual_seed(2)
    sinks, slopes = torch.randn(num_heads, generator=generator), torch.rand(num_heads, generator=generator)
    every = {"soft cap": ("soft_cap", 5.0), "sinks": ("sinks_H", sinks), "ALiBi": ("alibi_slopes_H", slopes / 8)}
    return dict(option for name, option in every.items() if name in changes)
