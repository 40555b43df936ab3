import pytest
import torch
from torch import Tensor

from octavo.kernels import reference, triton

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)


def draw(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


@DTYPES
@pytest.mark.parametrize("shape", [(1, 64), (3, 100), (0, 8), (2, 2500), (40, 1), (7, 3, 48)], ids=str)
def test_norm_equals_reference(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, weight = draw(*shape, dtype=dtype), draw(shape[-1], dtype=dtype)
    torch.testing.assert_close(triton.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5))


@DTYPES
def test_heads_are_normed_where_they_lie_in_a_projection(dtype: torch.dtype) -> None:
    qkv, weight = draw(5, (4 + 1 + 1) * 24, dtype=dtype), draw(24, dtype=dtype)
    k_TKD = qkv.unflatten(1, (-1, 24))[:, 4:5]
    q_THD = qkv.unflatten(1, (-1, 24))[:, :4]
    for heads in (q_THD, k_TKD, q_THD.transpose(0, 1)):
        torch.testing.assert_close(triton.rms_norm(heads, weight, 1e-5), reference.rms_norm(heads, weight, 1e-5))


@DTYPES
@pytest.mark.parametrize("shape", [(1, 64), (5, 100), (0, 8), (2, 2500)], ids=str)
def test_norm_of_the_residual_equals_reference(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x, weight, residual = draw(*shape, dtype=dtype), draw(shape[1], dtype=dtype), draw(*shape, dtype=torch.float32)
    expected_residual = residual.clone()
    expected = reference.add_rms_norm(x, expected_residual, weight, 1e-5)
    torch.testing.assert_close(triton.add_rms_norm(x, residual, weight, 1e-5), expected)
    assert torch.equal(residual, expected_residual)


@DTYPES
@pytest.mark.parametrize("shape", [(1, 2), (3, 2 * 77), (0, 8), (2, 2 * 1100)], ids=str)
def test_silu_and_mul_equals_reference(shape: tuple[int, int], dtype: torch.dtype) -> None:
    gate_up = draw(*shape, dtype=dtype) * 10
    gate_up[:1, 0] = -200  # exp(200) is infinite in float32
    torch.testing.assert_close(triton.silu_and_mul(gate_up), reference.silu_and_mul(gate_up))
    part = draw(shape[0], shape[1] + 4, dtype=dtype)[:, 2:-2]
    torch.testing.assert_close(triton.silu_and_mul(part), reference.silu_and_mul(part))


def test_what_does_not_fit_is_refused() -> None:
    x, weight = draw(3, 16, dtype=torch.float32), draw(16, dtype=torch.float32)
    with pytest.raises(ValueError, match=r"weight is torch\.bfloat16"):
        triton.rms_norm(x, weight.bfloat16(), 1e-5)
    with pytest.raises(ValueError, match="weight has shape"):
        triton.rms_norm(x, weight[1:], 1e-5)
    with pytest.raises(ValueError, match=r"residual is torch\.float16"):
        triton.add_rms_norm(x, x.half(), weight, 1e-5)
    with pytest.raises(ValueError, match="not contiguous"):
        triton.add_rms_norm(x, draw(16, 3, dtype=torch.float32).t(), weight, 1e-5)
    with pytest.raises(ValueError, match="even number"):
        triton.silu_and_mul(x[:, 1:])
