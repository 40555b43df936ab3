"""Which tokens a grammar allows."""

import pytest
import torch
from torch import Tensor

from octavo.kernels import cpu, reference
from octavo.kernels.backend import MASKED_LOGIT


def make_masks(num_rows: int, vocab_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return logits, every second row (the last first), and words of which some allow all and some nothing."""
    generator = torch.Generator().manual_seed(vocab_size)
    row_R = torch.arange(0, num_rows, 2).flip(0)
    words_RW = torch.randint(-(2**31), 2**31, (len(row_R), -(-vocab_size // 32)), generator=generator)
    words_RW[:, 1::3] = -1
    words_RW[:, 2::3] = 0
    return torch.randn(num_rows, vocab_size, generator=generator), row_R, words_RW.to(torch.int32)


def allowed(backend, logits_SV: Tensor, row_R: Tensor, allowed_RW: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
    changed_SV = logits_SV.clone()
    backend.allow_tokens(changed_SV, row_R, allowed_RW)
    return changed_SV


@pytest.mark.parametrize("backend", [cpu, reference])
def test_a_bit_that_is_set_allows_its_token(backend) -> None:  # type: ignore[no-untyped-def]
    logits_SV = torch.ones(2, 40)
    allowed_RW = torch.tensor([[-(2**31) | 0b101, 0b10]], dtype=torch.int32)
    backend.allow_tokens(logits_SV, torch.tensor([1]), allowed_RW)
    assert torch.equal(logits_SV[0], torch.ones(40))
    assert (logits_SV[1] == 1).nonzero().flatten().tolist() == [0, 2, 31, 33]
    assert (logits_SV[1] == -torch.inf).sum() == 36


@pytest.mark.parametrize("backend", [cpu, reference])
def test_what_is_allowed_wins_whatever_edits_made_of_it(backend) -> None:  # type: ignore[no-untyped-def]
    logits_SV = torch.tensor([[MASKED_LOGIT, -torch.inf, -3e38, 5.0]])
    backend.allow_tokens(logits_SV, torch.tensor([0]), torch.tensor([[0b0110]], dtype=torch.int32))
    masked = torch.tensor(MASKED_LOGIT)
    assert torch.equal(logits_SV[0], torch.tensor([-torch.inf, masked, masked, -torch.inf]))
    token_ids = backend.largest(logits_SV)[1] if backend is cpu else logits_SV.argmax(-1)
    assert token_ids.tolist() == [1]
    assert backend.scale_to_probs(logits_SV, torch.tensor([0.5]).double())[0].tolist() == [0.0, 0.5, 0.5, 0.0]


@pytest.mark.parametrize(("num_rows", "vocab_size"), [(1, 1), (1, 1_000), (4, 33), (9, 1_024), (120, 5_003)])
def test_masks_equal_reference(num_rows: int, vocab_size: int) -> None:
    given = make_masks(num_rows, vocab_size)
    changed_SV = allowed(cpu, *given)
    assert torch.equal(changed_SV, allowed(reference, *given))
    assert torch.equal(changed_SV[1::2], given[0][1::2])


def test_what_does_not_fit_is_refused() -> None:
    logits_SV, row_R, allowed_RW = make_masks(3, 64)
    with pytest.raises(ValueError, match="logits is"):
        cpu.allow_tokens(logits_SV.double(), row_R, allowed_RW)
    with pytest.raises(ValueError, match="allowed"):
        cpu.allow_tokens(logits_SV, row_R, allowed_RW[:, :1])
    with pytest.raises(ValueError, match="allowed is"):
        cpu.allow_tokens(logits_SV, row_R, allowed_RW.long())
    with pytest.raises(IndexError):
        cpu.allow_tokens(logits_SV, row_R + 2, allowed_RW)
