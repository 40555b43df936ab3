"""Checkpoints of older guides compute what the models of today compute that they were renamed from."""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from octavo.executor.checkpoints.checkpoint import Checkpoint
from octavo.executor.models import Decoder, LoadPlan, TensorParallel, load_model, read_model_config
from octavo.executor.models.config import ARCHITECTURES
from octavo.executor.models.layers import Shard
from octavo.executor.models.renaming import renamed
from octavo.kernels import cpu
from octavo.models.older import FAMILIES
from tests.fakes.checkpoints import TINY, make_checkpoint
from tests.fakes.older_checkpoints import make_older
from tests.fakes.paged_decoding import assert_greedy, greedy_tokens

MAX_MODEL_LEN = 48
PROMPTS = [list(range(3, 320, 17)), [7, 200, 31]]
ALL_HEADS = {"num_key_value_heads": 4}


@dataclass
class Case:
    architecture: str
    family: str
    config: dict[str, Any] = field(default_factory=dict)
    keys: dict[str, Any] = field(default_factory=dict)
    seed: int = 0


CASES = {
    "baichuan": Case("LlamaForCausalLM", "baichuan", ALL_HEADS, {"architectures": ["BaiChuanForCausalLM"]}),
    "chatglm": Case("GlmForCausalLM", "chatglm", {"head_dim": 32, "attention_bias": True}),
    "chatglm-32k": Case(
        "GlmForCausalLM",
        "chatglm",
        {"head_dim": 16, "attention_bias": True, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
        {"rope_ratio": 50, "architectures": ["ChatGLMForConditionalGeneration"]},
    ),
    "qwen": Case("Qwen2ForCausalLM", "qwen", ALL_HEADS),
}


def load(directory: Path) -> Decoder:
    config = read_model_config(directory)
    return load_model(
        LoadPlan(directory, config, torch.float32, max_model_len=MAX_MODEL_LEN, backend=cpu, progress=False)
    )


@torch.inference_mode()
def reference_logits(directory: Path, token_ids: list[int], bias_1HTT: Tensor | None = None) -> Tensor:
    """Return transformers' float32 logits_TV; `bias_1HTT` takes the place of the causal mask."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    )
    return model(torch.tensor([token_ids]), attention_mask=bias_1HTT).logits[0]


def assert_same_tokens(older: Path, original: Path, alibi_slopes: list[float] | None = None) -> None:
    model = load(older)
    num_tokens = [MAX_MODEL_LEN - len(prompt) for prompt in PROMPTS]
    outputs = greedy_tokens(model, PROMPTS, num_tokens, chunk_size=16)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        bias_1HTT = None if alibi_slopes is None else alibi_bias(alibi_slopes, MAX_MODEL_LEN)
        logits_TV = reference_logits(original, prompt + output, bias_1HTT)
        assert_greedy(logits_TV[len(prompt) - 1 : -1], output)


def alibi_bias(slopes: list[float], num_tokens: int) -> Tensor:
    """Return what Baichuan-13B adds to scores: the key's position times the head's slope, and the causal mask."""
    positions_T = torch.arange(num_tokens, dtype=torch.float32)
    bias_HTT = torch.tensor(slopes)[:, None, None] * positions_T.expand(num_tokens, -1)
    return bias_HTT.masked_fill(positions_T > positions_T[:, None], -torch.inf)[None]


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_greedy_tokens_equal_those_of_the_original(case: Case, tmp_path: Path) -> None:
    original = make_checkpoint(tmp_path / "original", case.architecture, seed=case.seed, **case.config)
    assert_same_tokens(make_older(tmp_path / "older", original, case.family, **case.keys), original)


def test_the_head_of_baichuan2_is_normalized(tmp_path: Path) -> None:
    """The original's head has rows of length 1; the older one's are longer, each by another factor."""
    original = make_checkpoint(tmp_path / "original", **ALL_HEADS)
    rewrite_head(original, lambda head_VE: 4 * head_VE / head_VE.norm(dim=1, keepdim=True))
    older = make_older(tmp_path / "older", original, "baichuan", z_loss_weight=0)
    rewrite_head(original, lambda head_VE: head_VE / 4)
    rewrite_head(older, lambda head_VE: head_VE * torch.linspace(1, 9, len(head_VE))[:, None])
    assert_same_tokens(older, original)


@pytest.mark.parametrize(
    ("num_heads", "slopes"),
    [
        (4, [2**-2, 2**-4, 2**-6, 2**-8]),
        (5, [2**-2, 2**-4, 2**-6, 2**-8, 2**-1]),  # as 40 heads are not a power of 2 either
    ],
)
def test_baichuan_of_13b_attends_by_distance(num_heads: int, slopes: list[float], tmp_path: Path) -> None:
    """The reference is a Llama whose rotation is slowed down to none, with the bias as its mask."""
    original = make_checkpoint(
        tmp_path / "original",
        hidden_size=16 * num_heads,
        num_attention_heads=num_heads,
        num_key_value_heads=num_heads,
        rope_parameters={"rope_type": "linear", "factor": 1e9, "rope_theta": 10000.0},
    )
    older = make_older(tmp_path / "older", original, "baichuan", max_position_embeddings=None)
    assert_same_tokens(older, original, slopes)


@pytest.mark.parametrize("name", ["q_proj.weight", "k_proj.bias", "v_proj.weight"])
def test_ranks_read_their_part_of_a_stack(name: str, tmp_path: Path) -> None:
    original = make_checkpoint(tmp_path / "original", "GlmForCausalLM", head_dim=32, attention_bias=True)
    older = make_older(tmp_path / "older", original, "chatglm")
    name = f"model.layers.1.self_attn.{name}"
    size = 128 if "q_proj" in name else 64
    with Checkpoint(older) as checkpoint:
        source = renamed(checkpoint, read_model_config(older))
        whole, parts = torch.empty(size, 64), [torch.empty(size // 2, 64) for _ in range(2)]
        if name.endswith("bias"):
            whole, parts = whole[:, 0].contiguous(), [part[:, 0].contiguous() for part in parts]
        source.read(name, Shard(size), whole)
        for rank, part in enumerate(parts):
            source.read(name, Shard(size, 0, rank, 2), part)
    assert torch.equal(torch.cat(parts), whole)
    theirs = load_file(original / "model.safetensors")[name]
    assert torch.equal(whole, theirs) == ("v_proj" in name)
    assert math.isclose(whole.sum(), theirs.sum(), rel_tol=1e-4)


def test_ranks_have_the_slopes_of_their_heads(tmp_path: Path) -> None:
    original = make_checkpoint(tmp_path / "original", **ALL_HEADS)
    older = make_older(tmp_path / "older", original, "baichuan", max_position_embeddings=None)
    second = Decoder(read_model_config(older), torch.empty(0, 16), cpu, TensorParallel(1, 2))
    assert second.model.layers[0].self_attn.alibi_slopes_H.tolist() == [2**-6, 2**-8]


def test_a_missing_tensor_has_the_checkpoints_own_name(tmp_path: Path) -> None:
    older = make_older(tmp_path / "older", make_checkpoint(tmp_path / "original", **ALL_HEADS), "baichuan")
    tensors = load_file(older / "model.safetensors")
    del tensors["model.layers.2.self_attn.W_pack.weight"]
    save_file(tensors, older / "model.safetensors")
    with pytest.raises(ValueError, match=r"lacks 1 tensor: model\.layers\.2\.self_attn\.W_pack\.weight"):
        load(older)


@pytest.mark.parametrize(
    ("architecture", "family", "keys", "message"),
    [
        ("GlmForCausalLM", "chatglm", {"position_encoding_2d": True}, "the first ChatGLM-6B"),
        ("GlmForCausalLM", "chatglm", {"rmsnorm": False}, "rmsnorm False is not supported"),
        ("GlmForCausalLM", "chatglm", {"pre_seq_len": 128}, "pre_seq_len 128 is not supported"),
        ("GlmForCausalLM", "chatglm", {"rope_ratio": 4, "_name_or_path": "THUDM/chatglm2-6b-32k"}, "rope_ratio"),
        ("Qwen2ForCausalLM", "qwen", {"no_bias": False}, "no_bias False is not supported"),
        (
            "LlamaForCausalLM",
            "baichuan",
            {"quantization_config": {"load_in_4bit": True}},
            "'bitsandbytes' is not support",
        ),
        ("Qwen2ForCausalLM", "qwen", {"kv_channels": None}, "kv_channels"),
    ],
)
def test_what_is_computed_differently_is_refused_by_name(
    architecture: str, family: str, keys: dict[str, Any], message: str, tmp_path: Path
) -> None:
    original = make_checkpoint(tmp_path / "original", architecture, num_hidden_layers=1, **ALL_HEADS)
    older = make_older(tmp_path / "older", original, family, **keys)
    with pytest.raises(ValueError, match=message):
        read_model_config(older)


def test_each_of_them_has_a_tokenizer_without_its_code() -> None:
    assert {name for name, row in ARCHITECTURES.items() if row.translate} == FAMILIES.keys()


def test_the_first_qwen_reaches_to_the_length_of_its_training(tmp_path: Path) -> None:
    """Its max_position_embeddings is what its code stretches to, by means that change with the length."""
    older = make_older(tmp_path / "older", make_checkpoint(tmp_path / "o", "Qwen2ForCausalLM", **ALL_HEADS), "qwen")
    assert read_model_config(older).longest_sequence_tokens == TINY["max_position_embeddings"]


def rewrite_head(directory: Path, change: Any) -> None:
    tensors = load_file(directory / "model.safetensors")
    tensors["lm_head.weight"] = change(tensors["lm_head.weight"])
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
