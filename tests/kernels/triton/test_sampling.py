import pytest
import torch
from torch import Tensor

from octavo.kernels import philox, reference, triton
from octavo.kernels.triton import sampling

NUM_ROWS = 8


def random_logits(vocab_size: int, scale: float, num_rows: int = NUM_ROWS) -> Tensor:
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(vocab_size)) * scale


def limits(vocab_size: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return limits of which a row has none, each alone, or several; and uniform numbers from end to end."""
    top_k_R = torch.tensor([0, 5, 0, 0, 1, 300, 1000, 3])
    top_p_R = torch.tensor([1.0, 1.0, 0.7, 1.0, 0.5, 0.9, 0.2, 0.05], dtype=torch.float64)
    min_p_R = torch.tensor([0.0, 0.0, 0.0, 0.1, 0.0, 0.01, 0.0, 0.9], dtype=torch.float64)
    uniform_R = torch.tensor([0.0, 0.999, 0.8, 0.31, 1 - 2.0**-53, 0.62, 0.5, 0.1], dtype=torch.float64)
    return top_k_R, top_p_R, min_p_R, uniform_R.roll(vocab_size)


@pytest.mark.parametrize(("vocab_size", "scale"), [(1, 1.0), (97, 0.1), (97, 20.0), (5000, 3.0)])
def test_draw_equals_reference(vocab_size: int, scale: float) -> None:
    given = (random_logits(vocab_size, scale).softmax(-1), *limits(vocab_size))
    assert torch.equal(triton.draw(*given), reference.draw(*given))


def test_top_p_counts_the_mass_that_min_p_and_top_k_left() -> None:
    probs_RV = torch.tensor([[0.5, 0.3, 0.1, 0.1]]).repeat(6, 1)
    top_k_R = torch.tensor([0, 4, 2, 0, 3, 2])
    top_p_R = torch.tensor([0.6, 0.6, 0.6, 0.6, 0.9, 0.7], dtype=torch.float64)
    min_p_R = torch.tensor([0.5, 0.5, 0.0, 0.0, 0.1, 0.15], dtype=torch.float64)
    given = (probs_RV, top_k_R, top_p_R, min_p_R, torch.full((6,), 0.99).double())
    assert triton.draw(*given).tolist() == [0, 0, 0, 1, 2, 1]


def test_of_equals_the_lower_ids_are_kept_and_those_of_no_weight_never() -> None:
    probs_RV = (random_logits(40, 1.0).softmax(-1) * 60).round() / 64  # exact: sums do not depend on their order
    assert (probs_RV == 0).any()
    probs_RV[:, 39] = 1 / 64
    top_k_R, top_p_R, min_p_R, uniform_R = limits(2)
    given = probs_RV, top_k_R, (top_p_R * 16).ceil() / 16, min_p_R, uniform_R
    token_ids_R = triton.draw(*given)
    assert torch.equal(token_ids_R, reference.draw(*given))
    assert probs_RV.gather(1, token_ids_R[:, None]).min() > 0


@pytest.mark.parametrize("seed", [0, 1, -1, 0x13198A2E03707344, -(2**63)])
@pytest.mark.parametrize("purpose", [0, 1, 3])
def test_uniform_equals_philox(seed: int, purpose: int) -> None:
    positions = [0, 1, 7, 2**40 + 5, *range(100, 140)]  # more than a program's
    numbers_R = triton.uniform(torch.full((len(positions),), seed), torch.tensor(positions), purpose)
    assert numbers_R.tolist() == [philox.uniform(seed, position, purpose) for position in positions]


def test_uniform_gives_the_numbers_of_philoxs_authors() -> None:
    """The known answer of Random123 for philox2x64 with ten rounds, all zeros."""
    zero_R = torch.zeros(1, dtype=torch.int64)
    assert triton.uniform(zero_R, zero_R, 0).item() == (0xCA00A0459843D731 >> 11) * 2.0**-53


@pytest.mark.parametrize("vocab_size", [1, 300, sampling.PART, sampling.PART + 1, 3 * sampling.PART - 5])
def test_probabilities_equal_reference(vocab_size: int) -> None:
    logits_RV = random_logits(vocab_size, 3.0, 3)
    logits_RV[0, : min(vocab_size, sampling.PART) - 1] = -torch.inf  # masked tokens: most of a part,
    logits_RV[1, : (vocab_size - 1) // sampling.PART * sampling.PART] = -torch.inf  # and whole ones
    temperature_R = torch.tensor([1.0, 0.3, 2.0], dtype=torch.float64)
    expected_RV = reference.scale_to_probs(logits_RV, temperature_R)
    torch.testing.assert_close(triton.scale_to_probs(logits_RV.clone(), temperature_R), expected_RV)


def test_rows_of_a_larger_tensor_are_read_where_they_lie() -> None:
    logits_RV = random_logits(50, 2.0, 3)[:, 5:45]
    ones_R, ids_R = torch.ones(3), torch.tensor([0, 39, 7])
    torch.testing.assert_close(triton.scale_to_probs(logits_RV, ones_R), logits_RV.softmax(-1))
    none_R, zero_R, half_R = ids_R * 0, torch.zeros(3).double(), torch.full((3,), 0.5).double()
    given = (logits_RV.exp(), none_R, ones_R.double(), zero_R, half_R)
    assert torch.equal(triton.draw(*given), reference.draw(*given))


def test_no_rows_give_none_and_what_does_not_fit_is_refused() -> None:
    probs_RV, (top_k_R, *others) = random_logits(7, 1.0).softmax(-1), limits(7)
    assert triton.draw(*(tensor[:0] for tensor in (probs_RV, top_k_R, *others))).shape == (0,)
    assert triton.scale_to_probs(probs_RV[:0], others[0][:0]).shape == (0, 7)
    assert triton.uniform(top_k_R[:0], top_k_R[:0], 0).shape == (0,)
    with pytest.raises(ValueError, match=r"probabilities is torch\.float64"):
        triton.draw(probs_RV.double(), top_k_R, *others)
    with pytest.raises(ValueError, match=r"top_k is torch\.int32"):
        triton.draw(probs_RV, top_k_R.int(), *others)
    with pytest.raises(ValueError, match="top_k has shape"):
        triton.draw(probs_RV, top_k_R[:3], *others)
    with pytest.raises(ValueError, match=r"logits is torch\.bfloat16"):
        triton.scale_to_probs(probs_RV.bfloat16(), others[0])
