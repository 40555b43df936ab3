"""What a set of kernels offers: functions on tensors, the same ones for every kind of device.

Legend of the shapes
    T tokens of this step, packed without padding; S sequences; H query heads; K key/value heads;
    D head size (that of V may differ from that of K); N blocks; P tokens a block; M blocks a sequence, at most;
    E hidden size; I intermediate size; R rotary components, or rows; V vocabulary

The cache, for each layer
    k_cache_NKDP  keys; within a block and head the P tokens of one component lie side by side
    v_cache_NKPD  values; within a block and head the D components of one token lie side by side
A token's slot is block * P + its offset in the block. Both caches are contiguous, in the dtype of q, k and v, or in
another that `kv_dtypes` names. The content of slots that no query reads has no effect.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from octavo.kernels.groupwise import GroupwiseWeight

MASKED_LOGIT = -1e30  # of a token that is forbidden: finite after division by the least temperature


class PackedLinear(Protocol):
    """A linear layer in the form that its backend multiplies with. No other code looks inside."""

    @property
    def form(self) -> str:
        """Return the form in words."""

    @property
    def nbytes(self) -> int:
        """Return the memory that the layer takes."""


class Compilation(NamedTuple):
    """Kernels that are to be compiled, or loaded from the user's cache, before they are first used."""

    calls: list[tuple[str, Callable[[], object]]]  # each compiles the kernel of that name
    is_first: bool  # the user's cache has no kernels


class Program(Protocol):
    """The layers of a decoder, written down once and then computed in one call.

    Each function adds an operation: it means what the Backend's function of that name means, but writes its result
    into the tensor named out. The program holds all these tensors, whose addresses it knows. They have room for
    `num_rows` tokens, and a run uses the first rows of them.
    """

    num_rows: int

    @property
    def num_operations(self) -> int:
        """Return how many operations are written so far."""

    def new(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Return memory for `num_rows` rows of `shape`, in the program's dtype or another."""

    def embedding(self, weight: Any, out_TE: Tensor) -> None:
        """Write the rows of a weight, plain or packed, that the step's tokens name."""

    def clear(self, out_TE: Tensor) -> None:
        """Make rows of float32 zero."""

    def add_rms_norm(self, x_TE: Tensor, residual_TE: Tensor, weight_E: Tensor, eps: float, out_TE: Tensor) -> None: ...

    def rms_norm(self, x_THD: Tensor, weight_D: Tensor, eps: float, out_THD: Tensor) -> None: ...

    def linear(self, x_TE: Tensor, layers: Sequence[Any], out_TN: Tensor) -> None:
        """Write the products with several packed layers side by side."""

    def rotate_and_store_kv(
        self,
        q_THD: Tensor,
        k_TKD: Tensor,
        v_TKD: Tensor,
        cos_sin_PR: Tensor,
        k_cache_NKDP: Tensor,
        v_cache_NKPD: Tensor,
    ) -> None: ...

    def store_kv(self, k_TKD: Tensor, v_TKD: Tensor, k_cache_NKDP: Tensor, v_cache_NKPD: Tensor) -> None: ...

    def paged_attention(
        self,
        q_THD: Tensor,
        k_cache_NKDP: Tensor,
        v_cache_NKPD: Tensor,
        scale: float,
        sliding_window: int | None,
        alibi_slopes_H: Tensor | None,
        out_THD: Tensor,
    ) -> None: ...

    def silu_and_mul(self, gate_up_T2I: Tensor, out_TI: Tensor) -> None: ...

    def end_layer(self) -> None:
        """Let a run come back to Python here if it has computed much."""

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
        """Compute all operations for the step's tokens.

        `on_layers` is told after each call how many layers it ended. `times_ns` (int64, a place for each operation) is
        added to. Raises ValueError or IndexError as the functions of Backend do, before anything is computed.
        """


class Backend(Protocol):
    """The functions of a module: first those that the start of an executor calls, then those that a model calls."""

    def kv_dtypes(self, dtype: torch.dtype) -> tuple[torch.dtype, ...]:
        """Return the dtypes that a KV cache may have where activations have `dtype`."""

    def can_be_recorded(self) -> bool:
        """Return whether no function waits for the device, so that a CUDA graph can hold a step."""

    def program_of(self, products: Iterable[PackedLinear]) -> Callable[[int, torch.dtype], Program] | None:
        """Return what makes a Program for a number of rows and a dtype; None if the backend has none for `products`."""

    def compilation_for(self, dtype: torch.dtype, products: Iterable[PackedLinear], has_program: bool) -> Compilation:
        """Return how to compile what a model of `dtype` needs before its first step.

        The model multiplies with `products`; its layers are a Program if `has_program`.
        """

    def store_kv(
        self, k_TKD: Tensor, v_TKD: Tensor, k_cache_NKDP: Tensor, v_cache_NKPD: Tensor, slot_mapping_T: Tensor
    ) -> None:
        """Write this step's keys and values into the caches, in place.

        slot_mapping_T (int64) says where each token goes; a negative slot is skipped. Raises ValueError on shapes or
        dtypes that do not fit; on the CPU IndexError on a slot beyond the cache (nothing is written then).
        """

    def rotate_and_store_kv(
        self,
        q_THD: Tensor,
        k_TKD: Tensor,
        v_TKD: Tensor,
        cos_sin_PR: Tensor,
        positions_T: Tensor,
        k_cache_NKDP: Tensor,
        v_cache_NKPD: Tensor,
        slot_mapping_T: Tensor,
    ) -> None:
        """Rotate queries in place and keys on their way into the cache; store keys and values as `store_kv` does.

        The content of k is undefined afterwards. The rotation is by positions (int64) and in float32. cos_sin_PR
        (float32) has a row for each position: R / 2 cosines, then R / 2 sines. Component i of the first R is paired
        with i + R / 2 (as in GPT-NeoX and Llama); components from R on stay. q, k and v may be slices of one tensor, as
        long as the heads of a token lie side by side. Raises ValueError as `store_kv` does; on the CPU IndexError on a
        position that the table lacks.
        """

    def paged_attention(
        self,
        q_THD: Tensor,
        k_cache_NKDP: Tensor,
        v_cache_NKPD: Tensor,
        block_tables_SM: Tensor,
        cu_seqlens_q: Tensor,
        seq_lens_S: Tensor,
        scale: float,
        sliding_window: int | None = None,
        soft_cap: float | None = None,
        sinks_H: Tensor | None = None,
        alibi_slopes_H: Tensor | None = None,
    ) -> Tensor:
        """Return out_THD (D of the values, q's dtype): causal attention of packed queries over the paged cache.

        The queries of sequence s are the tokens cu_seqlens_q[s] to cu_seqlens_q[s + 1] (int32, S + 1; at least one),
        the last of its seq_lens_S[s] tokens (int32), whose keys and values are already stored in the blocks
        block_tables_SM[s] (int32). Query i of n stands at position seq_len - n + i. It sees the positions up to
        its own; with a sliding window of w, only the last w of them. H is a multiple of K: head h uses
        key/value head h // (H / K).

        A score is scale * (q . k); with a soft cap c it becomes c * tanh(score / c); with ALiBi (float32) slope *
        (key's position - query's) is added. A head's sink (float32) is one more score in the softmax's sum, without a
        value. Raises ValueError on shapes or dtypes that do not fit; on the CPU IndexError if lengths or tables point
        outside.
        """

    def rms_norm(self, x_TE: Tensor, weight_E: Tensor, eps: float) -> Tensor:
        """Return x / sqrt(mean(x**2) + eps) * weight over the last dimension, for any leading ones.

        Computed in float32, rounded once to the dtype of x, which weight_E shares. Also norms q or k by head (x_THD).
        """

    def add_rms_norm(self, x_TE: Tensor, residual_TE: Tensor, weight_E: Tensor, eps: float) -> Tensor:
        """Add x to the residual (float32) in place; return rms_norm(residual) in x's dtype, which weight_E shares."""

    def silu_and_mul(self, gate_up_T2I: Tensor) -> Tensor:
        """Return silu(gate) * up as out_TI, where gate is the first half of the last dimension and up the second."""

    def edit_logits(
        self,
        logits_SV: Tensor,
        row_R: Tensor,
        bounds_R4: Tensor,
        penalties_R3: Tensor,
        token_id_N: Tensor,
        value_N: Tensor,
    ) -> None:
        """Change what logits (float32) some rows' entries name, in place; row_R (int64) holds no row twice.

        An entry is a token (int32) and a number (float32). bounds_R4 (int64) says where those of a row lie among the N:
        from the first bound forbidden tokens, from the second biases, from the third to the fourth counted tokens. Of
        one kind a row names no token twice. First a bias is added to its logit. Then forbidden logits become
        MASKED_LOGIT. Then the row's penalties (float32: repetition, frequency, presence) apply to counted tokens: a
        logit above 0 is divided by the repetition penalty and any other multiplied with it, less the frequency penalty
        times the count, less the presence penalty if the count is above 0. An entry of a token that the vocabulary
        lacks is skipped. Raises ValueError on other shapes or dtypes; on the CPU IndexError on bounds or rows that lie
        outside.
        """

    def allow_tokens(self, logits_SV: Tensor, row_R: Tensor, allowed_RW: Tensor) -> None:
        """Make the logits (float32) of some rows -inf, in place, but for the tokens that a grammar allows.

        An allowed logit is at least MASKED_LOGIT afterwards: whatever edits made of it, it wins against the others.

        row_R (int64) holds no row twice. allowed_RW (int32) has a word for 32 tokens, W words for the vocabulary: a bit
        that is set, from the lowest on, allows its token. Raises ValueError on other shapes or dtypes; on the CPU
        IndexError on rows that lie outside.
        """

    def scale_to_probs(self, logits_RV: Tensor, temperature_R: Tensor) -> Tensor:
        """Return softmax(logits / temperature) as probs_RV, float32; the logits (float32) may be overwritten."""

    def draw(self, probs_RV: Tensor, top_k_R: Tensor, top_p_R: Tensor, min_p_R: Tensor, uniform_R: Tensor) -> Tensor:
        """Return a token of each row (int64), drawn by inverse CDF in the order of token ids.

        probs_RV (float32) need not add up to 1. Three limits follow one another: min_p keeps the tokens with at least
        min_p times the largest probability; top_k (int64; 0: all) keeps the likeliest of them; top_p keeps a token
        while the likelier ones have less than top_p of the mass that is left. Among equals the lower token id counts as
        the likelier. uniform_R lies in [0, 1); uniform_R, top_p_R and min_p_R are float64. A token of probability 0 is
        never drawn. Raises ValueError on other shapes or dtypes.
        """

    def uniform(self, seed_R: Tensor, position_R: Tensor, purpose: int) -> Tensor:
        """Return numbers in [0, 1), float64: a pure function of seed (int64, all its bits), position and purpose.

        The first word of Philox-2x64-10 (Salmon et al., 2011) with the seed as key and (position, purpose) as counter,
        its upper 53 bits.
        """

    def largest(self, logits_RV: Tensor) -> tuple[Tensor, Tensor]:
        """Return each row's largest logit (float32), a NaN if there is one, and its token (int64), the first of equals.

        A row with a NaN may get any token.
        """

    def rank(self, scores_RV: Tensor, token_ids_R: Tensor) -> Tensor:
        """Return the rank (int32, from 1) of each row's token (int64) by its score (float32); equals share the best."""

    def top_k(self, scores_RV: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Return each row's `k` highest scores (float32; or all), descending, and their tokens (int64).

        Equal scores come in the order of their tokens, also where only some of them fit. No score is a NaN.
        """

    def pack_linear(self, weight: Tensor | GroupwiseWeight, bias_N: Tensor | None = None) -> PackedLinear:
        """Return a linear layer of N outputs, for `linear` of the same backend.

        A plain weight_NE is copied: drop it to free its memory. A GroupwiseWeight stays quantized.
        """

    def linear(self, x_TE: Tensor, layer: Any, out_dtype: torch.dtype | None = None) -> Tensor:
        """Return x @ weight.T + bias as out_TN, in `out_dtype` or else the dtype of x, which a plain weight shares."""

    def embedding(self, token_ids_T: Tensor, layer: Any, dtype: torch.dtype) -> Tensor:
        """Return rows (x_TE) of the weight of a linear layer that was packed from a GroupwiseWeight."""
