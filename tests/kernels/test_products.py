import dataclasses
import weakref

import pytest
import torch
from torch import Tensor

from octavo.kernels import cpu, reference
from octavo.kernels.cpu import panel_linear, panel_products
from octavo.kernels.cpu.multiply_add import HAS_BFLOAT16

FLOAT32, BFLOAT16 = torch.float32, torch.bfloat16
DTYPES = pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16])
ROWS = (*range(1, 34), 64, 100, 128, 200, 300, 512, 1000, 2048)


def draw(*shape: int, dtype: torch.dtype = FLOAT32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


@DTYPES
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(
    "shape", [(960, 576), (576, 576), (3072, 576), (576, 1536), (96, 64), (70, 33), (5, 7), (1, 300)]
)
def test_bits_of_a_row_do_not_depend_on_the_number_of_rows(
    shape: tuple[int, int], with_bias: bool, dtype: torch.dtype, two_threads: None
) -> None:
    weight, bias = draw(*shape, dtype=dtype), draw(shape[0], dtype=dtype) if with_bias else None
    x = draw(max(ROWS), shape[1], dtype=dtype)
    layer = cpu.pack_linear(weight, bias)
    whole = cpu.linear(x, layer)
    for rows in ROWS:
        assert torch.equal(cpu.linear(x[-rows:], layer), whole[-rows:])
    cpu.set_num_threads(1)
    assert torch.equal(cpu.linear(x, layer), whole)


@DTYPES
def test_bits_of_logits_do_not_depend_on_the_number_of_rows(dtype: torch.dtype) -> None:
    layer = cpu.pack_linear(draw(49_152, 576, dtype=dtype))
    x = draw(100, 576, dtype=dtype)
    whole = cpu.linear(x, layer, FLOAT32)
    for rows in (1, 2, 3, 5, 8, 17, 33, 64):
        assert torch.equal(cpu.linear(x[-rows:], layer, FLOAT32), whole[-rows:])


@DTYPES
@pytest.mark.parametrize("rows", [0, 1, 6, 40])
def test_product_equals_reference(rows: int, dtype: torch.dtype) -> None:
    weight, bias, x = draw(48, 80, dtype=dtype), draw(48, dtype=dtype), draw(rows, 80, dtype=dtype)
    layer = cpu.pack_linear(weight, bias)
    tolerance = {"rtol": 2**-7, "atol": 1e-2} if dtype == BFLOAT16 else {"rtol": 1e-5, "atol": 1e-5}
    for out_dtype in (None, FLOAT32):
        expected = reference.linear(x, reference.pack_linear(weight, bias), out_dtype)
        torch.testing.assert_close(cpu.linear(x, layer, out_dtype), expected, **tolerance)


@pytest.mark.parametrize(("num_outputs", "num_inputs"), [(70, 300), (5, 7)])
@pytest.mark.parametrize("rows", [1, 3, 40, 200])
@pytest.mark.skipif(HAS_BFLOAT16, reason="this processor's instruction rounds in its own way")
def test_pairs_of_bfloat16_are_multiplied_as_one_by_one(num_outputs: int, num_inputs: int, rows: int) -> None:
    """What only processors with such an instruction do, done here without it."""
    layer = panel_linear.pack_bfloat16(draw(num_outputs, num_inputs, dtype=BFLOAT16), draw(num_outputs))
    x, out = draw(rows, num_inputs, dtype=BFLOAT16), torch.empty(rows, num_outputs)
    product = panel_linear.product_of(layer, out.data_ptr(), x.data_ptr(), rows, out.dtype, x.dtype)
    panel_products.linear(tuple(product._replace(in_pairs=1)), 1)
    assert torch.equal(out, panel_linear.linear(x, layer, FLOAT32))


def test_few_rows_are_padded_and_many_are_sliced() -> None:
    layer = cpu.pack_linear(draw(48, 80), draw(48))
    narrow = dataclasses.replace(layer, min_rows=8, max_rows=16)
    x = draw(100, 80)
    for rows in (1, 7, 8, 9, 16, 17, 33, 100):
        assert torch.equal(cpu.linear(x[:rows], narrow), cpu.linear(x[:rows], layer))


@DTYPES
def test_weight_and_bias_are_not_kept(dtype: torch.dtype) -> None:
    weight, bias = draw(48, 80, dtype=dtype), draw(48, dtype=dtype)
    layer = cpu.pack_linear(weight, bias)
    x = draw(3, 80, dtype=dtype)
    before = cpu.linear(x, layer)
    references = weakref.ref(weight), weakref.ref(bias)
    bias.zero_()
    weight.zero_()
    del weight, bias
    assert [reference() for reference in references] == [None, None]
    assert torch.equal(cpu.linear(x, layer), before)


def test_form_says_how_products_are_computed() -> None:
    assert cpu.pack_linear(draw(8, 8)).form == "float32 weights, oneDNN prepacked"
    ways = ["oneDNN prepacked", "multiplied in pairs" if HAS_BFLOAT16 else "multiplied in float32"]
    assert cpu.pack_linear(draw(8, 8, dtype=BFLOAT16)).form in [f"bfloat16 weights, {way}" for way in ways]


def test_what_does_not_fit_is_refused() -> None:
    layer = cpu.pack_linear(draw(8, 16))
    with pytest.raises(ValueError, match="float16"):
        cpu.pack_linear(draw(8, 16).half())
    with pytest.raises(ValueError, match="expected 16 inputs"):
        cpu.linear(draw(2, 15), layer)
    with pytest.raises(ValueError, match="bfloat16"):
        cpu.linear(draw(2, 16, dtype=BFLOAT16), layer)
