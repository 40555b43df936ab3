"""Tokens drawn by radix descent are those of a whole sort."""

import math

import pytest
import torch
from torch import Tensor

from octavo.kernels import cpu, reference

NUM_ROWS = 64
Arguments = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def arguments(vocab_size: int, scale: float) -> Arguments:
    """Return rows of which some are not limited, and some by each of the limits or several."""
    generator = torch.Generator().manual_seed(vocab_size)

    def uniform() -> Tensor:
        return torch.rand(NUM_ROWS, generator=generator, dtype=torch.float64)

    probs_RV = (torch.randn(NUM_ROWS, vocab_size, generator=generator) * scale).softmax(-1)
    top_k_R = torch.randint(1, min(vocab_size, 300) + 1, (NUM_ROWS,), generator=generator)
    top_p_R, min_p_R, uniform_R = uniform(), uniform() * 0.3, uniform()
    top_k_R[::3], top_p_R[::4], min_p_R[::2] = 0, 1.0, 0.0
    uniform_R[0], uniform_R[1] = 0.0, 1 - 2.0**-53
    return probs_RV, top_k_R, top_p_R, min_p_R, uniform_R


@pytest.mark.parametrize("vocab_size", [1, 7, 997, 49_152])
@pytest.mark.parametrize("scale", [0.1, 3.0, 20.0])
def test_draw_equals_reference(vocab_size: int, scale: float) -> None:
    given = arguments(vocab_size, scale)
    assert torch.equal(cpu.draw(*given), reference.draw(*given))


@pytest.mark.parametrize("backend", [cpu, reference])
@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p", "token_id"),
    [(0, 0.6, 0.5, 0), (4, 0.6, 0.5, 0), (2, 0.6, 0.0, 0), (0, 0.6, 0.0, 1), (3, 0.9, 0.1, 2), (2, 0.7, 0.15, 1)],
)
def test_top_p_counts_the_mass_that_min_p_and_top_k_left(backend, top_k, top_p, min_p, token_id) -> None:
    probs = torch.tensor([[0.5, 0.3, 0.1, 0.1]])
    limits = torch.tensor([top_k]), torch.tensor([top_p]).double(), torch.tensor([min_p]).double()
    assert backend.draw(probs, *limits, torch.tensor([0.99]).double()).tolist() == [token_id]


@pytest.mark.parametrize("vocab_size", [1, 7, 997, 1_024, 49_152])
def test_the_largest_is_found_and_of_equals_the_first(vocab_size: int) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    logits_RV = torch.randn(NUM_ROWS, vocab_size, generator=generator)
    logits_RV[1] = 0.5
    logits_RV[2] = -logits_RV[2].abs()
    logits_RV[3] = (8 * logits_RV[3]).round()  # many equals
    logits_RV[4] = -math.inf
    logits_RV[5, vocab_size // 2] = math.inf
    logits_RV[6, : vocab_size // 2] = -math.inf  # masked
    expected = reference.largest(logits_RV)
    for rows in (slice(None), slice(0, 1), slice(3, 7)):
        for found, all_expected in zip(cpu.largest(logits_RV[rows]), expected, strict=True):
            assert torch.equal(found, all_expected[rows])


@pytest.mark.parametrize("vocab_size", [1, 7, 997, 1_024, 49_152])
def test_ranks_and_the_highest_scores_equal_reference(vocab_size: int) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    scores_RV = torch.randn(NUM_ROWS, vocab_size, generator=generator)
    scores_RV[1] = 0.5
    scores_RV[2] = (8 * scores_RV[2]).round()  # many equals
    scores_RV[3] = scores_RV[3].sort().values  # each one is above all before it
    scores_RV[4, : vocab_size // 2] = -math.inf  # masked
    token_ids_R = torch.randint(0, vocab_size, (NUM_ROWS,), generator=generator)
    for rows in (slice(None), slice(0, 1), slice(2, 5)):
        ranks_R = reference.rank(scores_RV[rows], token_ids_R[rows])
        assert torch.equal(cpu.rank(scores_RV[rows], token_ids_R[rows]), ranks_R)
        for k in (1, 16, 20, 33):
            for found, expected in zip(cpu.top_k(scores_RV[rows], k), reference.top_k(scores_RV[rows], k), strict=True):
                assert torch.equal(found, expected)


@pytest.mark.parametrize("place", [0, 15, 1_030, 2_047, 2_048, 2_049])
def test_a_nan_shows_wherever_it_is(place: int) -> None:
    logits_RV = torch.arange(2 * 2_050.0).view(2, 2_050)
    logits_RV[0, place] = math.nan
    logits_RV[1, place] = -math.inf
    values_R, _ = cpu.largest(logits_RV)
    assert values_R.isnan().tolist() == [True, False]


@pytest.mark.parametrize("vocab_size", [1, 7, 997, 1_024, 49_152])
@pytest.mark.parametrize("num_rows", [1, 3])
def test_probabilities_are_those_of_a_softmax_whatever_the_number_of_rows(vocab_size: int, num_rows: int) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    logits_RV = torch.randn(3, vocab_size, generator=generator) * 5
    logits_RV[0, vocab_size // 2] = -1e30  # masked
    logits_RV[1, : vocab_size // 2] = -math.inf
    temperature_R = torch.tensor([1.0, 0.2, 30.0], dtype=torch.float64)
    probs_RV = cpu.scale_to_probs(logits_RV[:num_rows].clone(), temperature_R[:num_rows])
    expected_RV = (logits_RV.double() / temperature_R[:, None]).softmax(-1).float()[:num_rows]
    torch.testing.assert_close(probs_RV, expected_RV, rtol=2e-5, atol=1e-37)
    assert (probs_RV[expected_RV == 0] == 0).all()
    assert torch.equal(probs_RV[:1], cpu.scale_to_probs(logits_RV[:1].clone(), temperature_R[:1]))


@pytest.mark.parametrize("top_k", [0, 5])
def test_of_equals_the_lower_ids_are_kept_and_those_of_no_weight_never(top_k: int) -> None:
    probs_RV, _, top_p_R, min_p_R, uniform_R = arguments(40, 1.0)
    probs_RV = (probs_RV * 60).round() / 64  # exact in float32: sums do not depend on their order
    assert (probs_RV == 0).any()
    probs_RV[:, 39] = 1 / 64
    given = probs_RV, torch.full((NUM_ROWS,), top_k), (top_p_R * 16).ceil() / 16, min_p_R, uniform_R
    token_ids_R = cpu.draw(*given)
    assert torch.equal(token_ids_R, reference.draw(*given))
    assert probs_RV.gather(1, token_ids_R[:, None]).min() > 0


@pytest.mark.parametrize("min_p", [0.0, 0.5])
@pytest.mark.parametrize("top_k", [0, 2])
def test_a_top_p_too_small_for_a_product_keeps_the_likeliest(top_k: int, min_p: float) -> None:
    probs = torch.full((1, 100), 0.001)
    probs[0, 70] = 0.002
    limits = torch.tensor([top_k]), torch.tensor([5e-324]).double(), torch.tensor([min_p]).double()
    assert cpu.draw(probs, *limits, torch.tensor([0.9]).double()).tolist() == [70]


@pytest.mark.parametrize("min_p", [0.0, 0.5])
def test_of_probabilities_that_are_no_numbers_some_token_of_the_vocabulary_is_drawn(min_p: float) -> None:
    limits = torch.tensor([5]), torch.tensor([0.9]).double(), torch.tensor([min_p]).double()
    [token_id] = cpu.draw(torch.full((1, 100), math.nan), *limits, torch.tensor([0.9]).double()).tolist()
    assert 0 <= token_id < 100


def test_a_row_does_not_depend_on_the_others() -> None:
    given = arguments(5000, 2.0)
    together = cpu.draw(*given)
    for row in range(NUM_ROWS):
        assert cpu.draw(*(tensor[row : row + 1] for tensor in given)).tolist() == [together[row]]


def test_what_does_not_fit_is_refused() -> None:
    probs_RV, top_k_R, *limits = arguments(7, 1.0)
    with pytest.raises(ValueError, match="float32 is needed"):
        cpu.draw(probs_RV.double(), top_k_R, *limits)
    with pytest.raises(ValueError, match="logits are"):
        cpu.scale_to_probs(probs_RV.double(), limits[0])
    with pytest.raises(ValueError, match="temperature has shape"):
        cpu.scale_to_probs(probs_RV, limits[0][:3])
    with pytest.raises(ValueError, match="top_k is"):
        cpu.draw(probs_RV, top_k_R.int(), *limits)
    with pytest.raises(ValueError, match="top_k has shape"):
        cpu.draw(probs_RV, top_k_R[:3], *limits)
