import pytest
import torch

from octavo.kernels import reference, triton
from octavo.kernels.triton.edits import BLOCK
from tests.kernels.test_edits import edited, make_edits


@pytest.mark.parametrize(("num_rows", "num_entries"), [(1, 0), (4, 7), (3, BLOCK), (2, 2 * BLOCK + 3)])
def test_edits_equal_reference(num_rows: int, num_entries: int) -> None:
    logits_SV = torch.randn(num_rows, 5_000, generator=torch.Generator().manual_seed(1)) * 3
    edits = make_edits(num_rows, num_entries, 5_000)
    edits[3][0] = 5_000  # which the vocabulary lacks
    changed_SV = edited(triton, logits_SV, edits)
    assert torch.equal(changed_SV, edited(reference, logits_SV, edits))
    assert torch.equal(changed_SV[1::2], logits_SV[1::2])


def test_no_rows_change_nothing_and_what_does_not_fit_is_refused() -> None:
    logits_SV, (row_R, bounds_R4, penalties_R3, token_id_N, value_N) = torch.zeros(3, 1_000), make_edits(3, 2)
    triton.edit_logits(logits_SV, row_R[:0], bounds_R4[:0], penalties_R3[:0], token_id_N, value_N)
    assert torch.equal(logits_SV, torch.zeros(3, 1_000))
    with pytest.raises(ValueError, match=r"logits is torch\.bfloat16"):
        triton.edit_logits(logits_SV.bfloat16(), row_R, bounds_R4, penalties_R3, token_id_N, value_N)
    with pytest.raises(ValueError, match="bounds has shape"):
        triton.edit_logits(logits_SV, row_R, bounds_R4[:1], penalties_R3, token_id_N, value_N)
    with pytest.raises(ValueError, match="side by side"):
        triton.edit_logits(torch.zeros(1_000, 3).T, row_R, bounds_R4, penalties_R3, token_id_N, value_N)
