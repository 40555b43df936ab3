import pytest
import torch
from torch import Tensor

from octavo.kernels import reference, triton
from octavo.kernels.groupwise import GroupwiseWeight, pack_codes
from octavo.kernels.triton import groupwise

FLOAT32, FLOAT16, BFLOAT16 = torch.float32, torch.float16, torch.bfloat16
TOLERANCE = {FLOAT32: 3e-5, FLOAT16: 2e-3, BFLOAT16: 1e-2}  # of an output's rounding, for the most


def make_weight(
    bits: int, group_size: int, shape: tuple[int, int], offsets: bool, scale_dtype: torch.dtype = FLOAT16
) -> GroupwiseWeight:
    generator = torch.Generator().manual_seed(bits + group_size)
    codes = torch.randint(0, 2**bits, shape, generator=generator, dtype=torch.uint8)
    scales = (torch.rand(shape[0], shape[1] // group_size, generator=generator) / 2**bits).to(scale_dtype)
    return GroupwiseWeight(pack_codes(codes, bits), bits, group_size, scales, -3 * scales if offsets else None)


def draw(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


# Rows: one, fewer than a tile of few, all of one, the least of the other form, more than one tile.
@pytest.mark.parametrize(
    ("bits", "group_size", "offsets", "shape", "rows", "dtype", "bias", "scale_dtype"),
    [
        (4, 16, True, (70, 64), 3, FLOAT32, True, FLOAT32),
        (4, 32, True, (48, 640), 1, BFLOAT16, True, FLOAT16),
        (4, 64, False, (33, 192), 17, BFLOAT16, False, FLOAT32),
        (4, 128, True, (65, 256), 16, FLOAT16, False, FLOAT16),
        (4, 128, False, (130, 128), 65, FLOAT32, True, FLOAT16),
        (8, 16, False, (1, 48), 1, FLOAT16, True, FLOAT16),
        (8, 32, False, (129, 96), 20, FLOAT16, False, FLOAT16),
        (8, 64, True, (20, 128), 66, BFLOAT16, True, FLOAT32),
        (8, 128, True, (64, 1024), 5, FLOAT32, False, FLOAT16),
        (8, 48, True, (7, 96), 2, BFLOAT16, True, FLOAT16),
    ],
)
def test_product_equals_that_of_the_dequantized_weight(
    bits: int,
    group_size: int,
    offsets: bool,
    shape: tuple[int, int],
    rows: int,
    dtype: torch.dtype,
    bias: bool,
    scale_dtype: torch.dtype,
) -> None:
    weight = make_weight(bits, group_size, shape, offsets, scale_dtype)
    bias_N = draw(shape[0], dtype=dtype) if bias else None
    layer, expected_layer = triton.pack_linear(weight, bias_N), reference.pack_linear(weight, bias_N)
    x = draw(shape[1], rows, dtype=dtype).t()  # rows that are not side by side
    for out_dtype in (None, FLOAT32):
        out = triton.linear(x, layer, out_dtype)
        expected = reference.linear(x, expected_layer, out_dtype)
        tolerance = TOLERANCE[dtype if out_dtype is None else FLOAT32]
        torch.testing.assert_close(out, expected, rtol=tolerance, atol=tolerance)
    ids = torch.tensor([0, shape[0] - 1, shape[0] // 2])
    expected = reference.embedding(ids, expected_layer, dtype)
    torch.testing.assert_close(triton.embedding(ids, layer, dtype), expected, rtol=TOLERANCE[dtype], atol=1e-6)


def test_a_row_of_few_has_the_same_bits_among_any_number_of_few() -> None:
    layer = triton.pack_linear(make_weight(4, 32, (24, 640), True))
    assert groupwise.split_inputs(24, 20) == (5, 4)
    x = draw(16, 640, dtype=FLOAT16)
    whole = triton.linear(x, layer)
    for rows in (1, 7):
        assert torch.equal(triton.linear(x[-rows:], layer), whole[-rows:])


@pytest.mark.parametrize(
    ("num_outputs", "num_blocks", "expected"),
    [(128_256, 32, (1, 32)), (4096, 32, (4, 8)), (4096, 112, (4, 28)), (64, 5, (2, 4)), (64, 1, (1, 4))],
)
def test_inputs_are_split_until_the_device_is_busy(
    num_outputs: int, num_blocks: int, expected: tuple[int, int]
) -> None:
    assert groupwise.split_inputs(num_outputs, num_blocks) == expected


def test_weights_of_few_bits_stay_so() -> None:
    weight = make_weight(4, 32, (64, 128), True)
    layer = triton.pack_linear(weight)
    assert layer.nbytes == weight.nbytes + weight.offsets_NG.nbytes  # offsets are float32
    assert layer.form == "4-bit weights in groups of 32, multiplied by Triton kernels as they are"
    assert triton.pack_linear(make_weight(8, 16, (5, 32), False)).nbytes == 5 * 32 + 5 * 2 * 2


@pytest.mark.parametrize("dtype", [FLOAT32, FLOAT16, BFLOAT16], ids=str)
def test_plain_weights_are_copied_and_multiplied_by_torch(dtype: torch.dtype) -> None:
    weight, bias, x = draw(12, 40, dtype=dtype), draw(12, dtype=dtype), draw(3, 40, dtype=dtype)
    layer = triton.pack_linear(weight, bias)
    expected = reference.linear(x, reference.pack_linear(weight, bias))
    weight.zero_()
    bias.zero_()
    torch.testing.assert_close(triton.linear(x, layer), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    assert triton.linear(x, layer, FLOAT32).dtype == FLOAT32
    assert layer.nbytes == 12 * 40 * dtype.itemsize
    assert layer.form == f"{str(dtype)[6:]} weights, multiplied by torch"


def test_no_rows_give_no_rows_and_what_does_not_fit_is_refused() -> None:
    layer = triton.pack_linear(make_weight(4, 16, (5, 32), False))
    assert triton.linear(draw(0, 32, dtype=FLOAT16), layer).shape == (0, 5)
    assert triton.embedding(torch.zeros(0, dtype=torch.int64), layer, FLOAT16).shape == (0, 32)
    with pytest.raises(ValueError, match="expected 32 inputs"):
        triton.linear(draw(2, 31, dtype=FLOAT16), layer)
    with pytest.raises(ValueError, match="float64"):
        triton.linear(draw(2, 32, dtype=torch.float64), layer)
    with pytest.raises(ValueError, match=r"token_ids is torch\.int32"):
        triton.embedding(torch.zeros(1, dtype=torch.int32), layer, FLOAT16)
