"""Biases, forbidden tokens and penalties."""

import math

import pytest
import torch
from torch import Tensor

from octavo.kernels import cpu, reference
from octavo.kernels.backend import MASKED_LOGIT

VOCAB = 1_000
Edits = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def make_edits(num_rows: int, num_entries: int, vocab_size: int = VOCAB) -> Edits:
    """Return edits of every second row, the last ones first, with `num_entries` of each kind and a gap between rows."""
    generator = torch.Generator().manual_seed(num_entries)
    row_R = torch.arange(0, num_rows, 2).flip(0)
    starts_R = torch.arange(len(row_R)) * (3 * num_entries + 5)
    bounds_R4 = starts_R[:, None] + torch.arange(4) * num_entries
    token_ids = [torch.randperm(vocab_size, generator=generator)[:num_entries] for _ in range(3 * len(row_R))]
    token_id_N = torch.full((len(row_R), 3 * num_entries + 5), -7, dtype=torch.int32)
    token_id_N[:, : 3 * num_entries] = torch.stack(token_ids).view(len(row_R), -1)
    value_N = torch.randint(0, 4, (token_id_N.numel(),), generator=generator).float()
    penalties_R3 = torch.rand(len(row_R), 3, generator=generator) + torch.tensor([0.6, -0.5, -0.5])
    return row_R, bounds_R4, penalties_R3, token_id_N.view(-1), value_N


def edited(backend, logits_SV: Tensor, edits: Edits) -> Tensor:  # type: ignore[no-untyped-def]
    changed_SV = logits_SV.clone()
    backend.edit_logits(changed_SV, *edits)
    return changed_SV


@pytest.mark.parametrize(("num_rows", "num_entries"), [(1, 0), (1, 7), (5, 300), (120, 1_000)])
def test_edits_equal_reference(num_rows: int, num_entries: int) -> None:
    logits_SV = torch.randn(num_rows, VOCAB, generator=torch.Generator().manual_seed(1)) * 3
    logits_SV[0, 5:9] = torch.tensor([math.inf, -math.inf, 0.0, -0.0])
    edits = make_edits(num_rows, num_entries)
    changed_SV = edited(cpu, logits_SV, edits)
    assert torch.equal(changed_SV, edited(reference, logits_SV, edits))
    assert torch.equal(changed_SV[1::2], logits_SV[1::2])
    row_R, bounds_R4, penalties_R3, *entries = edits
    for place in range(len(row_R)):
        alone = (*(part[place : place + 1] for part in (row_R, bounds_R4, penalties_R3)), *entries)
        assert torch.equal(edited(cpu, logits_SV, alone)[row_R[place]], changed_SV[row_R[place]])


@pytest.mark.parametrize("backend", [cpu, reference])
def test_a_bias_comes_before_what_is_forbidden_and_penalties_come_last(backend) -> None:  # type: ignore[no-untyped-def]
    logits_SV = torch.zeros(2, 6)
    token_id_N = torch.tensor([3, 2, 3, 4, 2, 3, 4, 5], dtype=torch.int32)
    value_N = torch.tensor([0.0, 2.0, 9.0, -1.0, 0.0, 1.0, 2.0, 3.0])
    penalties = torch.tensor([[2.0, 0.5, 0.25]])
    backend.edit_logits(logits_SV, torch.tensor([1]), torch.tensor([[0, 1, 4, 8]]), penalties, token_id_N, value_N)
    assert logits_SV[0].tolist() == [0.0] * 6
    assert logits_SV[1].tolist() == [0, 0, 1.0, torch.tensor(2 * MASKED_LOGIT).item(), -3.25, -1.75]


@pytest.mark.parametrize("backend", [cpu, reference])
def test_a_token_that_the_vocabulary_lacks_is_skipped(backend) -> None:  # type: ignore[no-untyped-def]
    logits_SV = torch.arange(12.0).view(3, 4)
    token_id_N = torch.tensor([4, -1, 2**31 - 1], dtype=torch.int32)
    for bounds in ([0, 3, 3, 3], [0, 0, 3, 3], [0, 0, 0, 3]):
        penalties = torch.tensor([[2.0, 1.0, 1.0]])
        backend.edit_logits(logits_SV, torch.tensor([1]), torch.tensor([bounds]), penalties, token_id_N, torch.ones(3))
    assert torch.equal(logits_SV, torch.arange(12.0).view(3, 4))


def test_what_does_not_fit_is_refused() -> None:
    logits_SV, (row_R, bounds_R4, penalties_R3, token_id_N, value_N) = torch.zeros(3, VOCAB), make_edits(3, 2)
    with pytest.raises(ValueError, match="logits is"):
        cpu.edit_logits(logits_SV.double(), row_R, bounds_R4, penalties_R3, token_id_N, value_N)
    with pytest.raises(ValueError, match="bounds has shape"):
        cpu.edit_logits(logits_SV, row_R, bounds_R4[:1], penalties_R3, token_id_N, value_N)
    with pytest.raises(ValueError, match="token_id is"):
        cpu.edit_logits(logits_SV, row_R, bounds_R4, penalties_R3, token_id_N.long(), value_N)
    with pytest.raises(IndexError, match="row 3"):
        cpu.edit_logits(logits_SV, row_R + 1, bounds_R4, penalties_R3, token_id_N, value_N)
    with pytest.raises(IndexError, match="bound"):
        cpu.edit_logits(logits_SV, row_R, bounds_R4 + len(value_N), penalties_R3, token_id_N, value_N)
