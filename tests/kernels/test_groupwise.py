import pytest
import torch
from torch import Tensor

from kernels import GroupwiseWeight, choose_backend, reference
from kernels.groupwise import concatenate, pack_codes


def make_weight(bits: int, group_size: int, num_outputs: int, num_inputs: int, offsets: bool) -> GroupwiseWeight:
    generator = torch.Generator().manual_seed(bits + group_size)
    codes = torch.randint(0, 2**bits, (num_outputs, num_inputs), generator=generator, dtype=torch.uint8)
    scales = torch.rand(num_outputs, num_inputs // group_size, generator=generator).half()
    return GroupwiseWeight(pack_codes(codes, bits), bits, group_size, scales, -3 * scales if offsets else None)


def expected_weight(weight: GroupwiseWeight, output: int, column: int) -> Tensor:
    """Return one weight by the definition."""
    group = column // weight.group_size
    byte = weight.codes_NB[output, column * weight.bits // 8].int()
    code = byte if weight.bits == 8 else (byte >> 4 * (column % 2)) & 15
    scale = weight.scales_NG[output, group].float()
    if weight.offsets_NG is None:
        return scale * (code - 2 ** (weight.bits - 1))
    return scale * code + weight.offsets_NG[output, group].float()


@pytest.mark.parametrize("offsets", [False, True])
@pytest.mark.parametrize("group_size", [16, 32])
@pytest.mark.parametrize("bits", [4, 8])
def test_a_weight_is_what_its_definition_says(bits: int, group_size: int, offsets: bool) -> None:
    weight = make_weight(bits, group_size, 3, 64, offsets)
    dense = weight.dequantize()
    assert dense.shape == (3, 64)
    for output, column in ((0, 0), (0, 1), (1, 15), (1, 16), (2, 31), (2, 63)):
        assert dense[output, column] == expected_weight(weight, output, column)


def test_parts_of_one_form_become_one_weight() -> None:
    parts = [make_weight(4, 32, rows, 64, True) for rows in (2, 3)]
    whole = concatenate(parts)
    assert torch.equal(whole.dequantize(), torch.cat([part.dequantize() for part in parts]))
    with pytest.raises(ValueError, match="different forms"):
        concatenate([parts[0], make_weight(4, 32, 3, 64, False)])


def test_forms_that_do_not_fit_are_refused() -> None:
    weight = make_weight(4, 32, 2, 64, False)
    with pytest.raises(ValueError, match="3 bits"):
        GroupwiseWeight(weight.codes_NB, 3, 32, weight.scales_NG, None)
    with pytest.raises(ValueError, match="scales have shape"):
        GroupwiseWeight(weight.codes_NB, 4, 64, weight.scales_NG, None)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize(("bits", "group_size"), [(4, 32), (8, 16)])
def test_products_and_rows_are_those_of_the_dequantized_weight(bits: int, group_size: int, backend: str) -> None:
    weight = make_weight(bits, group_size, 48, 64, True)
    kernels = choose_backend(backend).backend
    layer = kernels.pack_linear(weight, torch.ones(48))
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(kernels.linear(x, layer), x @ weight.dequantize().T + 1, rtol=1e-4, atol=1e-4)
    ids = torch.tensor([0, 47, 3])
    torch.testing.assert_close(kernels.embedding(ids, layer, torch.float32), weight.dequantize()[ids])


@pytest.mark.parametrize("name", ["FLASH_ATTN", "FLASHINFER", "triton"])
def test_a_backend_that_the_machine_lacks_is_refused_with_those_it_has(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU, so it has triton")
    with pytest.raises(ValueError, match=r"it has: auto, cpu, reference$"):
        choose_backend(name)


def test_attention_without_fused_operations_is_the_same_in_the_reference() -> None:
    """The reference's attention against torch's own, which has no paging."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(6, heads, 8, generator=generator) for heads in (4, 2, 2))
    k_cache, v_cache = torch.zeros(4, 2, 8, 4), torch.zeros(4, 2, 4, 8)
    slots = torch.tensor([8, 9, 10, 11, 0, 1])
    reference.store_kv(k, v, k_cache, v_cache, slots)
    out = reference.paged_attention(
        *(q, k_cache, v_cache, torch.tensor([[2, 0]], dtype=torch.int32)),
        *(torch.tensor([0, 6], dtype=torch.int32), torch.tensor([6], dtype=torch.int32), 0.3),
    )
    expected = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(0, 1) for x in (q, k, v)), is_causal=True, scale=0.3, enable_gqa=True
    )
    torch.testing.assert_close(out, expected.transpose(0, 1))
