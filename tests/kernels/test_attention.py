from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from octavo.kernels import cpu, reference
from tests.fakes.paged_batches import Sequences, paged_batch, random_sequences

FLOAT32, BFLOAT16 = torch.float32, torch.bfloat16
TOLERANCE = {FLOAT32: {"rtol": 1e-5, "atol": 2e-6}, BFLOAT16: {"rtol": 2**-7, "atol": 1e-3}}

# A prompt, a chunk, single steps (also the very first), chunks across tiles and partitions.
LENGTHS = [37, 70, 130, 1, 601, 33]
MIXED = [(0, 0, 37), (1, 65, 70), (2, 129, 130), (3, 0, 1), (4, 497, 601), (5, 30, 33)]


@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16])
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_size", "value_size", "block_size", "window"),
    [
        (9, 3, 64, 64, 16, None),
        (2, 2, 16, 16, 1, None),
        (4, 1, 80, 80, 8, 40),
        (8, 1, 96, 96, 32, 1),
        (16, 2, 128, 128, 16, 64),
        (3, 1, 256, 256, 32, None),
        (4, 4, 72, 72, 16, 520),
        (6, 2, 20, 20, 8, 33),
        (4, 2, 40, 24, 16, None),
        (2, 1, 24, 72, 32, 500),
        (71, 1, 7, 9, 24, 31),
    ],
)
def test_mixed_batch_equals_reference(
    num_heads: int,
    num_kv_heads: int,
    head_size: int,
    value_size: int,
    block_size: int,
    window: int | None,
    dtype: torch.dtype,
) -> None:
    sequences = random_sequences(LENGTHS, num_heads, num_kv_heads, head_size, dtype, value_size)
    batch = paged_batch(sequences, MIXED, block_size)
    scale = head_size**-0.5
    expected = reference.paged_attention(*_without_nan(batch), scale, window)
    torch.testing.assert_close(cpu.paged_attention(*batch, scale, window), expected, **TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16])
@pytest.mark.parametrize("features", ["cap", "sinks", "slopes", "cap sinks slopes"])
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_size", "value_size", "block_size", "window"),
    [
        (16, 1, 192, 128, 16, None),
        (8, 4, 80, 80, 8, 40),
        (4, 4, 7, 9, 24, None),
        (15, 3, 64, 64, 32, 500),
    ],
)
def test_capped_and_sloped_scores_and_sinks_equal_reference(
    num_heads: int,
    num_kv_heads: int,
    head_size: int,
    value_size: int,
    block_size: int,
    window: int | None,
    features: str,
    dtype: torch.dtype,
) -> None:
    sequences = random_sequences(LENGTHS, num_heads, num_kv_heads, head_size, dtype, value_size)
    batch, given = paged_batch(sequences, MIXED, block_size), _features(features, num_heads)
    scale = head_size**-0.5
    expected = reference.paged_attention(*_without_nan(batch), scale, window, **given)
    torch.testing.assert_close(cpu.paged_attention(*batch, scale, window, **given), expected, **TOLERANCE[dtype])
    plain = cpu.paged_attention(*batch, scale, window)
    assert (plain.float() - expected.float()).abs().max() > 0.05


@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16])
def test_sinks_far_above_and_below_the_scores_take_all_or_nothing(dtype: torch.dtype) -> None:
    sequences = random_sequences([600], 3, 1, 32, dtype)
    batch = paged_batch(sequences, [(0, 0, 600)], 16)
    out = cpu.paged_attention(*batch, 0.1, sinks_H=torch.tensor([200.0, -200.0, -torch.inf]))
    plain = cpu.paged_attention(*batch, 0.1)
    assert out[:, 0].abs().max() < 1e-30
    assert torch.equal(out[:, 1:], plain[:, 1:])


@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16])
@pytest.mark.parametrize(("window", "features"), [(None, ""), (100, ""), (700, ""), (None, "cap sinks slopes")])
def test_bits_do_not_depend_on_batch_chunks_blocks_or_threads(
    window: int | None, features: str, dtype: torch.dtype, two_threads: None
) -> None:
    length = 1_100
    sequences = random_sequences([length, 300, 45], 6, 2, 64, dtype)
    attend = partial(_attend_with, **_features(features, 6))
    whole = attend(sequences, [(0, 0, length)], 16, window)
    for block_size, chunk, num_threads in ((1, 333, 2), (8, 64, 1), (16, 7, 2), (32, 50, 1), (24, 1_000, 2)):
        cpu.set_num_threads(num_threads)
        for start in range(max(0, length - 4 * chunk), length, chunk):
            end = min(start + chunk, length)
            assert torch.equal(attend(sequences, [(0, start, end)], block_size, window), whole[start:end])
    for position in (0, 1, 31, 32, 99, 100, 511, 512, 700, 1_023, 1_024, 1_099):
        neighbours = [(1, 0, 300), (0, position, position + 1), (2, 44, 45), (1, 250, 300)]
        for block_size, num_threads in ((1, 1), (8, 2), (16, 1), (32, 2)):
            cpu.set_num_threads(num_threads)
            single = attend(sequences, [(0, position, position + 1)], block_size, window)
            assert torch.equal(single, whole[position : position + 1])
        among = attend(sequences, neighbours, 16, window, seed=position)
        assert torch.equal(among[300:301], single)


@pytest.mark.parametrize("features", ["", "cap sinks slopes"])
@pytest.mark.parametrize("num_kv_heads", [1, 2, 8])
def test_bits_of_a_long_single_step_do_not_depend_on_the_split(
    num_kv_heads: int, features: str, two_threads: None
) -> None:
    length = 3_000
    sequences = random_sequences([length], 8, num_kv_heads, 80, FLOAT32)
    attend = partial(_attend_with, **_features(features, 8))
    step = [(0, length - 1, length)]
    split = attend(sequences, step, 16, None)
    together = attend(sequences, step * 9, 16, None)
    cpu.set_num_threads(1)
    assert torch.equal(split, attend(sequences, step, 16, None))
    for copy in together:
        assert torch.equal(split[0], copy)


@pytest.mark.parametrize("window", [None, 700])
def test_bits_of_steps_of_unequal_lengths_do_not_depend_on_how_they_are_divided(
    window: int | None, two_threads: None
) -> None:
    lengths = [200, 40, 3_000, 1, 600, 200, 1_100]
    sequences = random_sequences(lengths, 6, 3, 64, BFLOAT16)
    steps = [(seq, length - 1, length) for seq, length in enumerate(lengths)]
    chunk = (2, 1_000, 1_020)
    divided = _attend_with(sequences, steps, 16, window)  # the longest contexts are too much for one task
    beside_much = _attend_with(sequences, [*steps, chunk], 16, window)
    cpu.set_num_threads(1)
    for seq, step in enumerate(steps):
        alone = _attend_with(sequences, [step], 16, window)[0]
        assert torch.equal(divided[seq], alone)
        assert torch.equal(beside_much[seq], alone)
    assert torch.equal(_attend_with(sequences, [chunk], 16, window), beside_much[len(steps) :])


def test_future_keys_and_values_take_no_part() -> None:
    sequences = random_sequences([40], 2, 1, 32, FLOAT32)
    before = _attend_with(sequences, [(0, 0, 40)], 16, None)
    sequences.k[0][25:] = torch.nan
    sequences.v[0][25:] = torch.inf
    after = _attend_with(sequences, [(0, 0, 40)], 16, None)
    assert torch.equal(after[:25], before[:25])


def test_large_scores_do_not_overflow() -> None:
    sequences = random_sequences([90], 2, 2, 64, FLOAT32)
    sequences.q[0].mul_(1e4)
    batch = paged_batch(sequences, [(0, 0, 90)], 16)
    expected = reference.paged_attention(*_without_nan(batch), 1.0)
    torch.testing.assert_close(cpu.paged_attention(*batch, 1.0), expected, rtol=1e-4, atol=1e-4)


def test_queries_may_be_a_slice() -> None:
    sequences = random_sequences([20], 4, 2, 32, FLOAT32)
    q, *rest = paged_batch(sequences, [(0, 0, 20)], 16)
    qkv = torch.cat([q, q], dim=1)
    assert torch.equal(cpu.paged_attention(qkv[:, :4], *rest, 0.1), cpu.paged_attention(q, *rest, 0.1))


def test_sequences_without_queries_are_skipped() -> None:
    sequences = random_sequences([20, 5], 4, 2, 32, FLOAT32)
    out = _attend_with(sequences, [(1, 5, 5), (0, 19, 20), (1, 5, 5)], 16, None)
    assert torch.equal(out, _attend_with(sequences, [(0, 19, 20)], 16, None))


@pytest.mark.parametrize("wrong", ["block", "negative block", "seq_len", "too few tokens", "cu_seqlens_q"])
def test_indices_that_point_outside_are_refused(wrong: str) -> None:
    sequences = random_sequences([20, 20], 4, 2, 32, FLOAT32)
    batch = paged_batch(sequences, [(0, 19, 20), (1, 15, 20)], 16)
    _, k_cache, _, tables, cu_seqlens_q, seq_lens = batch
    match wrong:
        case "block":
            tables[1, 1] = len(k_cache)
        case "negative block":
            tables[1, 0] = -1
        case "seq_len":
            seq_lens[1] = tables.shape[1] * 16 + 1
        case "too few tokens":
            seq_lens[1] = 4
        case "cu_seqlens_q":
            cu_seqlens_q[2] = 7
    with pytest.raises(IndexError, match="sequence 1"):
        cpu.paged_attention(*batch, 0.1)


def test_shapes_and_dtypes_that_do_not_fit_are_refused() -> None:
    sequences = random_sequences([20], 4, 2, 32, FLOAT32)
    q, k_cache, v_cache, tables, cu_seqlens_q, seq_lens = paged_batch(sequences, [(0, 19, 20)], 16)
    with pytest.raises(ValueError, match="bfloat16"):
        cpu.paged_attention(q.bfloat16(), k_cache, v_cache, tables, cu_seqlens_q, seq_lens, 0.1)
    with pytest.raises(ValueError, match="v_cache has shape"):
        cpu.paged_attention(q, k_cache, v_cache[1:], tables, cu_seqlens_q, seq_lens, 0.1)
    with pytest.raises(ValueError, match="evenly"):
        cpu.paged_attention(q[:, :3], k_cache, v_cache, tables, cu_seqlens_q, seq_lens, 0.1)
    with pytest.raises(ValueError, match="int32"):
        cpu.paged_attention(q, k_cache, v_cache, tables.long(), cu_seqlens_q, seq_lens, 0.1)
    with pytest.raises(ValueError, match="sliding_window"):
        cpu.paged_attention(q, k_cache, v_cache, tables, cu_seqlens_q, seq_lens, 0.1, 0)
    with pytest.raises(ValueError, match="soft_cap"):
        cpu.paged_attention(q, k_cache, v_cache, tables, cu_seqlens_q, seq_lens, 0.1, soft_cap=0.0)
    with pytest.raises(ValueError, match="sinks has shape"):
        cpu.paged_attention(q, k_cache, v_cache, tables, cu_seqlens_q, seq_lens, 0.1, sinks_H=torch.ones(2))
    slopes = torch.ones(4, dtype=BFLOAT16)
    with pytest.raises(ValueError, match="alibi_slopes is"):
        cpu.paged_attention(q, k_cache, v_cache, tables, cu_seqlens_q, seq_lens, 0.1, alibi_slopes_H=slopes)
    with pytest.raises(ValueError, match="on meta"):
        cpu.paged_attention(q.to("meta"), k_cache, v_cache, tables, cu_seqlens_q, seq_lens, 0.1)


def _attend_with(
    sequences: Sequences,
    computed: list[tuple[int, int, int]],
    block_size: int,
    window: int | None,
    seed: int = 0,
    **given: Any,
) -> Tensor:
    return cpu.paged_attention(*paged_batch(sequences, computed, block_size, seed), 0.125, window, **given)


def _features(names: str, num_heads: int) -> dict[str, Any]:
    """Return the optional arguments that `names` lists."""
    values = {
        "cap": ("soft_cap", 1.0),
        "sinks": ("sinks_H", torch.linspace(-2.0, 6.0, num_heads)),
        "slopes": ("alibi_slopes_H", torch.linspace(0.01, 0.5, num_heads)),
    }
    return dict(values[name] for name in names.split())


def _without_nan(batch: tuple[Tensor, ...]) -> list[Tensor]:
    """Return the batch with zeros in unused slots: the reference multiplies masked values by 0."""
    return [tensor.nan_to_num(0.0) if tensor.is_floating_point() else tensor for tensor in batch]
