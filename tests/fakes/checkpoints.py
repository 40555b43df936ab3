"""Tiny random checkpoints, written by transformers: the real format of each architecture in a few hundred kilobytes."""

import json
import math
from pathlib import Path

import torch
import transformers
from torch import nn

# Small, and of shapes that differ where they can: a transposed or swapped one shows.
TINY = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def make_checkpoint(
    directory: Path,
    architecture: str = "LlamaForCausalLM",
    *,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    max_shard_size: str = "1GB",
    dtype_key: str | None = "torch_dtype",
    **config: object,
) -> Path:
    """Write a random checkpoint of `architecture` to `directory` and return it.

    `dtype_key` is where config.json says the dtype: torch_dtype in most repositories, which transformers 4 wrote, dtype
    in those of transformers 5, nowhere (None) in those that other tools or older ones wrote.
    `config` holds keys of config.json that differ from TINY. Weights are large enough for the most likely token to
    stand out.
    """
    model_class = getattr(transformers, architecture)
    model = model_class(model_class.config_class(**{**TINY, **config}))
    randomize(model, seed)
    model.to(dtype).save_pretrained(directory, max_shard_size=max_shard_size)
    path = directory / "config.json"
    written = json.loads(path.read_text())
    said = written.pop("dtype")
    path.write_text(json.dumps(written | ({dtype_key: said} if dtype_key else {})))
    return directory


def randomize(model: nn.Module, seed: int) -> None:
    """Give every parameter random values: norms around 1, biases around 0, products that keep their scale."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight") or (name.endswith("weight") and parameter.dim() == 1):
            nn.init.uniform_(parameter, 0.5, 1.5, generator=generator)
        elif name.endswith("bias") or "embed_tokens" in name or parameter.dim() == 1:
            nn.init.normal_(parameter, std=0.5, generator=generator)
        elif "lm_head" in name or "embed_out" in name:
            nn.init.normal_(parameter, std=2.0, generator=generator)
        else:
            nn.init.normal_(parameter, std=2 / math.sqrt(parameter.shape[1]), generator=generator)
