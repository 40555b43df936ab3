"""Tiny checkpoints of the second tier: architectures that run through transformers' own modelling code."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from octavo.executor.models import LoadedModel, LoadPlan, load_model, read_model_config
from octavo.kernels import cpu
from tests.fakes.checkpoints import TINY, make_checkpoint

MAX_MODEL_LEN = 56
SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 7}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "moe_intermediate_size": 32}
LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}
GPT2 = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64, "n_inner": 96}
UNTIED = {"tie_word_embeddings": False}


def rope(**parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_theta": 10000.0, **parameters}}


LONGROPE = rope(
    rope_type="longrope",
    short_factor=[1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7],
    long_factor=[1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0],
    original_max_position_embeddings=32,
) | {"original_max_position_embeddings": 32}


@dataclass
class Case:
    architecture: str
    config: dict[str, Any] = field(default_factory=dict)
    seed: int = 0


CASES = {
    "cohere2": Case("Cohere2ForCausalLM", SLIDING | {"logit_scale": 0.3}),
    "deepseek-v3": Case("DeepseekV3ForCausalLM", LATENT | ROUTED | {"first_k_dense_replace": 1}),
    "deepseek-v3-yarn": Case(  # the factor of whose scores is not that of its heads' size
        "DeepseekV3ForCausalLM",
        LATENT
        | ROUTED
        | {"first_k_dense_replace": 1}
        | rope(rope_type="yarn", factor=4.0, original_max_position_embeddings=16, mscale=1.0, mscale_all_dim=1.0),
    ),
    "ernie4.5": Case("Ernie4_5ForCausalLM", {"head_dim": 16}),
    "exaone4": Case("Exaone4ForCausalLM", SLIDING),
    "gemma": Case("GemmaForCausalLM", {"head_dim": 16}),
    "gemma2": Case(
        "Gemma2ForCausalLM",
        {"head_dim": 16, "sliding_window": 7, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 2.0} | UNTIED,
        seed=1,
    ),
    "gemma3": Case("Gemma3ForCausalLM", SLIDING | {"head_dim": 16} | UNTIED),
    "glm": Case("GlmForCausalLM", {"head_dim": 16}),
    "glm4": Case("Glm4ForCausalLM", {"head_dim": 16}),
    "glm4-moe": Case("Glm4MoeForCausalLM", ROUTED | {"head_dim": 16}),
    "gpt-neox": Case("GPTNeoXForCausalLM"),
    "gpt-oss": Case("GptOssForCausalLM", SLIDING | {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "gpt2": Case("GPT2LMHeadModel", GPT2 | UNTIED),
    "granite": Case(
        "GraniteForCausalLM", {"logits_scaling": 3.0, "residual_multiplier": 0.7, "attention_multiplier": 0.3}
    ),
    "granite-hybrid": Case(
        "GraniteMoeHybridForCausalLM", {"layer_types": ["attention", "attention"], "num_local_experts": 4}
    ),
    "mixtral": Case("MixtralForCausalLM", {"num_local_experts": 4}),
    "nemotron": Case("NemotronForCausalLM"),
    "olmo2": Case("Olmo2ForCausalLM", seed=1),
    "olmo2-dynamic": Case("Olmo2ForCausalLM", {"max_position_embeddings": 40, **rope(rope_type="dynamic", factor=4.0)}),
    "opt": Case("OPTForCausalLM", {"ffn_dim": 96, "word_embed_proj_dim": 64} | UNTIED),
    "phi": Case("PhiForCausalLM"),
    "phi3": Case("Phi3ForCausalLM", {"sliding_window": 9}),
    "phi3-longrope": Case("Phi3ForCausalLM", LONGROPE | {"sliding_window": None}),
    "phimoe": Case("PhimoeForCausalLM", {"num_local_experts": 4}),
    "qwen2-moe": Case("Qwen2MoeForCausalLM", EXPERTS | {"shared_expert_intermediate_size": 48}),
    "qwen3-moe": Case("Qwen3MoeForCausalLM", EXPERTS | {"head_dim": 16}),
    "smollm3": Case("SmolLM3ForCausalLM", {"no_rope_layers": [1, 0]}),
    "stablelm": Case("StableLmForCausalLM"),
    "starcoder2": Case("Starcoder2ForCausalLM", {"sliding_window": 9} | UNTIED),
    "youtu": Case("YoutuForCausalLM", LATENT),  # the padding token's logits are zero
}


def write(directory: Path, case: Case, **options: Any) -> Path:
    return make_checkpoint(
        directory, case.architecture, seed=case.seed, **{"num_hidden_layers": 2} | case.config, **options
    )


def load(directory: Path, dtype: torch.dtype = torch.float32, **options: Any) -> LoadedModel:
    options = {"max_model_len": MAX_MODEL_LEN, "backend": cpu, "progress": False} | options
    return load_model(LoadPlan(directory, read_model_config(directory), dtype, **options))


def random_prompts(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, TINY["vocab_size"], (length,), generator=generator).tolist() for length in lengths]
