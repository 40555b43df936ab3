import weakref

import pytest
import torch
from torch import Tensor

from octavo.kernels import cpu, reference
from octavo.kernels.groupwise import GroupwiseWeight, concatenate, pack_codes


def make_weight(
    bits: int,
    group_size: int,
    num_outputs: int,
    num_inputs: int,
    offsets: bool,
    scale_dtype: torch.dtype = torch.float16,
) -> GroupwiseWeight:
    generator = torch.Generator().manual_seed(bits + group_size)
    codes = torch.randint(0, 2**bits, (num_outputs, num_inputs), generator=generator, dtype=torch.uint8)
    scales = torch.rand(num_outputs, num_inputs // group_size, generator=generator).to(scale_dtype)
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


@pytest.mark.parametrize(("bits", "group_size"), [(4, 32), (8, 16)])
def test_the_references_products_and_rows_are_those_of_the_dequantized_weight(bits: int, group_size: int) -> None:
    weight = make_weight(bits, group_size, 48, 64, True)
    layer = reference.pack_linear(weight, torch.ones(48))
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(reference.linear(x, layer), x @ weight.dequantize().T + 1, rtol=1e-4, atol=1e-4)
    ids = torch.tensor([0, 47, 3])
    torch.testing.assert_close(reference.embedding(ids, layer, torch.float32), weight.dequantize()[ids])


FORMS = pytest.mark.parametrize(
    ("bits", "group_size", "num_outputs", "num_inputs", "offsets", "scale_dtype"),
    [
        (4, 32, 200, 192, True, torch.float16),
        (4, 128, 96, 1_536, False, torch.float16),
        (4, 16, 33, 80, True, torch.float32),
        (4, 48, 1, 240, False, torch.float32),
        (8, 32, 130, 576, False, torch.float16),
        (8, 64, 31, 320, True, torch.float32),
        (8, 272, 47, 272, True, torch.float16),
    ],
)


LARGEST_INPUT = {4: 127, 8: 32767}  # to which inputs are rounded, by the bits of the weights


def rounded(x: Tensor, bits: int, group_size: int) -> tuple[Tensor, Tensor]:
    """Return the inputs as products take them, and the size of the rounding's steps, float64."""
    chunks = x.float().unflatten(1, (-1, 32 if group_size % 32 == 0 else 16))
    size = chunks.abs().amax(-1, keepdim=True)
    inverse = torch.where(size > 0, torch.full_like(size, LARGEST_INPUT[bits]) / size, 0).double()
    steps = (size / LARGEST_INPUT[bits]).double()
    return (torch.round(chunks.double() * inverse) * steps).flatten(1), steps.expand(chunks.shape).flatten(1)


@FORMS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_are_those_of_the_dequantized_weight(
    bits: int,
    group_size: int,
    num_outputs: int,
    num_inputs: int,
    offsets: bool,
    scale_dtype: torch.dtype,
    dtype: torch.dtype,
) -> None:
    """Within 1e-6 of the sum of the products' sizes, with inputs rounded by half a step at most; then to bfloat16."""
    weight = make_weight(bits, group_size, num_outputs, num_inputs, offsets, scale_dtype)
    generator = torch.Generator().manual_seed(0)
    bias = torch.randn(num_outputs, generator=generator) if offsets else None
    layer = cpu.pack_linear(weight, bias)
    dense = weight.dequantize().double()
    largest_code = 2**bits - 1
    for num_rows in (0, 1, 3, 8, 33, 200):
        x = torch.randn(num_rows, num_inputs, generator=generator).to(dtype)
        x[:1, :16] = 0
        inputs, steps = rounded(x, bits, group_size)
        assert ((inputs - x.double()).abs() <= 0.51 * steps).all()
        expected = inputs @ dense.T + (0 if bias is None else bias)
        out = cpu.linear(x, layer, torch.float32)
        bound = 1e-6 * (inputs.abs() @ (dense.abs() + largest_code * weight.scales_NG.max()).T + 1)
        assert out.shape == (num_rows, num_outputs)
        assert ((out - expected).abs() <= bound).all()
        assert torch.equal(cpu.linear(x, layer), out.to(dtype))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("broken", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_shows_in_its_row_alone(bits: int, broken: float) -> None:
    layer = cpu.pack_linear(make_weight(bits, 32, 40, 64, True))
    x = torch.ones(5, 64)
    whole = cpu.linear(x, layer)
    x[2, 50] = broken
    for rows in (x, x[2:3]):
        assert not cpu.linear(rows, layer)[rows.isfinite().logical_not().any(-1)].isfinite().any()
    assert torch.equal(cpu.linear(x, layer)[[0, 1, 3, 4]], whole[[0, 1, 3, 4]])


@FORMS
def test_rows_are_those_of_the_dequantized_weight(
    bits: int, group_size: int, num_outputs: int, num_inputs: int, offsets: bool, scale_dtype: torch.dtype
) -> None:
    weight = make_weight(bits, group_size, num_outputs, num_inputs, offsets, scale_dtype)
    layer, ids = cpu.pack_linear(weight), torch.arange(num_outputs).flip(0)
    for dtype in (torch.float32, torch.bfloat16):
        rows, expected = cpu.embedding(ids, layer, dtype), weight.dequantize(dtype).flip(0)
        if scale_dtype == torch.float16:
            assert torch.equal(rows, expected)
        else:  # scale * code is rounded in `expected`, but not in a fused multiply-add
            torch.testing.assert_close(rows, expected, rtol=torch.finfo(dtype).eps, atol=1e-6)


@pytest.mark.parametrize(("bits", "group_size"), [(4, 32), (8, 192)])
def test_bits_of_a_row_do_not_depend_on_rows_or_threads(bits: int, group_size: int, two_threads: None) -> None:
    layer = cpu.pack_linear(make_weight(bits, group_size, 330, 576, True), torch.ones(330))
    x = torch.randn(250, 576, generator=torch.Generator().manual_seed(0))
    whole = cpu.linear(x, layer)
    for num_threads in (1, 2):
        cpu.set_num_threads(num_threads)
        for num_rows in (*range(1, 20), 31, 95, 96, 97, 192, 193, 250):
            assert torch.equal(cpu.linear(x[-num_rows:], layer), whole[-num_rows:])


@pytest.mark.parametrize(
    ("bits", "offsets", "num_bytes"), [(4, True, 96 * (32 + 2 * 4)), (4, False, 96 * (32 + 4)), (8, False, 96 * 68)]
)
def test_a_packed_weight_takes_what_the_quantized_one_does(bits: int, offsets: bool, num_bytes: int) -> None:
    weight = make_weight(bits, 32, 70, 64, offsets)
    layer = cpu.pack_linear(weight)
    rounded_bits = {4: 8, 8: 16}[bits]
    assert layer.form == f"{bits}-bit weights in groups of 32, times inputs of {rounded_bits} bits"
    assert layer.nbytes == num_bytes  # outputs padded to 96
    codes = weakref.ref(weight.codes_NB)
    del weight
    assert codes() is None


def test_what_the_cpu_cannot_multiply_is_refused() -> None:
    layer = cpu.pack_linear(make_weight(4, 32, 10, 64, True))
    with pytest.raises(ValueError, match="expected 64 inputs"):
        cpu.linear(torch.ones(2, 32), layer)
    with pytest.raises(ValueError, match="float16"):
        cpu.linear(torch.ones(2, 64, dtype=torch.float16), layer)
    with pytest.raises(IndexError, match="id 10 of token 1"):
        cpu.embedding(torch.tensor([9, 10]), layer, torch.float32)
    with pytest.raises(ValueError, match="scales are"):
        cpu.pack_linear(make_weight(4, 32, 10, 64, False, torch.bfloat16))
    ragged = GroupwiseWeight(torch.zeros(2, 40, dtype=torch.uint8), 8, 16, torch.ones(2, 2), None)
    with pytest.raises(ValueError, match="40 inputs"):
        cpu.pack_linear(ragged)
