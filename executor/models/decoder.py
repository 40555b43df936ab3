"""The Llama family's decoder, on one page.

Attribute names are the checkpoint's names; `models.weights` knows which layers are fused. The residual stream is
float32, everything else has the dtype of the weights.
"""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor, nn

from octavo.executor.models.alibi import alibi_slopes
from octavo.executor.models.config import ModelConfig
from octavo.executor.models.inputs import StepInputs
from octavo.executor.models.interface import watch_each
from octavo.executor.models.kv_caches import KVCaches, KVShape
from octavo.executor.models.layers import (
    ColumnParallelLinear,
    LMHead,
    Module,
    QKVParallelLinear,
    RMSNorm,
    RowParallelLinear,
    VocabParallelEmbedding,
    packed_weights,
)
from octavo.executor.parallel import ALONE, TensorParallel
from octavo.kernels.backend import Backend, PackedLinear

# T tokens of this step, S rows, E hidden size, H query heads, K key/value heads, D head size, I intermediate size,
# V vocabulary, P positions, R rotary size


class Attention(Module):
    def __init__(
        self,
        config: ModelConfig,
        sliding_window: int | None,
        alibi_slopes_H: Tensor | None,
        parallel: TensorParallel,
        backend: Backend,
    ) -> None:
        """`alibi_slopes_H` are those of all ranks' heads; with them nothing is rotated."""
        super().__init__()
        self.qkv_proj = QKVParallelLinear(
            config.hidden_size,
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            config.qkv_bias,
            parallel,
            backend,
        )
        heads_size = config.num_heads * config.head_dim
        self.o_proj = RowParallelLinear(heads_size, config.hidden_size, config.o_bias, parallel, backend)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps, backend) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps, backend) if config.qk_norm else None
        self.num_heads, self.num_kv_heads = self.qkv_proj.num_heads, self.qkv_proj.num_kv_heads
        self.head_dim = config.head_dim
        self.sliding_window = sliding_window
        own_heads = slice(*parallel.shard(config.num_heads).bounds)
        self.alibi_slopes_H = None if alibi_slopes_H is None else alibi_slopes_H[own_heads]
        self.backend = backend

    def forward(self, x_TE: Tensor, inputs: StepInputs, cos_sin_PR: Tensor, kv_cache: tuple[Tensor, Tensor]) -> Tensor:
        heads = [self.num_heads, self.num_kv_heads, self.num_kv_heads]
        qkv_TXD = self.qkv_proj(x_TE, inputs).view(-1, sum(heads), self.head_dim)  # X heads of all three
        q_THD, k_TKD, v_TKD = torch.split(qkv_TXD, heads, dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            q_THD, k_TKD = self.q_norm(q_THD), self.k_norm(k_TKD)
        if self.alibi_slopes_H is None:
            self.backend.rotate_and_store_kv(
                q_THD, k_TKD, v_TKD, cos_sin_PR, inputs.positions_T, *kv_cache, inputs.slot_mapping_T
            )
        else:
            self.backend.store_kv(k_TKD, v_TKD, *kv_cache, inputs.slot_mapping_T)
        out_THD = self.backend.paged_attention(
            q_THD,
            *kv_cache,
            inputs.block_tables_SM,
            inputs.cu_seqlens_q,
            inputs.seq_lens_S,
            self.head_dim**-0.5,
            self.sliding_window,
            alibi_slopes_H=self.alibi_slopes_H,
        )
        return self.o_proj(out_THD.flatten(1), inputs)


class MLP(Module):
    def __init__(self, config: ModelConfig, parallel: TensorParallel, backend: Backend) -> None:
        super().__init__()
        self.backend = backend
        inner = config.intermediate_size
        self.gate_up_proj = ColumnParallelLinear(config.hidden_size, (inner, inner), config.mlp_bias, parallel, backend)
        self.down_proj = RowParallelLinear(inner, config.hidden_size, config.mlp_bias, parallel, backend)

    def forward(self, x_TE: Tensor, inputs: StepInputs) -> Tensor:
        return self.down_proj(self.backend.silu_and_mul(self.gate_up_proj(x_TE, inputs)), inputs)


class DecoderLayer(Module):
    def __init__(
        self,
        config: ModelConfig,
        sliding_window: int | None,
        alibi_slopes_H: Tensor | None,
        parallel: TensorParallel,
        backend: Backend,
    ) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, backend)
        self.self_attn = Attention(config, sliding_window, alibi_slopes_H, parallel, backend)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, backend)
        self.mlp = MLP(config, parallel, backend)

    def forward(
        self,
        x_TE: Tensor,
        residual_TE: Tensor,
        inputs: StepInputs,
        cos_sin_PR: Tensor,
        kv_cache: tuple[Tensor, Tensor],
    ) -> Tensor:
        """Add `x` to the residual; return what is still to be added to it."""
        x_TE = self.self_attn(self.input_layernorm.add(x_TE, residual_TE), inputs, cos_sin_PR, kv_cache)
        return self.mlp(self.post_attention_layernorm.add(x_TE, residual_TE), inputs)


class DecoderStack(Module):
    """Embedding, layers and final norm."""

    def __init__(self, config: ModelConfig, cos_sin_PR: Tensor, parallel: TensorParallel, backend: Backend) -> None:
        super().__init__()
        self.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size, parallel, backend)
        slopes_H = alibi_slopes(config.num_heads).to(cos_sin_PR.device) if config.alibi else None
        layers = [DecoderLayer(config, window, slopes_H, parallel, backend) for window in config.sliding_windows]
        self.layers = nn.ModuleList(layers)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, backend)
        self.cos_sin_PR = cos_sin_PR
        self.kv_shapes = [(layer.self_attn.num_kv_heads, config.head_dim, config.head_dim) for layer in layers]

    def forward(self, inputs: StepInputs, kv_caches: KVCaches) -> Tensor:
        x_TE = self.embed_tokens(inputs.token_ids_T)
        residual_TE = torch.zeros_like(x_TE, dtype=torch.float32)
        for layer, kv_cache in zip(self.layers, kv_caches, strict=True):
            x_TE = layer(x_TE, residual_TE, inputs, self.cos_sin_PR, kv_cache)
        return self.norm.add(x_TE, residual_TE)


class CompiledLayers(Protocol):
    """Another form of a DecoderStack; see `executor.models.compiled`."""

    on_layers: Callable[[int], object]  # is told how many layers were just done

    def forward(self, inputs: StepInputs, kv_caches: KVCaches) -> Tensor: ...

    def profile(self, inputs: StepInputs, kv_caches: KVCaches) -> tuple[Tensor, dict[str, int]]: ...


class Decoder(Module):
    """A causal language model over a paged KV cache."""

    def __init__(
        self, config: ModelConfig, cos_sin_PR: Tensor, backend: Backend, parallel: TensorParallel = ALONE
    ) -> None:
        super().__init__()
        self.model = DecoderStack(config, cos_sin_PR, parallel, backend)
        self.lm_head = LMHead(config.hidden_size, config.vocab_size, parallel, backend)
        self.compiled: CompiledLayers | None = None  # computes what `model` computes; None if there is no program
        self.num_layers = config.num_layers
        self.vocab_size = config.vocab_size
        self.hidden_size = config.hidden_size
        # parameters that share another parameter's tensor
        self.tied = {"lm_head.weight": "model.embed_tokens.weight"} if config.tie_word_embeddings else {}

    @property
    def kv_shapes(self) -> list[KVShape]:
        """Return each layer's (num_kv_heads, key_head_size, value_head_size), of this rank."""
        return self.model.kv_shapes

    @property
    def layers(self) -> nn.ModuleList:
        """Return the decoder layers."""
        return self.model.layers

    @property
    def products(self) -> list[PackedLinear]:
        """Return what the backend made of weights, each once."""
        return packed_weights(self)

    def watch_layers(self, count_layers: Callable[[int], object]) -> None:
        """Call `count_layers` in each forward pass with the number of layers that were just done, in either form."""
        watch_each(self.layers, count_layers)
        if self.compiled is not None:
            self.compiled.on_layers = count_layers

    def forward(self, inputs: StepInputs, kv_caches: KVCaches) -> Tensor:
        """Return hidden_TE after the final norm; stores the step's keys and values in `kv_caches`."""
        return self.model(inputs, kv_caches) if self.compiled is None else self.compiled.forward(inputs, kv_caches)

    def compute_logits(self, hidden_SE: Tensor) -> Tensor:
        """Return logits_SV, float32, of the given rows of `forward`'s result: on rank 0; all ranks must ask for it."""
        return self.lm_head(hidden_SE)
