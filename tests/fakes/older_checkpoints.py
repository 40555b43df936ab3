"""Checkpoints in the formats of older guides, made of tiny ones of today by renaming and stacking the other way."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

QKV = ("q_proj", "k_proj", "v_proj")


def make_older(directory: Path, original: Path, family: str, **keys: object) -> Path:
    """Write the checkpoint in `original` to `directory` as one of `family` and return it.

    `family` is baichuan (of a Llama with as many KV heads as heads), chatglm (of a GLM) or qwen (of such a Qwen2);
    `keys` are added to its config.json, those that are None taken from it.
    """
    rename, describe = FAMILIES[family]
    config = describe(json.loads((original / "config.json").read_text())) | keys
    directory.mkdir(parents=True, exist_ok=True)
    kept = {key: value for key, value in config.items() if value is not None}
    (directory / "config.json").write_text(
        json.dumps(kept | {"torch_dtype": "float32", "auto_map": {"AutoConfig": "x"}})
    )
    tensors = _renamed(load_file(original / "model.safetensors"), config["num_hidden_layers"], rename)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, directory / "model.safetensors")
    return directory


def _renamed(
    tensors: dict[str, Tensor], num_layers: int, rename: Callable[[str, dict[str, Tensor]], dict[str, Tensor]]
) -> dict[str, Tensor]:
    """Return what `rename` makes of each layer, by its number ("" for what is around them), without its prefix."""
    result = rename("", {name: tensor for name, tensor in tensors.items() if ".layers." not in name})
    for layer in range(num_layers):
        prefix = f"model.layers.{layer}."
        own = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
        result |= rename(str(layer), own)
    return result


def _stack(layer: dict[str, Tensor], leaf: str) -> Tensor:
    return torch.cat([layer.pop(f"self_attn.{name}.{leaf}") for name in QKV])


def _baichuan(number: str, part: dict[str, Tensor]) -> dict[str, Tensor]:
    if not number:
        return part
    prefix = f"model.layers.{number}."
    return {f"{prefix}self_attn.W_pack.weight": _stack(part, "weight")} | {prefix + k: v for k, v in part.items()}


def _chatglm(number: str, part: dict[str, Tensor]) -> dict[str, Tensor]:
    if not number:
        return {
            "transformer.embedding.word_embeddings.weight": part["model.embed_tokens.weight"],
            "transformer.encoder.final_layernorm.weight": part["model.norm.weight"],
            "transformer.output_layer.weight": part["lm_head.weight"],
            "transformer.rotary_pos_emb.inv_freq": torch.zeros(4),
        }
    named = {
        "self_attention.query_key_value.weight": _stack(part, "weight"),
        "self_attention.query_key_value.bias": _stack(part, "bias"),
        "self_attention.dense.weight": part["self_attn.o_proj.weight"],
        "mlp.dense_h_to_4h.weight": part["mlp.gate_up_proj.weight"],
        "mlp.dense_4h_to_h.weight": part["mlp.down_proj.weight"],
        "input_layernorm.weight": part["input_layernorm.weight"],
        "post_attention_layernorm.weight": part["post_attention_layernorm.weight"],
    }
    return {f"transformer.encoder.layers.{number}.{name}": tensor for name, tensor in named.items()}


def _qwen(number: str, part: dict[str, Tensor]) -> dict[str, Tensor]:
    if not number:
        return {
            "transformer.wte.weight": part["model.embed_tokens.weight"],
            "transformer.ln_f.weight": part["model.norm.weight"],
            "lm_head.weight": part["lm_head.weight"],
        }
    named = {
        "ln_1.weight": part["input_layernorm.weight"],
        "ln_2.weight": part["post_attention_layernorm.weight"],
        "attn.c_attn.weight": _stack(part, "weight"),
        "attn.c_attn.bias": _stack(part, "bias"),
        "attn.c_proj.weight": part["self_attn.o_proj.weight"],
        "mlp.w1.weight": part["mlp.up_proj.weight"],
        "mlp.w2.weight": part["mlp.gate_proj.weight"],
        "mlp.c_proj.weight": part["mlp.down_proj.weight"],
    }
    return {f"transformer.h.{number}.{name}": tensor for name, tensor in named.items()}


def _baichuan_config(config: dict[str, Any]) -> dict[str, Any]:
    same = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    return {key: config[key] for key in (*same, "max_position_embeddings", "rms_norm_eps", "eos_token_id")} | {
        "architectures": ["BaichuanForCausalLM"],
        "model_type": "baichuan",
        "hidden_act": "silu",
        "model_max_length": config["max_position_embeddings"],
    }


def _chatglm_config(config: dict[str, Any]) -> dict[str, Any]:
    return {
        "architectures": ["ChatGLMModel"],
        "model_type": "chatglm",
        "add_bias_linear": False,
        "add_qkv_bias": True,
        "apply_residual_connection_post_layernorm": False,
        "ffn_hidden_size": config["intermediate_size"],
        "hidden_size": config["hidden_size"],
        "kv_channels": config["head_dim"],
        "layernorm_epsilon": config["rms_norm_eps"],
        "multi_query_attention": True,
        "multi_query_group_num": config["num_key_value_heads"],
        "num_attention_heads": config["num_attention_heads"],
        "num_hidden_layers": config["num_hidden_layers"],
        "num_layers": config["num_hidden_layers"],
        "original_rope": True,
        "padded_vocab_size": config["vocab_size"],
        "post_layer_norm": True,
        "rmsnorm": True,
        "seq_length": config["max_position_embeddings"],
        "vocab_size": config["vocab_size"],
        "tie_word_embeddings": False,
        "eos_token_id": 2,
    }


def _qwen_config(config: dict[str, Any]) -> dict[str, Any]:
    return {
        "architectures": ["QWenLMHeadModel"],
        "model_type": "qwen",
        "hidden_size": config["hidden_size"],
        "intermediate_size": 2 * config["intermediate_size"],
        "kv_channels": config["hidden_size"] // config["num_attention_heads"],
        "layer_norm_epsilon": config["rms_norm_eps"],
        "max_position_embeddings": 4 * config["max_position_embeddings"],
        "no_bias": True,
        "num_attention_heads": config["num_attention_heads"],
        "num_hidden_layers": config["num_hidden_layers"],
        "rotary_emb_base": config["rope_parameters"]["rope_theta"],
        "rotary_pct": 1.0,
        "scale_attn_weights": True,
        "seq_length": config["max_position_embeddings"],
        "tie_word_embeddings": False,
        "use_dynamic_ntk": True,
        "use_logn_attn": True,
        "vocab_size": config["vocab_size"],
    }


FAMILIES = {
    "baichuan": (_baichuan, _baichuan_config),
    "chatglm": (_chatglm, _chatglm_config),
    "qwen": (_qwen, _qwen_config),
}
