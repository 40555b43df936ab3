"""The native decoder computes what transformers computes, in chunks and step by step, over a paged cache.

The reference is one forward pass of transformers over prompt and output: if each of its choices is the token that
follows, its own greedy decoding would have made the same ones.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from octavo.executor.models import Decoder, LoadPlan, load_model, read_model_config
from octavo.kernels import cpu
from tests.fakes.checkpoints import TINY, make_checkpoint
from tests.fakes.paged_decoding import PagedDecoding, assert_greedy, greedy_tokens

MAX_MODEL_LEN = 56
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 18}
STRETCHED = {"max_position_embeddings": 72}
LAYER_TYPES = ["sliding_attention", "full_attention", "sliding_attention"]


@dataclass
class Case:
    architecture: str
    config: dict[str, Any] = field(default_factory=dict)
    seed: int = 0


def rope(**parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_theta": 10000.0, **parameters}}


CASES = {
    "llama": Case("LlamaForCausalLM"),
    "llama-eps": Case("LlamaForCausalLM", {"rms_norm_eps": 0.3}),
    "llama-tied": Case("LlamaForCausalLM", {"tie_word_embeddings": True}),
    "llama-biases": Case("LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True}),
    "llama-one-kv-head": Case("LlamaForCausalLM", {"num_key_value_heads": 1}),
    "llama-no-groups": Case("LlamaForCausalLM", {"num_key_value_heads": 4}),
    "llama-head-dim": Case("LlamaForCausalLM", {"head_dim": 32}),
    "llama-theta": Case("LlamaForCausalLM", {"rope_parameters": {"rope_type": "default", "rope_theta": 300.0}}),
    "llama-linear": Case("LlamaForCausalLM", rope(rope_type="linear", factor=3.0)),
    "llama-dynamic": Case("LlamaForCausalLM", {"max_position_embeddings": 40, **rope(rope_type="dynamic", factor=4.0)}),
    "llama-yarn": Case("LlamaForCausalLM", STRETCHED | rope(**YARN)),
    "llama-yarn-mscale": Case(
        "LlamaForCausalLM", STRETCHED | rope(**YARN, mscale=1.4, mscale_all_dim=0.7, truncate=False)
    ),
    "llama-llama3": Case("LlamaForCausalLM", rope(**LLAMA3, original_max_position_embeddings=32)),
    "mistral": Case("MistralForCausalLM", {"sliding_window": None}),
    "mistral-window": Case("MistralForCausalLM", {"sliding_window": 9}),
    "qwen2": Case("Qwen2ForCausalLM"),
    "qwen2-tied": Case("Qwen2ForCausalLM", {"tie_word_embeddings": True}, seed=2),
    "qwen2-window": Case("Qwen2ForCausalLM", {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}),
    "qwen2-yarn": Case("Qwen2ForCausalLM", STRETCHED | rope(**YARN)),
    "qwen3": Case("Qwen3ForCausalLM", {"head_dim": 32}),
    "qwen3-biases": Case("Qwen3ForCausalLM", {"head_dim": 16, "attention_bias": True}),
    "qwen3-layer-types": Case(
        "Qwen3ForCausalLM",
        {"head_dim": 32, "use_sliding_window": True, "sliding_window": 5, "layer_types": LAYER_TYPES},
    ),
}


def load_reference(directory: Path) -> transformers.PreTrainedModel:
    return transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    )


def load_native(directory: Path, dtype: torch.dtype = torch.float32, max_model_len: int = MAX_MODEL_LEN) -> Decoder:
    config = read_model_config(directory)
    return load_model(LoadPlan(directory, config, dtype, max_model_len=max_model_len, backend=cpu, progress=False))


def random_prompts(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, TINY["vocab_size"], (length,), generator=generator).tolist() for length in lengths]


@torch.inference_mode()
def reference_logits(directory: Path, token_ids: list[list[int]]) -> Tensor:
    """Return transformers' float32 logits_BTV of sequences of the same length."""
    return load_reference(directory)(torch.tensor(token_ids)).logits


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_greedy_tokens_equal_those_of_transformers(case: Case, tmp_path: Path) -> None:
    """All sequences run to MAX_MODEL_LEN, where transformers' dynamic frequencies are those of that length."""
    make_checkpoint(tmp_path, case.architecture, seed=case.seed, **case.config)
    prompts = random_prompts(3, 21, 40)
    num_tokens = [MAX_MODEL_LEN - len(prompt) for prompt in prompts]
    outputs = greedy_tokens(load_native(tmp_path), prompts, num_tokens, chunk_size=16)
    wholes = [prompt + output for prompt, output in zip(prompts, outputs, strict=True)]
    for prompt, output, logits_TV in zip(prompts, outputs, reference_logits(tmp_path, wholes), strict=True):
        assert_greedy(logits_TV[len(prompt) - 1 : -1], output)


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM"])
def test_bf16_logits_are_near_those_of_float32(architecture: str, tmp_path: Path) -> None:
    """Within 3 % (root mean square) of transformers' float32 logits with the same bf16 weights."""
    make_checkpoint(tmp_path, architecture, dtype=torch.bfloat16)
    [prompt] = random_prompts(MAX_MODEL_LEN)
    decoding = PagedDecoding(load_native(tmp_path, torch.bfloat16), 32, 4, torch.bfloat16)
    logits_TV = torch.cat([decoding.score(chunk) for chunk in (prompt[:30], *([token_id] for token_id in prompt[30:]))])
    expected_TV = reference_logits(tmp_path, [prompt])[0]
    assert logits_TV.dtype == torch.float32
    assert (logits_TV - expected_TV).square().mean().sqrt() < 0.03 * expected_TV.square().mean().sqrt()


def test_chunks_and_neighbours_do_not_change_the_tokens(tmp_path: Path) -> None:
    model = load_native(make_checkpoint(tmp_path))
    prompts = random_prompts(17, 30, 8)
    together = greedy_tokens(model, prompts, [12, 12, 12], chunk_size=5, block_size=8)
    alone = [greedy_tokens(model, [prompt], [12], chunk_size=64, block_size=16)[0] for prompt in prompts]
    assert together == alone


def test_kv_shapes_name_the_heads_of_each_layer(tmp_path: Path) -> None:
    model = load_native(make_checkpoint(tmp_path, "Qwen3ForCausalLM", head_dim=32))
    assert model.kv_shapes == [(2, 32, 32)] * 3
    assert (model.num_layers, model.vocab_size) == (3, TINY["vocab_size"])
