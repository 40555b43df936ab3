"""A program: the operations of a step as data, so that one call does many of them.

See `kernels.backend.Program`. A function that adds an operation computes nothing: it notes the addresses of tensors,
which must stay where they are and which the program keeps alive.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from octavo.kernels.cpu import operations, panel_linear
from octavo.kernels.cpu.checks import (
    address_of_heads,
    contiguous,
    has_dense_heads,
    like,
    require_contiguous,
    require_inside,
    require_shape,
)
from octavo.kernels.cpu.operations import OPERATIONS, ROW_SIZE, Fields, Operation, Row
from octavo.kernels.cpu.panel_linear import PanelLinear
from octavo.kernels.cpu.panels import Product
from octavo.kernels.cpu.program_kernels import DONE, NO_MEMORY, run
from octavo.kernels.cpu.records import words_of

NO_WINDOW = 2**40
CALL_PRODUCTS = 2 * 10**9  # multiply-adds, about a tenth of a second's work
MEETS, KIND = Row._fields.index("meets"), Row._fields.index("kind")


class Layer(NamedTuple):
    """Where the operations of a layer end, and how many weights they multiply with."""

    end: int
    num_weights: int  # of the products


class Program:
    """Operations on tensors of one dtype, float32 or bfloat16."""

    def __init__(self, num_rows: int, dtype: torch.dtype, call_products: int = CALL_PRODUCTS) -> None:
        """A run comes back to Python at the end of a layer when it has done `call_products` multiply-adds."""
        self.num_rows = num_rows
        self._call_products = call_products
        self.dtype = dtype
        self._rows: list[list[int]] = []
        self._kinds: dict[tuple[int, ...], int] = {}  # of attention, by all sizes on which its tasks depend
        self._first_of_kind: list[int] = []
        self._layers: list[Layer] = []
        self._num_weights = 0
        self._num_slots, self._num_positions, self._num_ids = 2**62, 2**62, 2**62
        self._held: list[object] = []
        self._of_parts: dict[tuple[int, int], Tensor] = {}
        self._arrays: tuple[np.ndarray, np.ndarray] | None = None

    @property
    def num_operations(self) -> int:
        """Return how many operations were written so far."""
        return len(self._rows)

    def new(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Return memory for `num_rows` rows of `shape`, in the program's dtype or another."""
        return torch.empty(self.num_rows, *shape, dtype=dtype or self.dtype)

    def embedding(self, weight: Tensor | PanelLinear, out_TE: Tensor) -> None:
        """Write the rows of a weight that the step's tokens name."""
        if isinstance(weight, PanelLinear):
            self._require(out_TE)
            num_ids, size = weight.num_outputs, weight.num_inputs
            self._append(operations.panel_embedding, self._product_of(weight, out_TE, out_TE))
        else:
            self._require(out_TE, weight)
            require_contiguous(weight)
            num_ids, size = weight.shape
            fields = operations.Embedding(out=self._at(out_TE), weight=self._at(weight), size=size)
            self._append(operations.embedding, fields)
        require_shape("out", out_TE, (self.num_rows, size))
        require_contiguous(out_TE)
        self._num_ids = min(self._num_ids, num_ids)

    def clear(self, out_TE: Tensor) -> None:
        """Make rows of float32 zero."""
        require_contiguous(out_TE)
        if out_TE.dtype != torch.float32:
            raise ValueError(f"what is cleared is {out_TE.dtype}, float32 is needed")
        self._append(operations.clear, operations.Clear(out=self._at(out_TE), size=out_TE.shape[1]))

    def add_rms_norm(self, x_TE: Tensor, residual_TE: Tensor, weight_E: Tensor, eps: float, out_TE: Tensor) -> None:
        self._require(x_TE, weight_E, out_TE)
        require_shape("weight", weight_E, x_TE.shape[1:])
        require_shape("residual", residual_TE, tuple(x_TE.shape))
        require_shape("out", out_TE, tuple(x_TE.shape))
        require_contiguous(x_TE, residual_TE, weight_E, out_TE)
        if residual_TE.dtype != torch.float32:
            raise ValueError(f"the residual is {residual_TE.dtype}, float32 is needed")
        fields = operations.AddRMSNorm(
            out=self._at(out_TE),
            x=self._at(x_TE),
            residual=self._at(residual_TE),
            weight=self._at(weight_E),
            size=x_TE.shape[1],
            eps=eps,
        )
        self._append(operations.add_rms_norm, fields)

    def rms_norm(self, x_THD: Tensor, weight_D: Tensor, eps: float, out_THD: Tensor) -> None:
        self._require(x_THD, weight_D, out_THD)
        _, num_heads, head_size = x_THD.shape
        require_shape("weight", weight_D, (head_size,))
        require_shape("out", out_THD, tuple(x_THD.shape))
        require_contiguous(weight_D, out_THD)
        _require_dense_heads(x_THD)
        fields = operations.RMSNorm(
            out=self._at(out_THD),
            x=self._at(x_THD),
            weight=self._at(weight_D),
            num_heads=num_heads,
            token_stride=x_THD.stride(0),
            size=head_size,
            eps=eps,
        )
        self._append(operations.rms_norm, fields)

    def linear(self, x_TE: Tensor, layers: Sequence[PanelLinear], out_TN: Tensor) -> None:
        """Write the products with several layers side by side."""
        require_shape("out", out_TN, (self.num_rows, sum(layer.num_outputs for layer in layers)))
        require_contiguous(x_TE, out_TN)
        if len(layers) == 1:
            self._product(x_TE, layers[0], out_TN)
            return
        first = 0
        for number, layer in enumerate(layers):
            size = layer.num_outputs
            if (number, size) not in self._of_parts:
                self._of_parts[number, size] = self.new(size)
            part_TN = self._of_parts[number, size]
            self._product(x_TE, layer, part_TN)
            fields = operations.Copy(
                out=self._at(out_TN[:, first:]), x=self._at(part_TN), size=size, out_stride=out_TN.shape[1]
            )
            self._append(operations.copy, fields)
            first += size

    def rotate_and_store_kv(
        self,
        q_THD: Tensor,
        k_TKD: Tensor,
        v_TKD: Tensor,
        cos_sin_PR: Tensor,
        k_cache_NKDP: Tensor,
        v_cache_NKPD: Tensor,
    ) -> None:
        self._require(q_THD, k_TKD)
        _require_dense_heads(q_THD, k_TKD)
        require_contiguous(cos_sin_PR)
        _, num_heads, head_size = q_THD.shape
        num_positions, rotary_size = cos_sin_PR.shape
        if rotary_size > head_size or rotary_size % 2 != 0 or cos_sin_PR.dtype != torch.float32:
            raise ValueError(f"cos_sin has {rotary_size} columns of {cos_sin_PR.dtype} for heads of {head_size}")
        fields = operations.Rotate(
            q=self._at(q_THD),
            k=self._at(k_TKD),
            cos_sin=self._at(cos_sin_PR),
            num_heads=num_heads,
            num_kv_heads=k_TKD.shape[1],
            head_size=head_size,
            rotary_size=rotary_size,
            q_stride=q_THD.stride(0),
            k_stride=k_TKD.stride(0),
        )
        self._append(operations.rotate, fields)
        self._num_positions = min(self._num_positions, num_positions)
        self.store_kv(k_TKD, v_TKD, k_cache_NKDP, v_cache_NKPD)

    def store_kv(self, k_TKD: Tensor, v_TKD: Tensor, k_cache_NKDP: Tensor, v_cache_NKPD: Tensor) -> None:
        self._require(k_TKD, v_TKD, k_cache_NKDP, v_cache_NKPD)
        _require_dense_heads(k_TKD, v_TKD)
        num_blocks, num_kv_heads, head_size, block_size = k_cache_NKDP.shape
        value_size = v_TKD.shape[2]
        require_shape("k", k_TKD, (self.num_rows, num_kv_heads, head_size))
        require_shape("v", v_TKD, (self.num_rows, num_kv_heads, value_size))
        require_shape("v_cache", v_cache_NKPD, (num_blocks, num_kv_heads, block_size, value_size))
        require_contiguous(k_cache_NKDP, v_cache_NKPD)
        fields = operations.StoreKV(
            k=self._at(k_TKD),
            v=self._at(v_TKD),
            k_cache=self._at(k_cache_NKDP),
            v_cache=self._at(v_cache_NKPD),
            num_kv_heads=num_kv_heads,
            head_size=head_size,
            value_size=value_size,
            block_size=block_size,
            k_stride=k_TKD.stride(0),
            v_stride=v_TKD.stride(0),
        )
        self._append(operations.store_kv, fields)
        self._num_slots = min(self._num_slots, num_blocks * block_size)

    def paged_attention(
        self,
        q_THD: Tensor,
        k_cache_NKDP: Tensor,
        v_cache_NKPD: Tensor,
        scale: float,
        sliding_window: int | None,
        alibi_slopes_H: Tensor | None,
        out_THD: Tensor,
    ) -> None:
        self._require(q_THD, k_cache_NKDP, v_cache_NKPD, out_THD)
        _require_dense_heads(q_THD)
        _, num_heads, head_size = q_THD.shape
        num_blocks, num_kv_heads, _, block_size = k_cache_NKDP.shape
        value_size = v_cache_NKPD.shape[3]
        require_shape("k_cache", k_cache_NKDP, (num_blocks, num_kv_heads, head_size, block_size))
        require_shape("v_cache", v_cache_NKPD, (num_blocks, num_kv_heads, block_size, value_size))
        require_shape("out", out_THD, (self.num_rows, num_heads, value_size))
        require_contiguous(k_cache_NKDP, v_cache_NKPD, out_THD)
        window = NO_WINDOW if sliding_window is None else sliding_window
        if num_heads % num_kv_heads != 0 or window < 1:
            raise ValueError(f"{num_heads} query heads, {num_kv_heads} key/value heads, a window of {window}")
        slopes = address_of_heads("alibi_slopes", alibi_slopes_H, num_heads)
        self._held.append(alibi_slopes_H)
        sizes = (num_blocks, block_size, num_heads, num_kv_heads, head_size, value_size, q_THD.stride(0), window)
        if sizes not in self._kinds:
            self._kinds[sizes] = len(self._kinds)
            self._first_of_kind.append(len(self._rows))
        fields = operations.PagedAttention(
            out=self._at(out_THD),
            q=self._at(q_THD),
            k_cache=self._at(k_cache_NKDP),
            v_cache=self._at(v_cache_NKPD),
            alibi_slopes=slopes,
            num_blocks=num_blocks,
            block_size=block_size,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_size=head_size,
            value_size=value_size,
            q_stride=q_THD.stride(0),
            window=window,
            kind=self._kinds[sizes],
            scale=scale,
        )
        self._append(operations.paged_attention, fields)

    def silu_and_mul(self, gate_up_T2I: Tensor, out_TI: Tensor) -> None:
        self._require(gate_up_T2I, out_TI)
        require_contiguous(gate_up_T2I, out_TI)
        require_shape("gate_up", gate_up_T2I, (self.num_rows, 2 * out_TI.shape[1]))
        fields = operations.SiluAndMul(out=self._at(out_TI), gate_up=self._at(gate_up_T2I), size=out_TI.shape[1])
        self._append(operations.silu_and_mul, fields)

    def end_layer(self) -> None:
        """Let a run come back to Python here if it has done much."""
        self._layers.append(Layer(len(self._rows), self._num_weights))
        self._num_weights = 0

    def run(
        self,
        token_ids_T: Tensor,
        positions_T: Tensor,
        slot_mapping_T: Tensor,
        block_tables_SM: Tensor,
        cu_seqlens_q: Tensor,
        seq_lens_S: Tensor,
        on_layers: Callable[[int], object],
        times_ns: np.ndarray | None = None,
    ) -> None:
        """Do it all for the first rows of the tensors, as many as there are tokens.

        `on_layers` is told after each call how many layers it ended. `times_ns` (int64, a place for each operation)
        is added to. Raises ValueError or IndexError as the functions of `kernels.backend` do, before anything is done.
        """
        num_tokens, (num_seqs, max_blocks) = len(token_ids_T), block_tables_SM.shape
        if num_tokens > self.num_rows:
            raise ValueError(f"{num_tokens} tokens, the program has room for {self.num_rows}")
        times_ns = np.empty(0, np.int64) if times_ns is None else times_ns
        if len(times_ns) not in (0, self.num_operations):
            raise ValueError(f"places for {len(times_ns)} times, the program has {self.num_operations} operations")
        require_shape("positions", positions_T, (num_tokens,))
        require_shape("slot_mapping", slot_mapping_T, (num_tokens,))
        require_shape("cu_seqlens_q", cu_seqlens_q, (num_seqs + 1,))
        require_shape("seq_lens", seq_lens_S, (num_seqs,))
        of_tokens = [contiguous(tensor, torch.int64) for tensor in (token_ids_T, positions_T, slot_mapping_T)]
        of_seqs = [contiguous(tensor, torch.int32) for tensor in (block_tables_SM, cu_seqlens_q, seq_lens_S)]
        require_inside("id", of_tokens[0], 0, self._num_ids)
        require_inside("position", of_tokens[1], 0, self._num_positions)
        require_inside("slot", of_tokens[2], -(2**63), self._num_slots)
        addresses = [tensor.data_ptr() for tensor in (*of_tokens, *of_seqs)]
        inputs = (num_tokens, num_seqs, max_blocks, *addresses)
        for first, end, num_layers in self._calls(num_tokens):
            outcome = run(*self._ready(), first, end, inputs, times_ns, torch.get_num_threads())
            if outcome == NO_MEMORY:
                raise MemoryError("no memory for a thread's own values")
            if outcome != DONE:
                raise IndexError(f"the lengths or the block table of sequence {outcome} point outside")
            on_layers(num_layers)

    def _calls(self, num_tokens: int) -> Iterator[tuple[int, int, int]]:
        """Yield the first and the end of the operations that are done in one call, and how many layers end in them."""
        if num_tokens == 0:
            return
        first, num_layers, num_products = 0, 0, 0
        for layer, (end, num_weights) in enumerate(self._layers, 1):
            num_products += num_tokens * num_weights
            if num_products >= self._call_products and layer < len(self._layers):
                yield first, end, layer - num_layers
                first, num_layers, num_products = end, layer, 0
        yield first, len(self._rows), len(self._layers) - num_layers

    def _ready(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the rows, and the first one of each kind of attention, as the compiled code takes them."""
        if self._arrays is None:
            shares_rows = [OPERATIONS[row[KIND]].shares_rows for row in self._rows]
            for row, *neighbours in zip(self._rows, shares_rows, [*shares_rows[1:], True], strict=True):
                row[MEETS] = not all(neighbours)
            self._arrays = np.array(self._rows, np.int64), np.array(self._first_of_kind, np.int64)
        return self._arrays

    def _product(self, x_TK: Tensor, layer: PanelLinear, out_TN: Tensor) -> None:
        self._require(x_TK, out_TN)
        require_shape("x", x_TK, (self.num_rows, layer.num_inputs))
        self._append(operations.product, self._product_of(layer, out_TN, x_TK))
        self._num_weights += layer.num_outputs * layer.num_inputs

    def _append(self, operation: Operation[Fields], fields: Fields) -> None:
        begin = Row(operation.compiled(self.dtype), meets=False, kind=operation.number, next_task=0)
        row = [*begin, *words_of(fields)]
        self._rows.append(row + [0] * (ROW_SIZE - len(row)))
        self._arrays = None

    def _at(self, tensor: Tensor) -> int:
        """Return the address of a tensor, which the program holds from now on."""
        self._held.append(tensor)
        return tensor.data_ptr()

    def _product_of(self, layer: PanelLinear, out_TN: Tensor, x_TK: Tensor) -> Product:
        """Return the product of rows with a layer, but for the number of rows, which a run knows."""
        self._held.append(layer)
        return panel_linear.product_of(layer, self._at(out_TN), self._at(x_TK), 0, out_TN.dtype, x_TK.dtype)

    def _require(self, *tensors: Tensor) -> None:
        like(*tensors)
        if tensors[0].dtype is not self.dtype:
            raise ValueError(f"a tensor of {tensors[0].dtype} does not belong into this program")


def _require_dense_heads(*tensors: Tensor) -> None:
    if not all(has_dense_heads(tensor) for tensor in tensors):
        raise ValueError("the heads of a token do not lie side by side in q, k or v")
