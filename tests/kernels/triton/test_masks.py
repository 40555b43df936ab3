import pytest
import torch

from octavo.kernels import reference, triton
from octavo.kernels.triton.masks import BLOCK
from tests.kernels.test_masks import allowed, make_masks


@pytest.mark.parametrize(("num_rows", "vocab_size"), [(1, 1), (4, 33), (3, BLOCK), (2, BLOCK + 5)])
def test_masks_equal_reference(num_rows: int, vocab_size: int) -> None:
    given = make_masks(num_rows, vocab_size)
    changed_SV = allowed(triton, *given)
    assert torch.equal(changed_SV, allowed(reference, *given))
    assert torch.equal(changed_SV[1::2], given[0][1::2])


def test_no_rows_change_nothing_and_what_does_not_fit_is_refused() -> None:
    logits_SV, row_R, allowed_RW = make_masks(3, 64)
    assert torch.equal(allowed(triton, logits_SV, row_R[:0], allowed_RW[:0]), logits_SV)
    with pytest.raises(ValueError, match=r"logits is torch\.bfloat16"):
        triton.allow_tokens(logits_SV.bfloat16(), row_R, allowed_RW)
    with pytest.raises(ValueError, match="allowed has shape"):
        triton.allow_tokens(logits_SV, row_R, allowed_RW[:1])
    with pytest.raises(ValueError, match="side by side"):
        triton.allow_tokens(torch.zeros(64, 3).T, row_R, allowed_RW)
