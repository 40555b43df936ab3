"""What a checkpoint's config.json says about its architecture, read once: an architecture is a row."""

from dataclasses import dataclass
from pathlib import Path

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A decoder of the Llama family; every optional key of config.json is resolved here."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    sliding_windows: tuple[int | None, ...]  # a layer's, in tokens; None attends to everything
    dtype: torch.dtype  # the checkpoint's
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False


def read_model_config(directory: Path) -> ModelConfig:
    """Return the ModelConfig of a checkpoint directory. Raises ValueError, naming it, for what is not supported."""
    raise NotImplementedError
