"""Linear layers on the CPU: oneDNN products with prepacked weights, whose rows do not depend on their number.

Quantized weights are multiplied by `kernels.cpu.panel_linear`. So are bfloat16 weights, except on machines that
multiply matrices of them (AMX, Arm) and whose oneDNN keeps a row's bits, which it does not on every processor with AMX.

M rows, N outputs, K inputs.
"""

import functools
import platform
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from octavo.kernels.cpu import panel_linear
from octavo.kernels.cpu.multiply_add import HAS_BFLOAT16
from octavo.kernels.cpu.panel_linear import PanelLinear
from octavo.kernels.groupwise import GroupwiseWeight

MIN_ROWS = (1, 2, 4, 8, 16)
REFERENCE_ROWS = 64
PROBED_ROWS = (1, 2, 3, 4, 5, 7, 8, 12, 16, 17, 33, 64, 200, 512)  # beyond 64 only for weights that are not huge
TYPICAL_SHAPES = ((3072, 576), (576, 1536), (2048, 2048))  # outputs and inputs, tried before oneDNN is chosen
MAX_PROBE_WORK = 2**30  # multiply-adds of one product
PACKED_FOR_ROWS = 32  # the number of rows for which oneDNN chooses the weight's blocking


@dataclass(frozen=True, slots=True, eq=False)
class PlainLinear:
    """A linear layer whose weight oneDNN has reordered into memory of its own."""

    packed: Tensor  # opaque
    bias_N: Tensor | None  # in the dtype of the product
    num_inputs: int
    num_outputs: int
    form: str  # for people
    min_rows: int  # fewer rows are padded to as many
    max_rows: int | None  # more rows are computed in slices of as many; None: never

    @property
    def nbytes(self) -> int:
        return self.num_inputs * self.num_outputs * self.packed.dtype.itemsize


def pack_linear(weight_NK: Tensor | GroupwiseWeight, bias_N: Tensor | None = None) -> PlainLinear | PanelLinear:
    """See `kernels.backend`.

    A row's product has the same bits among any number of rows, which is tried once for each shape. Raises RuntimeError
    where this machine gives other bits.
    """
    if isinstance(weight_NK, GroupwiseWeight):
        return panel_linear.pack(weight_NK, bias_N)
    dtype = weight_NK.dtype
    if dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"a weight on the CPU is float32 or bfloat16, not {dtype}")
    if dtype == torch.bfloat16 and not _is_for_onednn():
        return panel_linear.pack_bfloat16(weight_NK, bias_N)
    num_outputs, num_inputs = weight_NK.shape
    least, most = invariant_rows(num_outputs, num_inputs, dtype, torch.get_num_threads())
    return PlainLinear(
        packed=_reorder(weight_NK),
        bias_N=None if bias_N is None else bias_N.clone(),
        num_inputs=num_inputs,
        num_outputs=num_outputs,
        form=f"{_name(dtype)} weights, oneDNN prepacked",
        min_rows=least,
        max_rows=most,
    )


@functools.cache
def _is_for_onednn() -> bool:
    """Return whether oneDNN multiplies bfloat16 weights: where it has instructions that panels lack, AMX's or Arm's.

    On other x86-64 oneDNN uses AVX-512-BF16, as panels do, or no instructions, and is then five to ten times slower.
    Panels are also taken where a row's bits in oneDNN depend on the number of rows.
    """
    if platform.machine() == "x86_64":
        return torch.cpu._is_amx_tile_supported() and all(_is_invariant(*shape) for shape in TYPICAL_SHAPES)
    is_supported: bool = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return is_supported and all(_is_invariant(*shape) for shape in TYPICAL_SHAPES)


def _is_invariant(num_outputs: int, num_inputs: int) -> bool:
    try:
        invariant_rows(num_outputs, num_inputs, torch.bfloat16, torch.get_num_threads())
    except RuntimeError:
        return False
    return True


def has_bfloat16() -> bool:
    """Return whether the processor has instructions that bfloat16 weights are multiplied by."""
    return HAS_BFLOAT16 or _is_for_onednn()


def bfloat16_form() -> str:
    """Return how bfloat16 weights are multiplied, for people, with the instructions, if there are any."""
    if _is_for_onednn():
        return f"oneDNN ({'AMX' if platform.machine() == 'x86_64' else 'Arm BF16'})"
    return f"{panel_linear.BFLOAT16_FORM} (AVX-512-BF16)" if HAS_BFLOAT16 else panel_linear.BFLOAT16_FORM


def linear(x_MK: Tensor, layer: PlainLinear | PanelLinear, out_dtype: torch.dtype | None = None) -> Tensor:
    """See `kernels.backend`.

    With a bfloat16 weight, out_dtype float32 gives the accumulated sums unrounded; only oneDNN's are rounded.
    """
    if isinstance(layer, PanelLinear):
        return panel_linear.linear(x_MK, layer, out_dtype)
    if x_MK.ndim != 2 or x_MK.shape[1] != layer.num_inputs or x_MK.dtype != layer.packed.dtype:
        raise ValueError(
            f"expected {layer.num_inputs} inputs a row in {layer.packed.dtype}, not {tuple(x_MK.shape)} in {x_MK.dtype}"
        )
    out_dtype = out_dtype or layer.packed.dtype
    num_rows = x_MK.shape[0]
    if num_rows == 0:
        return x_MK.new_empty((0, layer.num_outputs), dtype=out_dtype)
    if layer.max_rows is None or num_rows <= layer.max_rows:
        return _slice(x_MK, layer).to(out_dtype)
    return torch.cat([_slice(part, layer).to(out_dtype) for part in torch.split(x_MK, layer.max_rows)])


def embedding(token_ids_T: Tensor, layer: PanelLinear, dtype: torch.dtype) -> Tensor:
    """See `kernels.backend`."""
    return panel_linear.embedding(token_ids_T, layer, dtype)


@functools.lru_cache(maxsize=1024)
def invariant_rows(num_outputs: int, num_inputs: int, dtype: torch.dtype, num_threads: int) -> tuple[int, int | None]:
    """Return the least and the largest number of rows (None: no limit) between which a row has the same bits.

    They are found by trying, with random numbers, because they depend on which of oneDNN's kernels this machine takes.
    `num_threads` only tells cached answers apart. Raises RuntimeError if no number of rows up to 16 will do.
    """
    generator = torch.Generator().manual_seed(0)
    packed = _reorder(_random(num_outputs, num_inputs, generator).to(dtype))
    work_per_row = num_outputs * num_inputs
    probed = [rows for rows in PROBED_ROWS if rows <= REFERENCE_ROWS or rows * work_per_row <= MAX_PROBE_WORK]
    x_MK = _random(max(probed), num_inputs, generator).to(dtype)
    expected_MN = _product(x_MK[:REFERENCE_ROWS], packed, None)
    differing = [rows for rows in probed if not _begins_with(_product(x_MK[:rows], packed, None), expected_MN)]
    too_many = [rows for rows in differing if rows > REFERENCE_ROWS]
    for least in MIN_ROWS:
        if all(rows < least or rows > REFERENCE_ROWS for rows in differing):
            return least, REFERENCE_ROWS if too_many else None
    raise RuntimeError(
        f"oneDNN's {_name(dtype)} products of {num_inputs} inputs and {num_outputs} outputs differ by the number of "
        f"rows on this machine (at {differing}): results would depend on the batch"
    )


def _begins_with(y_MN: Tensor, expected_MN: Tensor) -> bool:
    common = min(len(y_MN), len(expected_MN))
    return torch.equal(y_MN[:common], expected_MN[:common])


def _slice(x_MK: Tensor, layer: PlainLinear) -> Tensor:
    """Return the product of at most `max_rows` rows, in the dtype of the product."""
    num_rows = x_MK.shape[0]
    if num_rows < layer.min_rows:
        x_MK = functional.pad(x_MK, (0, 0, 0, layer.min_rows - num_rows))
    return _product(x_MK, layer.packed, layer.bias_N)[:num_rows]


def _random(rows: int, columns: int, generator: torch.Generator) -> Tensor:
    """Return normal numbers; a large matrix repeats some of its rows."""
    distinct = min(rows, max(1, 2**20 // columns))
    return torch.randn(distinct, columns, generator=generator).repeat(-(-rows // distinct), 1)[:rows].contiguous()


def _reorder(weight_NK: Tensor) -> Tensor:
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight_NK.contiguous(), PACKED_FOR_ROWS)
    return packed


def _product(x_MK: Tensor, packed: Tensor, bias_N: Tensor | None) -> Tensor:
    y_MN: Tensor = torch.ops.mkldnn._linear_pointwise(x_MK, packed, bias_N, "none", [], "")
    return y_MN


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
