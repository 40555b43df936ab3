from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from octavo.kernels import cpu, reference

FLOAT32, BFLOAT16 = torch.float32, torch.bfloat16
DTYPES = pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16])
TOLERANCE = {FLOAT32: {"rtol": 2e-6, "atol": 1e-6}, BFLOAT16: {"rtol": 2**-7, "atol": 1e-6}}


def draw(*shape: int, dtype: torch.dtype = FLOAT32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


@DTYPES
@pytest.mark.parametrize("shape", [(1, 576), (5, 64), (3, 1), (7, 33), (300, 576), (4, 3, 20), (0, 16)])
def test_rms_norm_equals_reference(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, weight = draw(*shape, dtype=dtype), draw(shape[-1], dtype=dtype)
    out = cpu.rms_norm(x, weight, 1e-5)
    torch.testing.assert_close(out, reference.rms_norm(x, weight, 1e-5), **TOLERANCE[dtype])


@DTYPES
def test_rms_norm_takes_heads_that_are_a_slice(dtype: torch.dtype) -> None:
    qkv, weight = draw(6, 9, 20, dtype=dtype), draw(20, dtype=dtype)
    for view in (qkv[:, 2:5], qkv[:, 3:4], qkv.transpose(0, 1), qkv[:, :, ::2].unflatten(0, (2, 3))):
        weight_D = weight[: view.shape[-1]]
        out = cpu.rms_norm(view, weight_D, 1e-6)
        assert torch.equal(out, cpu.rms_norm(view.contiguous(), weight_D, 1e-6))


@DTYPES
@pytest.mark.parametrize("shape", [(1, 576), (9, 50), (200, 576)])
def test_add_rms_norm_equals_reference(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x, weight, residual = draw(*shape, dtype=dtype), draw(shape[-1], dtype=dtype), draw(*shape)
    expected_residual = residual.clone()
    expected = reference.add_rms_norm(x, expected_residual, weight, 1e-5).to(dtype)
    out = cpu.add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(residual, expected_residual)
    torch.testing.assert_close(out, reference.rms_norm(residual, weight, 1e-5).to(dtype), **TOLERANCE[dtype])
    torch.testing.assert_close(out, expected, **TOLERANCE[dtype])


@DTYPES
@pytest.mark.parametrize("num_tokens", [1, 40, 400])
@pytest.mark.parametrize(("head_size", "rotary_size"), [(64, 64), (64, 32), (80, 20), (20, 14)])
def test_rotary_embedding_equals_reference(
    num_tokens: int, head_size: int, rotary_size: int, dtype: torch.dtype
) -> None:
    cos_sin, positions = draw(500, rotary_size), torch.randperm(500)[:num_tokens]
    qkv = draw(num_tokens, 7, head_size, dtype=dtype)
    expected = qkv.clone()
    reference.rotary_embedding(expected[:, :4], expected[:, 4:6], cos_sin, positions)
    cpu.rotary_embedding(qkv[:, :4], qkv[:, 4:6], cos_sin, positions)
    torch.testing.assert_close(qkv, expected, **TOLERANCE[dtype])


@DTYPES
@pytest.mark.parametrize("shape", [(1, 1536), (5, 7), (33, 40), (50, 1536)])
def test_silu_and_mul_equals_reference(shape: tuple[int, int], dtype: torch.dtype) -> None:
    gate_up = 20 * draw(shape[0], 2 * shape[1], dtype=dtype)
    torch.testing.assert_close(cpu.silu_and_mul(gate_up), reference.silu_and_mul(gate_up), **TOLERANCE[dtype])


def test_silu_of_large_numbers() -> None:
    gate_up = torch.tensor([[-1e4, -100.0, 0.0, 100.0, 1e30, torch.inf, torch.nan, 1, 1, 1, 1, 1, 1, 1]])
    out = cpu.silu_and_mul(gate_up)
    expected = torch.tensor([[0.0, 0.0, 0.0, 100.0, 1e30, torch.inf, torch.nan]])
    torch.testing.assert_close(out, expected, rtol=1e-6, atol=1e-30, equal_nan=True)


@DTYPES
@pytest.mark.parametrize("block_size", [1, 8, 16, 32])
@pytest.mark.parametrize(("num_tokens", "head_size", "value_size"), [(1, 64, 64), (50, 20, 72), (700, 64, 64)])
def test_store_kv_equals_reference(
    num_tokens: int, head_size: int, value_size: int, block_size: int, dtype: torch.dtype
) -> None:
    num_blocks = -(-num_tokens // block_size) + 3
    slots = torch.randperm(num_blocks * block_size)[:num_tokens]
    slots[::5] = -1
    k, v = draw(num_tokens, 5, head_size, dtype=dtype)[:, 1:4], draw(num_tokens, 3, value_size, dtype=dtype)
    caches = (
        draw(num_blocks, 3, head_size, block_size, dtype=dtype),
        draw(num_blocks, 3, block_size, value_size, dtype=dtype),
    )
    expected = [cache.clone() for cache in caches]
    reference.store_kv(k, v, *expected, slots)
    cpu.store_kv(k, v, *caches, slots)
    assert torch.equal(caches[0], expected[0])
    assert torch.equal(caches[1], expected[1])


def _rms_norm(x: Tensor) -> Tensor:
    return cpu.rms_norm(x, torch.linspace(0, 2, x.shape[1]).to(x.dtype), 1e-5)


def _add_rms_norm(x: Tensor) -> Tensor:
    residual = x.float() / 3
    out = cpu.add_rms_norm(x, residual, torch.linspace(0, 2, x.shape[1]).to(x.dtype), 1e-5)
    return torch.cat([out.float(), residual], dim=1)


def _rotary_embedding(x: Tensor) -> Tensor:
    q, k = x.clone().unflatten(1, (-1, 48)), x.clone().unflatten(1, (-1, 48))
    cpu.rotary_embedding(q, k, draw(3, 36), torch.ones(len(x), dtype=torch.int64))
    return torch.cat([q, k], dim=1)


@DTYPES
@pytest.mark.parametrize(
    "operation", [_rms_norm, _add_rms_norm, _rotary_embedding, cpu.silu_and_mul], ids=lambda f: f.__name__
)
def test_bits_of_a_row_do_not_depend_on_the_others(
    operation: Callable[[Tensor], Tensor], dtype: torch.dtype, two_threads: None
) -> None:
    x = draw(1_001, 480, dtype=dtype)  # large enough for threads
    whole = operation(x)
    for rows in (1, 2, 17, 130):
        assert torch.equal(operation(x[-rows:]), whole[-rows:])
    cpu.set_num_threads(1)
    assert torch.equal(operation(x), whole)


def test_slots_and_positions_outside_are_refused_before_anything_is_written() -> None:
    k, caches = draw(3, 1, 16), (torch.zeros(2, 1, 16, 8), torch.zeros(2, 1, 8, 16))
    with pytest.raises(IndexError, match="slot 16 of token 2"):
        cpu.store_kv(k, k, *caches, torch.tensor([0, -7, 16]))
    assert not caches[0].any()
    for position in (-1, 4):
        with pytest.raises(IndexError, match="of token 1"):
            cpu.rotary_embedding(k, k.clone(), draw(4, 16), torch.tensor([0, position, 3]))
    assert torch.equal(k, draw(3, 1, 16))


def test_shapes_and_dtypes_that_do_not_fit_are_refused() -> None:
    x, weight = draw(3, 16), draw(16)
    with pytest.raises(ValueError, match="float64"):
        cpu.rms_norm(x.double(), weight.double(), 1e-5)
    with pytest.raises(ValueError, match="bfloat16"):
        cpu.rms_norm(x, weight.bfloat16(), 1e-5)
    with pytest.raises(ValueError, match="weight has shape"):
        cpu.rms_norm(x, weight[1:], 1e-5)
    with pytest.raises(ValueError, match="residual"):
        cpu.add_rms_norm(x, x.bfloat16(), weight, 1e-5)
    with pytest.raises(ValueError, match="even"):
        cpu.silu_and_mul(x[:, 1:])
    with pytest.raises(ValueError, match="side by side"):
        cpu.rotary_embedding(draw(2, 4, 16).transpose(0, 1), draw(4, 1, 16), draw(9, 16), torch.arange(4))
    caches = torch.zeros(2, 1, 8, 16).transpose(2, 3), torch.zeros(2, 1, 8, 16)
    with pytest.raises(ValueError, match="not contiguous"):
        cpu.store_kv(draw(1, 1, 16), draw(1, 1, 16), *caches, torch.zeros(1, dtype=torch.int64))
