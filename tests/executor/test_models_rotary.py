"""Rotary frequencies equal those of transformers, bit for bit, for each kind of scaling."""

from typing import Any

import msgspec
import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from octavo.executor.models import read_model_config
from octavo.executor.models.rotary import rotary_frequencies, rotary_table

SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 2.5},
    "dynamic": {"rope_type": "dynamic", "factor": 3.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256},
    "yarn-all-the-length": {"rope_type": "yarn", "factor": 2.0},
    "yarn-attention-factor": {"rope_type": "yarn", "factor": 8.0, "attention_factor": 1.25},
    "yarn-mscale": {"rope_type": "yarn", "factor": 8.0, "mscale": 1.0, "mscale_all_dim": 0.5},
    "yarn-betas": {"rope_type": "yarn", "factor": 8.0, "beta_fast": 16, "beta_slow": 2, "truncate": False},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    },
}
MAX_POSITION_EMBEDDINGS = 1024


def written(tmp_path, **keys: Any):
    """Return our and transformers' reading of one config.json."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 320,
        "hidden_size": 512,
        "intermediate_size": 96,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "max_position_embeddings": MAX_POSITION_EMBEDDINGS,
    }
    (tmp_path / "config.json").write_bytes(msgspec.json.encode(config | keys))
    return read_model_config(tmp_path), transformers.AutoConfig.from_pretrained(tmp_path)


@pytest.mark.parametrize("style", ["rope_parameters", "rope_scaling", "type"])
@pytest.mark.parametrize("scaling", SCALINGS.values(), ids=SCALINGS)
@pytest.mark.parametrize("max_model_len", [600, 3000])
def test_frequencies_equal_those_of_transformers(tmp_path, scaling, style: str, max_model_len: int) -> None:
    if style == "rope_parameters":
        keys: dict[str, Any] = {"rope_parameters": {**scaling, "rope_theta": 50000.0}}
    else:
        renamed = {"type" if key == "rope_type" and style == "type" else key: v for key, v in scaling.items()}
        keys = {"rope_theta": 50000.0, "rope_scaling": renamed}
    config, theirs = written(tmp_path, **keys)
    inv_freq, factor = rotary_frequencies(config.rope, config.head_dim, max_model_len)
    expected, expected_factor = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](theirs, seq_len=max_model_len)
    assert inv_freq.dtype == torch.float32
    assert torch.equal(inv_freq, expected)
    assert factor == expected_factor


@pytest.mark.parametrize("scaling", [None, *SCALINGS.values()], ids=["default", *SCALINGS])
def test_the_table_holds_the_cosines_and_sines_of_transformers(tmp_path, scaling) -> None:
    config, theirs = written(tmp_path, rope_scaling=scaling, rope_theta=50000.0)
    embedding = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(theirs)
    num_positions = MAX_POSITION_EMBEDDINGS
    cos_BPD, sin_BPD = embedding(torch.zeros(1), torch.arange(num_positions)[None])
    table_PR = rotary_table(config.rope, config.head_dim, num_positions)
    half = config.head_dim // 2
    torch.testing.assert_close(table_PR[:, :half], cos_BPD[0, :, :half], rtol=0, atol=1e-6)
    torch.testing.assert_close(table_PR[:, half:], sin_BPD[0, :, :half], rtol=0, atol=1e-6)


def test_dynamic_frequencies_follow_max_model_len_only_beyond_the_trained_length(tmp_path) -> None:
    config, _ = written(tmp_path, rope_scaling=SCALINGS["dynamic"])
    plain, _ = written(tmp_path)
    at = {n: rotary_frequencies(config.rope, config.head_dim, n)[0] for n in (100, MAX_POSITION_EMBEDDINGS, 2048)}
    assert torch.equal(at[100], rotary_frequencies(plain.rope, plain.head_dim, 100)[0])
    assert torch.equal(at[100], at[MAX_POSITION_EMBEDDINGS])
    assert not torch.equal(at[100], at[2048])
