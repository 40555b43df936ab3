# Triton infers the types of what it compiles.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Linear layers whose weights have few bits and are read as they are stored.

A weight is scale * code + offset, with codes centred on zero. Small integers are exact in float16 and
bfloat16, so a tensor core multiplies the activations with the codes themselves; scale and offset follow in float32,
once for a group, on the sums: no weight is ever rounded. Codes are unpacked in registers.

Two forms of one kernel. Few rows (decode) are bound by the reading of codes: inputs are split among programs until
there are enough for the device, and a second kernel adds the parts up, in a fixed order (as in Split-K products of
CUTLASS and Hoque et al., arXiv:2402.00025). More rows are tiled. The number of rows decides the form, so that a row's
last bits may differ between a batch of at most 16 rows and a larger one, but not among batches of one form.

M rows, N outputs, K inputs, G groups of inputs, W words of an output's codes, S splits of the inputs.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.groupwise import GroupwiseWeight
from octavo.kernels.triton.configuration import Configuration
from octavo.kernels.triton.dots import dot

TARGET_PROGRAMS = 256  # about two for each multiprocessor of an A100 or H100; not asked for: it decides the sums' order
LEAST_BLOCKS = 4  # blocks of inputs a split has at least
REDUCE_BLOCK, REDUCE_WARPS = 512, 4
EMBEDDING_BLOCK, EMBEDDING_WARPS = 512, 4
ACTIVATIONS = (torch.float16, torch.bfloat16, torch.float32)


@dataclass(frozen=True, slots=True)
class Tile:
    """The shape of a program's work on outputs."""

    rows: int
    outputs: int
    max_inputs: int  # of a block, whose codes must fit the registers
    num_warps: int
    num_stages: int


SKINNY = Tile(rows=16, outputs=64, max_inputs=128, num_warps=4, num_stages=4)  # the fewest rows for tensor cores
LARGE = Tile(rows=64, outputs=128, max_inputs=64, num_warps=4, num_stages=3)
# float32 goes without tensor cores, on which it would lose bits: its products are made in registers.
SKINNY_FLOAT32 = Tile(rows=16, outputs=32, max_inputs=32, num_warps=4, num_stages=2)
LARGE_FLOAT32 = Tile(rows=32, outputs=32, max_inputs=32, num_warps=4, num_stages=2)


@triton.jit
def _unpack(words, BITS: tl.constexpr, WORDS: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return codes (int32, signed) of [WORDS, BLOCK_N] words as [inputs, BLOCK_N]; a word's lowest bits come first."""
    CODES: tl.constexpr = 32 // BITS
    left = (32 - BITS) - BITS * tl.arange(0, CODES)
    # the shift back to the right repeats the sign
    codes = (words[:, None, :] << left[None, :, None]) >> (32 - BITS)
    return tl.reshape(codes, (WORDS * CODES, BLOCK_N))


@triton.jit
def _load_of_group(numbers_ptr, group, stride, outputs, mask):
    """Return a group's scales or offsets of some outputs, float32."""
    return tl.load(numbers_ptr + group * stride + outputs, mask=mask, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["num_rows"])
def groupwise_linear_kernel(
    out_ptr,
    x_ptr,
    words_ptr,
    scales_ptr,
    offsets_ptr,
    bias_ptr,
    num_rows,
    num_outputs,
    num_inputs,
    row_stride,
    blocks_per_split,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_OFFSETS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Compute a tile of x @ weight.T + bias, or of a split's share of it, which lies at out_SMN.

    BLOCK_K divides GROUP, so that a block of inputs has one scale for each output.
    """
    CODES: tl.constexpr = 32 // BITS
    WORDS: tl.constexpr = BLOCK_K // CODES
    outputs = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    split = tl.program_id(2)
    is_output, is_row = outputs < num_outputs, rows < num_rows
    inputs, words_in_block = tl.arange(0, BLOCK_K), tl.arange(0, WORDS)
    x_rows_ptr = x_ptr + rows.to(tl.int64)[:, None] * row_stride + inputs[None, :]
    stride = tl.full((), 0, tl.int64) + num_outputs
    first = split * blocks_per_split
    last = tl.minimum(first + blocks_per_split, num_inputs // BLOCK_K)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    # Triton loads ahead what a dot multiplies; the other numbers of a block are asked for here while the one before it
    # is multiplied.
    scale = _load_of_group(scales_ptr, first * BLOCK_K // GROUP, stride, outputs, is_output)
    if HAS_OFFSETS:
        offset = _load_of_group(offsets_ptr, first * BLOCK_K // GROUP, stride, outputs, is_output)
    for block in range(first, last):
        next_group = (block + 1) * BLOCK_K // GROUP
        is_next = is_output & (block + 1 < last)
        next_scale = _load_of_group(scales_ptr, next_group, stride, outputs, is_next)
        x = tl.load(x_rows_ptr + block * BLOCK_K, mask=is_row[:, None], other=0.0)
        addresses = words_ptr + (block * WORDS + words_in_block)[:, None] * stride + outputs[None, :]
        words = tl.load(addresses, mask=is_output[None, :], other=0)
        codes = _unpack(words, BITS, WORDS, BLOCK_N).to(tl.float32).to(x.dtype)
        acc += dot(x, codes) * scale[None, :]
        scale = next_scale
        if HAS_OFFSETS:
            next_offset = _load_of_group(offsets_ptr, next_group, stride, outputs, is_next)
            acc += tl.sum(x.to(tl.float32), axis=1)[:, None] * offset[None, :]
            offset = next_offset
    if HAS_BIAS:
        acc += tl.load(bias_ptr + outputs, mask=is_output, other=0.0).to(tl.float32)[None, :]
    addresses = out_ptr + (split * num_rows + rows)[:, None] * stride + outputs[None, :]
    tl.store(addresses, acc.to(out_ptr.dtype.element_ty), mask=is_row[:, None] & is_output[None, :])


@triton.jit(do_not_specialize=["num_rows"])
def add_splits_kernel(
    out_ptr, parts_ptr, bias_ptr, num_rows, num_outputs, num_splits, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr
):
    """Add up parts_SMN, the first split first, and then the bias."""
    size = num_rows * num_outputs
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = places < size
    total = tl.zeros((BLOCK,), tl.float32)
    for split in range(0, num_splits):
        total += tl.load(parts_ptr + split * size + places, mask=inside, other=0.0)
    if HAS_BIAS:
        total += tl.load(bias_ptr + places % num_outputs, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + places, total.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def groupwise_rows_kernel(
    out_ptr,
    token_ids_ptr,
    words_ptr,
    scales_ptr,
    offsets_ptr,
    num_outputs,
    num_inputs,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_OFFSETS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Dequantize BLOCK inputs of the weight's row of one token."""
    CODES: tl.constexpr = 32 // BITS
    token, inputs = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = inputs < num_inputs
    output = tl.load(token_ids_ptr + token)
    words = tl.load(words_ptr + (inputs // CODES).to(tl.int64) * num_outputs + output, mask=inside, other=0)
    codes = (words << ((32 - BITS) - BITS * (inputs % CODES))) >> (32 - BITS)
    groups = (inputs // GROUP).to(tl.int64) * num_outputs + output
    values = codes.to(tl.float32) * tl.load(scales_ptr + groups, mask=inside, other=0.0).to(tl.float32)
    if HAS_OFFSETS:
        values += tl.load(offsets_ptr + groups, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * num_inputs + inputs, values.to(out_ptr.dtype.element_ty), mask=inside)


@dataclass(frozen=True, slots=True, eq=False)
class GroupwiseLinear:
    """A linear layer whose weights stay quantized.

    A word has 32 / bits neighbouring inputs of one output, as signed numbers around zero, the first in the lowest
    bits. Words of neighbouring outputs lie side by side, so that a warp's loads do too; so do scales and offsets.
    """

    words_WN: Tensor  # int32
    scales_GN: Tensor  # float16 or float32
    offsets_GN: Tensor | None  # likewise, of the centred codes
    bias_N: Tensor | None
    bits: int
    group_size: int

    @property
    def num_outputs(self) -> int:
        return self.words_WN.shape[1]

    @property
    def num_inputs(self) -> int:
        return self.words_WN.shape[0] * 32 // self.bits

    @property
    def form(self) -> str:
        return f"{self.bits}-bit weights in groups of {self.group_size}, multiplied by Triton kernels as they are"

    @property
    def nbytes(self) -> int:
        offsets_bytes = 0 if self.offsets_GN is None else self.offsets_GN.nbytes
        return self.words_WN.nbytes + self.scales_GN.nbytes + offsets_bytes


def pack(weight: GroupwiseWeight, bias_N: Tensor | None) -> GroupwiseLinear:
    """Lay a weight out as the kernels read it; the bias is kept as it is."""
    return GroupwiseLinear(
        words_WN=_pack_words(weight),
        scales_GN=weight.scales_NG.t().contiguous(),
        offsets_GN=_centred_offsets(weight),
        bias_N=bias_N,
        bits=weight.bits,
        group_size=weight.group_size,
    )


def linear(x_MK: Tensor, layer: GroupwiseLinear, out_dtype: torch.dtype) -> Tensor:
    """Return x @ weight.T + bias as out_MN. Raises ValueError unless x has the layer's inputs, as floats."""
    num_rows, num_inputs = x_MK.shape
    if num_inputs != layer.num_inputs or x_MK.dtype not in ACTIVATIONS:
        raise ValueError(f"expected {layer.num_inputs} inputs a row, not {tuple(x_MK.shape)} in {x_MK.dtype}")
    x_MK = x_MK if x_MK.stride(1) == 1 else x_MK.contiguous()
    out_MN = torch.empty(num_rows, layer.num_outputs, dtype=out_dtype, device=x_MK.device)
    if num_rows:
        _groupwise_linear(x_MK, layer, out_MN)
    return out_MN


def rows(token_ids_T: Tensor, layer: GroupwiseLinear, dtype: torch.dtype) -> Tensor:
    """Return the weights of some outputs as out_TK."""
    num_inputs = layer.num_inputs
    out_TK = torch.empty(len(token_ids_T), num_inputs, dtype=dtype, device=token_ids_T.device)
    if len(token_ids_T):
        groupwise_rows_kernel[(len(token_ids_T), triton.cdiv(num_inputs, EMBEDDING_BLOCK))](
            *(out_TK, token_ids_T.contiguous(), layer.words_WN, layer.scales_GN, layer.offsets_GN),
            *(layer.num_outputs, num_inputs),
            BITS=layer.bits,
            GROUP=layer.group_size,
            HAS_OFFSETS=layer.offsets_GN is not None,
            BLOCK=EMBEDDING_BLOCK,
            num_warps=EMBEDDING_WARPS,
        )
    return out_TK


def choose_tile(num_rows: int, dtype: torch.dtype) -> Tile:
    """Return the tile for a number of rows of activations, whose registers do not spill."""
    is_skinny = num_rows <= SKINNY.rows
    if dtype is torch.float32:
        return SKINNY_FLOAT32 if is_skinny else LARGE_FLOAT32
    return SKINNY if is_skinny else LARGE


def split_inputs(num_outputs: int, num_blocks: int, tile: Tile = SKINNY) -> tuple[int, int]:
    """Return into how many parts few rows' products are split, and the blocks of inputs of each but the last.

    A function of the weight's shape alone, so that a row's sums have one order.
    """
    wanted = triton.cdiv(TARGET_PROGRAMS, triton.cdiv(num_outputs, tile.outputs))
    blocks_per_split = max(LEAST_BLOCKS, triton.cdiv(num_blocks, wanted))
    return triton.cdiv(num_blocks, blocks_per_split), blocks_per_split


def configurations() -> Iterator[Configuration]:
    """Yield AWQ's and GPTQ's form (groups of 128), GGUF's Q4_1 and Q4_K (32, offsets) and Q8_0 (32, 8 bits)."""
    forms = (
        ("fp16", 4, 128, True),
        ("bf16", 4, 128, True),
        ("bf16", 4, 32, True),
        ("bf16", 8, 32, False),
        ("fp32", 4, 32, True),
    )
    for dtype, bits, group_size, has_offsets in forms:
        for tile in (SKINNY_FLOAT32, LARGE_FLOAT32) if dtype == "fp32" else (SKINNY, LARGE):
            yield _linear_configuration(dtype, bits, group_size, has_offsets, tile)
    sizes = {"num_rows": "i32", "num_outputs": "i32:16", "num_splits": "i32"}
    yield Configuration(
        name="add_splits bf16",
        kernel=add_splits_kernel,
        signature={"out_ptr": "*bf16", "parts_ptr": "*fp32"} | sizes,
        constexprs={"bias_ptr": None, "HAS_BIAS": False, "BLOCK": REDUCE_BLOCK},
        num_warps=REDUCE_WARPS,
        num_stages=1,
    )
    words = {"words_ptr": "*i32", "scales_ptr": "*fp16", "num_outputs": "i32:16", "num_inputs": "i32:16"}
    yield Configuration(
        name="groupwise_rows bf16 8-bit/32",
        kernel=groupwise_rows_kernel,
        signature={"out_ptr": "*bf16", "token_ids_ptr": "*i64"} | words,
        constexprs={"offsets_ptr": None, "BITS": 8, "GROUP": 32, "HAS_OFFSETS": False, "BLOCK": EMBEDDING_BLOCK},
        num_warps=EMBEDDING_WARPS,
        num_stages=1,
    )


def _linear_configuration(dtype: str, bits: int, group_size: int, has_offsets: bool, tile: Tile) -> Configuration:
    pointers = {"x_ptr": f"*{dtype}", "words_ptr": "*i32", "scales_ptr": "*fp16"}
    is_skinny = tile in (SKINNY, SKINNY_FLOAT32)
    pointers |= {"out_ptr": "*fp32" if is_skinny else f"*{dtype}"}
    pointers |= {"offsets_ptr": "*fp32"} if has_offsets else {}
    sizes = {"num_rows": "i32", "num_outputs": "i32:16", "num_inputs": "i32:16", "row_stride": "i32:16"}
    absent: dict[str, object] = {"bias_ptr": None}
    if not has_offsets:
        absent["offsets_ptr"] = None
    return Configuration(
        name=f"groupwise_linear {dtype} {bits}-bit/{group_size} {'skinny' if is_skinny else 'tiled'}",
        kernel=groupwise_linear_kernel,
        signature=pointers | sizes | {"blocks_per_split": "i32"},
        constexprs=absent | _constexprs(bits, group_size, has_offsets, False, tile),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


def _constexprs(bits: int, group_size: int, has_offsets: bool, has_bias: bool, tile: Tile) -> dict[str, object]:
    return {
        "BITS": bits,
        "GROUP": group_size,
        "HAS_OFFSETS": has_offsets,
        "HAS_BIAS": has_bias,
        "BLOCK_M": tile.rows,
        "BLOCK_N": tile.outputs,
        "BLOCK_K": _block_of_inputs(group_size, tile),
    }


def _block_of_inputs(group_size: int, tile: Tile) -> int:
    """Return the largest power of two that divides groups (multiples of 16) and fits the tile."""
    return min(tile.max_inputs, group_size & -group_size)


def _groupwise_linear(x_MK: Tensor, layer: GroupwiseLinear, out_MN: Tensor) -> None:
    num_rows, num_outputs = out_MN.shape
    tile = choose_tile(num_rows, x_MK.dtype)
    num_blocks = layer.num_inputs // _block_of_inputs(layer.group_size, tile)
    is_split = num_rows <= SKINNY.rows
    num_splits, blocks_per_split = split_inputs(num_outputs, num_blocks, tile) if is_split else (1, num_blocks)
    parts_SMN, bias_N = out_MN, layer.bias_N
    if num_splits > 1:
        parts_SMN = torch.empty(num_splits, num_rows, num_outputs, dtype=torch.float32, device=x_MK.device)
        bias_N = None
    grid = (triton.cdiv(num_outputs, tile.outputs), triton.cdiv(num_rows, tile.rows), num_splits)
    groupwise_linear_kernel[grid](
        *(parts_SMN, x_MK, layer.words_WN, layer.scales_GN, layer.offsets_GN, bias_N),
        *(num_rows, num_outputs, layer.num_inputs, x_MK.stride(0), blocks_per_split),
        **_constexprs(layer.bits, layer.group_size, layer.offsets_GN is not None, bias_N is not None, tile),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    if num_splits > 1:
        _add_splits(parts_SMN, layer.bias_N, out_MN)


def _add_splits(parts_SMN: Tensor, bias_N: Tensor | None, out_MN: Tensor) -> None:
    add_splits_kernel[(triton.cdiv(out_MN.numel(), REDUCE_BLOCK),)](
        *(out_MN, parts_SMN, bias_N, *out_MN.shape, len(parts_SMN)),
        HAS_BIAS=bias_N is not None,
        BLOCK=REDUCE_BLOCK,
        num_warps=REDUCE_WARPS,
    )


def _pack_words(weight: GroupwiseWeight) -> Tensor:
    """Return words_WN (int32) of codes minus the middle one: that is its highest bit flipped, in two's complement."""
    flipped_NB = weight.codes_NB ^ (0x88 if weight.bits == 4 else 0x80)
    # `GroupwiseWeight` has the earlier code in the lower half of a byte; a little-endian word goes on like that.
    return flipped_NB.contiguous().view(torch.int32).t().contiguous()


def _centred_offsets(weight: GroupwiseWeight) -> Tensor | None:
    """Return offsets_GN of codes that are centred, float32: they are smaller, and the sums they enter cancel less."""
    if weight.offsets_NG is None:
        return None
    middle = 2 ** (weight.bits - 1)
    offsets_NG: Tensor = weight.offsets_NG.float() + middle * weight.scales_NG.float()
    return offsets_NG.t().contiguous()
