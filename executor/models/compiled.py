"""The Llama family's decoder as one program of the backend: a step but for the head in one call.

This page follows `executor.models.decoder` line by line and computes the same bits; `executor.models.decoder` is the
truth. A decoder is compiled where the backend has a program for its weights and no other rank takes part.
"""

from collections import Counter
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from octavo.executor.models.decoder import MLP, Attention, Decoder, DecoderLayer, DecoderStack
from octavo.executor.models.inputs import StepInputs
from octavo.executor.models.kv_caches import KVCaches
from octavo.executor.models.layers import Linear, RMSNorm, VocabParallelEmbedding
from octavo.kernels.backend import Program

# T tokens of this step, E hidden size, H query heads, K key/value heads, D head size, I intermediate size

NewProgram = Callable[[int, torch.dtype], Program]  # of a number of rows and a dtype


class CompiledDecoder:
    """Runs a decoder's embedding, layers and final norm.

    The program is written for a number of rows and for the KV caches; for more rows, or others, it is written anew.
    """

    def __init__(self, stack: DecoderStack, new_program: NewProgram) -> None:
        self._stack = stack
        self._new_program = new_program
        self._kv_caches: KVCaches = []
        self._written: Written | None = None
        self.on_layers: Callable[[int], object] = lambda num_layers: None  # is told how many layers were just done

    def forward(self, inputs: StepInputs, kv_caches: KVCaches) -> Tensor:
        """Return what DecoderStack.forward returns, in memory that the next step overwrites."""
        return self._run(self._for(len(inputs.token_ids_T), kv_caches), inputs)

    @torch.inference_mode()
    def profile(self, inputs: StepInputs, kv_caches: KVCaches) -> tuple[Tensor, dict[str, int]]:
        """Return what `forward` returns, and the nanoseconds that each part took: products by their layer's name."""
        written = self._for(len(inputs.token_ids_T), kv_caches)
        times_ns = np.zeros(written.program.num_operations, np.int64)
        hidden_TE = self._run(written, inputs, times_ns)
        by_part: Counter[str] = Counter()
        for part, time_ns in zip(written.parts, times_ns.tolist(), strict=True):
            by_part[part] += time_ns
        return hidden_TE, by_part

    def _run(self, written: "Written", inputs: StepInputs, times_ns: np.ndarray | None = None) -> Tensor:
        normed_TE = written.normed_TE[: len(inputs.token_ids_T)]  # before: torch's code is cold after the program
        written.program.run(
            inputs.token_ids_T,
            inputs.positions_T,
            inputs.slot_mapping_T,
            inputs.block_tables_SM,
            inputs.cu_seqlens_q,
            inputs.seq_lens_S,
            self.on_layers,
            times_ns,
        )
        return normed_TE

    def _for(self, num_tokens: int, kv_caches: KVCaches) -> "Written":
        if self._written is None or num_tokens > self._written.program.num_rows or kv_caches is not self._kv_caches:
            self._written = None  # frees the old program's memory before a new one is written
            program = self._new_program(1 << max(0, num_tokens - 1).bit_length(), self._stack.norm.weight.dtype)
            self._written = Written(program, self._stack, kv_caches)
            self._kv_caches = kv_caches
        return self._written


class Written:
    """A program, and the memory that all of its layers share."""

    def __init__(self, program: Program, stack: DecoderStack, kv_caches: KVCaches) -> None:
        self.program = program
        self.parts: list[str] = []  # of the model, to which the program's operations belong
        hidden_size = len(stack.norm.weight)
        self.x_TE, self.normed_TE = program.new(hidden_size), program.new(hidden_size)
        self.residual_TE = program.new(hidden_size, dtype=torch.float32)
        layers = _layers(stack)
        attention, mlp = layers[0].self_attn, layers[0].mlp
        heads, head_dim = (attention.num_heads, attention.num_kv_heads), attention.head_dim
        self.qkv_TXD = program.new(heads[0] + 2 * heads[1], head_dim)
        self.out_THD = program.new(heads[0], head_dim)
        self.q_THD, self.k_TKD = (program.new(num, head_dim) for num in heads)
        self.gate_up_T2I = program.new(mlp.gate_up_proj.out_features)
        self.activated_TI = program.new(mlp.gate_up_proj.out_features // 2)
        self._embed(stack.embed_tokens)
        for layer, kv_cache in zip(layers, kv_caches, strict=True):
            self._add_norm(layer.input_layernorm)
            self._attention(layer.self_attn, stack.cos_sin_PR, kv_cache)
            self._add_norm(layer.post_attention_layernorm)
            self._mlp(layer.mlp)
            program.end_layer()
        self._add_norm(stack.norm)

    def _embed(self, embedding: VocabParallelEmbedding) -> None:
        self.program.embedding(embedding.weight if embedding.packed is None else embedding.packed, self.x_TE)
        self.program.clear(self.residual_TE)
        self._note("embedding")

    def _add_norm(self, norm: RMSNorm) -> None:
        self.program.add_rms_norm(self.x_TE, self.residual_TE, norm.weight, norm.eps, self.normed_TE)
        self._note("norms")

    def _add_linear(self, part: str, x_TE: Tensor, linear: Linear, out_TN: Tensor) -> None:
        self.program.linear(x_TE, linear.packed, out_TN)
        self._note(part)

    def _note(self, part: str) -> None:
        """Let the operations that were written since the last note belong to `part`."""
        self.parts += [part] * (self.program.num_operations - len(self.parts))

    def _attention(self, attention: Attention, cos_sin_PR: Tensor, kv_cache: tuple[Tensor, Tensor]) -> None:
        heads = [attention.num_heads, attention.num_kv_heads, attention.num_kv_heads]
        self._add_linear("qkv_proj", self.normed_TE, attention.qkv_proj, self.qkv_TXD.flatten(1))
        q_THD, k_TKD, v_TKD = torch.split(self.qkv_TXD, heads, dim=1)
        if attention.q_norm is not None and attention.k_norm is not None:
            self.program.rms_norm(q_THD, attention.q_norm.weight, attention.q_norm.eps, self.q_THD)
            self.program.rms_norm(k_TKD, attention.k_norm.weight, attention.k_norm.eps, self.k_TKD)
            self._note("norms")
            q_THD, k_TKD = self.q_THD, self.k_TKD
        if attention.alibi_slopes_H is None:
            self.program.rotate_and_store_kv(q_THD, k_TKD, v_TKD, cos_sin_PR, *kv_cache)
        else:
            self.program.store_kv(k_TKD, v_TKD, *kv_cache)
        self._note("rotary, KV store")
        self.program.paged_attention(
            q_THD,
            *kv_cache,
            attention.head_dim**-0.5,
            attention.sliding_window,
            attention.alibi_slopes_H,
            self.out_THD,
        )
        self._note("attention")
        self._add_linear("o_proj", self.out_THD.flatten(1), attention.o_proj, self.x_TE)

    def _mlp(self, mlp: MLP) -> None:
        self._add_linear("gate_up_proj", self.normed_TE, mlp.gate_up_proj, self.gate_up_T2I)
        self.program.silu_and_mul(self.gate_up_T2I, self.activated_TI)
        self._note("activation")
        self._add_linear("down_proj", self.activated_TI, mlp.down_proj, self.x_TE)


def compile_decoder(decoder: Decoder) -> CompiledDecoder | None:
    """Return what runs the layers of a decoder that is loaded, or None where there is no program for it."""
    stack = decoder.model
    linears = [module for layer in _layers(stack) for module in layer.modules() if isinstance(module, Linear)]
    new_program = stack.norm.backend.program_of(packed for linear in linears for packed in linear.packed)
    if new_program is None or decoder.lm_head.parallel.world_size > 1:
        return None
    return CompiledDecoder(stack, new_program)


def _layers(stack: DecoderStack) -> list[DecoderLayer]:
    return [layer for layer in stack.layers if isinstance(layer, DecoderLayer)]
