"""Linear layers on the CPU whose weights stay in 4, 8 or 16 bits (see `kernels.cpu.panels`).

T tokens or rows, N outputs, K inputs, G groups of inputs.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from octavo.kernels.cpu import panel_products
from octavo.kernels.cpu.checks import LIKE, contiguous, require_inside
from octavo.kernels.cpu.multiply_add import HAS_BFLOAT16
from octavo.kernels.cpu.panels import PANEL, Product
from octavo.kernels.groupwise import GroupwiseWeight

ROUNDED_BITS = {4: 8, 8: 16}  # bits of inputs, by the bits of the weights
BFLOAT16_FORM = f"multiplied in {'pairs' if HAS_BFLOAT16 else 'float32'}"  # for people


@dataclass(frozen=True, slots=True, eq=False)
class PanelLinear:
    """A linear layer in the layout of `kernels.cpu.panels`, with outputs padded to whole panels."""

    codes: Tensor  # int32, (panels, words of an output, PANEL)
    scales: Tensor | None  # (panels, G, PANEL), float16 or float32; None: the codes are bfloat16 numbers
    offsets: Tensor | None  # as scales
    bias: Tensor | None  # float32
    num_outputs: int
    num_inputs: int
    group_size: int  # 0: there are no groups
    bits: int

    @property
    def form(self) -> str:
        if self.bits == 16:
            return f"bfloat16 weights, {BFLOAT16_FORM}"
        rounded = ROUNDED_BITS[self.bits]
        return f"{self.bits}-bit weights in groups of {self.group_size}, times inputs of {rounded} bits"

    @property
    def nbytes(self) -> int:
        held = (self.codes, self.scales, self.offsets, self.bias)
        return sum(tensor.nbytes for tensor in held if tensor is not None)

    def multiplies_in_pairs(self, x_dtype: torch.dtype) -> bool:
        """Return whether the processor multiplies the weights with inputs of this dtype as they are."""
        return HAS_BFLOAT16 and self.bits == 16 and x_dtype == torch.bfloat16


def pack(weight: GroupwiseWeight, bias_N: Tensor | None) -> PanelLinear:
    """Return a layer that holds nothing of `weight`. Raises ValueError if the weight breaks the rules of its class."""
    for name, values in (("scales", weight.scales_NG), ("offsets", weight.offsets_NG)):
        if values is not None and (values.dtype not in (torch.float16, torch.float32) or not values.is_cpu):
            raise ValueError(f"{name} are {values.dtype} on {values.device}, float16 or float32 on the CPU is needed")
    if weight.num_inputs % weight.group_size != 0:
        raise ValueError(f"{weight.num_inputs} inputs are no whole number of groups of {weight.group_size}")
    codes_NB = weight.codes_NB.clone(memory_format=torch.contiguous_format)  # from an address that suits int32
    return PanelLinear(
        codes=_in_panels(codes_NB.view(torch.int32)),
        scales=_in_panels(weight.scales_NG),
        offsets=None if weight.offsets_NG is None else _in_panels(weight.offsets_NG),
        bias=_padded_bias(bias_N),
        num_outputs=weight.num_outputs,
        num_inputs=weight.num_inputs,
        group_size=weight.group_size,
        bits=weight.bits,
    )


def pack_bfloat16(weight_NK: Tensor, bias_N: Tensor | None) -> PanelLinear:
    """Return a layer with a copy of a bfloat16 weight."""
    num_outputs, num_inputs = weight_NK.shape
    padded_NK = functional.pad(weight_NK, (0, num_inputs % 2)).contiguous()
    return PanelLinear(
        codes=_in_panels(padded_NK.view(torch.int32)),
        scales=None,
        offsets=None,
        bias=_padded_bias(bias_N),
        num_outputs=num_outputs,
        num_inputs=num_inputs,
        group_size=0,
        bits=16,
    )


def linear(x_TK: Tensor, layer: PanelLinear, out_dtype: torch.dtype | None) -> Tensor:
    """See `kernels.backend`; sums are float32 and rounded once. A row has the same bits among any number of rows."""
    if x_TK.ndim != 2 or x_TK.shape[1] != layer.num_inputs or not x_TK.is_cpu:
        raise ValueError(f"expected {layer.num_inputs} inputs a row on the CPU, not {tuple(x_TK.shape)}")
    x_TK = x_TK.contiguous()
    num_rows, dtype = x_TK.shape[0], out_dtype or x_TK.dtype
    out_TN = torch.empty(num_rows, layer.num_outputs, dtype=dtype)
    product = product_of(layer, out_TN.data_ptr(), x_TK.data_ptr(), num_rows, dtype, x_TK.dtype)
    if num_rows > 0:
        panel_products.linear(tuple(product), torch.get_num_threads())
    return out_TN


def embedding(token_ids_T: Tensor, layer: PanelLinear, dtype: torch.dtype) -> Tensor:
    """See `kernels.backend`. Raises IndexError on a token (int64) without a row."""
    token_ids_T = contiguous(token_ids_T, torch.int64)
    require_inside("id", token_ids_T, 0, layer.num_outputs)
    out_TK = torch.empty(len(token_ids_T), layer.num_inputs, dtype=dtype)
    product = product_of(layer, out_TK.data_ptr(), 0, len(token_ids_T), dtype, dtype)
    panel_products.embedding(tuple(product), token_ids_T.numpy())
    return out_TK


def product_of(
    layer: PanelLinear, out: int, x: int, num_rows: int, out_dtype: torch.dtype, x_dtype: torch.dtype
) -> Product:
    """Return the product of rows at the address `x` with a layer, to be written to the address `out`."""
    for dtype in (out_dtype, x_dtype):
        if dtype not in LIKE:
            raise ValueError(f"activations on the CPU are float32 or bfloat16, not {dtype}")
    return Product(
        out=out,
        x=x,
        codes=layer.codes.data_ptr(),
        scales=_address_of(layer.scales),
        offsets=_address_of(layer.offsets),
        bias=_address_of(layer.bias),
        num_rows=num_rows,
        num_outputs=layer.num_outputs,
        num_inputs=layer.num_inputs,
        group_size=layer.group_size,
        bits=layer.bits,
        out_bytes=out_dtype.itemsize,
        x_bytes=x_dtype.itemsize,
        scale_bytes=0 if layer.scales is None else layer.scales.itemsize,
        offset_bytes=0 if layer.offsets is None else layer.offsets.itemsize,
        in_pairs=int(layer.multiplies_in_pairs(x_dtype)),
    )


def _address_of(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _padded_bias(bias_N: Tensor | None) -> Tensor | None:
    return None if bias_N is None else functional.pad(bias_N.float(), (0, -len(bias_N) % PANEL)).clone()


def _in_panels(values_NG: Tensor) -> Tensor:
    """Return (panels, G, PANEL), padded with zeros."""
    num_columns = values_NG.shape[1]
    padded = functional.pad(values_NG, (0, 0, 0, -len(values_NG) % PANEL))
    return padded.view(-1, PANEL, num_columns).transpose(1, 2).contiguous()
