"""config.json of transformers 4 and 5 is read alike, and what is not supported is refused by name."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from octavo.executor.models import read_model_config
from octavo.executor.models.keys import NEUTRAL

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
SIZES = [key for key in CONFIG if key != "architectures"] + ["head_dim"]


def write(directory: Path, **keys: Any) -> Path:
    (directory / "config.json").write_text(json.dumps(CONFIG | keys))
    return directory


def test_optional_keys_have_the_defaults_of_transformers(tmp_path: Path) -> None:
    config = read_model_config(write(tmp_path))
    theirs = transformers.LlamaConfig(**{key: value for key, value in CONFIG.items() if key != "architectures"})
    assert config.head_dim == theirs.head_dim == 8
    assert config.rms_norm_eps == theirs.rms_norm_eps
    assert config.rope.rope_theta == theirs.rope_parameters["rope_theta"]
    assert config.tie_word_embeddings == theirs.tie_word_embeddings
    assert (config.qkv_bias, config.o_bias, config.mlp_bias, config.qk_norm) == (False, False, False, False)
    assert config.dtype == torch.float32


def test_old_llamas_have_as_many_kv_heads_as_heads(tmp_path: Path) -> None:
    assert read_model_config(write(tmp_path, num_key_value_heads=None)).num_kv_heads == 8


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_dtype_is_read_under_both_names(tmp_path: Path, key: str) -> None:
    assert read_model_config(write(tmp_path, **{key: "bfloat16"})).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("architecture", "keys", "expected"),
    [
        ("LlamaForCausalLM", {"attention_bias": True}, (True, True, False)),
        ("LlamaForCausalLM", {"mlp_bias": True}, (False, False, True)),
        ("MistralForCausalLM", {"attention_bias": True}, (False, False, False)),
        ("Qwen2ForCausalLM", {}, (True, False, False)),
        ("Qwen3ForCausalLM", {"attention_bias": True}, (True, True, False)),
    ],
)
def test_biases_follow_the_row(tmp_path: Path, architecture: str, keys: dict[str, bool], expected: tuple) -> None:
    config = read_model_config(write(tmp_path, architectures=[architecture], **keys))
    assert (config.qkv_bias, config.o_bias, config.mlp_bias) == expected


@pytest.mark.parametrize(
    ("architecture", "keys", "expected"),
    [
        ("LlamaForCausalLM", {"sliding_window": 7}, (None,) * 4),
        ("MistralForCausalLM", {}, (4096,) * 4),
        ("MistralForCausalLM", {"sliding_window": None}, (None,) * 4),
        ("MistralForCausalLM", {"sliding_window": 7}, (7,) * 4),
        ("Qwen2ForCausalLM", {"sliding_window": 7, "max_window_layers": 0}, (None,) * 4),
        (
            "Qwen2ForCausalLM",
            {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 3},
            (None, None, None, 7),
        ),
        (
            "Qwen3ForCausalLM",
            {
                "use_sliding_window": True,
                "sliding_window": 7,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
            },
            (7, None, 7, None),
        ),
    ],
)
def test_sliding_windows_follow_the_row(tmp_path: Path, architecture: str, keys: dict, expected: tuple) -> None:
    assert read_model_config(write(tmp_path, architectures=[architecture], **keys)).sliding_windows == expected


@pytest.mark.parametrize(
    ("scaling", "default_tokens", "longest_tokens"),
    [
        (None, 256, 256),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}, 1024, 1024),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}, 256, 256),
        ({"type": "linear", "factor": 4.0}, 256, 1024),
        ({"type": "dynamic", "factor": 4.0}, 256, 1024),
        ({"type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}, 256, 256),
    ],
)
def test_the_longest_sequence_follows_the_scaling(
    tmp_path: Path, scaling: dict[str, Any] | None, default_tokens: int, longest_tokens: int
) -> None:
    config = read_model_config(write(tmp_path, rope_scaling=scaling))
    assert (config.default_max_model_len, config.longest_sequence_tokens) == (default_tokens, longest_tokens)


@pytest.mark.parametrize("architectures", [[], ["LlamaForCausalLM", "MistralForCausalLM"]])
def test_a_directory_holds_one_architecture(tmp_path: Path, architectures: list[str]) -> None:
    with pytest.raises(ValueError, match=f"architectures names {len(architectures)} of them; one is needed"):
        read_model_config(write(tmp_path, architectures=architectures))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"quantization_config": {"quant_method": "hqq"}}, "quant_method 'hqq' is not supported; supported: awq, gptq"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config of gptq: bits is missing"),
        (
            {"quantization_config": {"quant_method": "gptq", "bits": 2, "group_size": 128}},
            "quantization_config of gptq: bits is 2, which is not supported; supported: 4, 8",
        ),
        (
            {"quantization_config": {"quant_method": "awq", "w_bit": 3, "q_group_size": 128}},
            "quantization_config of awq: bits is 3, which is not supported; supported: 4",
        ),
        (
            {"quantization_config": {"quant_method": "awq", "bits": "4", "group_size": 128}},
            "quantization_config of awq: bits is '4', which is not supported; supported: 4",
        ),
        (
            {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": None}},
            "quantization_config of gptq: group_size is None, and has to be a whole number",
        ),
        (
            {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128]}},
            r"quantization_config of fp8: weight_block_size is \[128\], and has to be a list of length 2",
        ),
        (
            {"quantization_config": {"quant_method": "compressed-tensors", "format": "pack-quantized"}},
            "quantization_config of compressed-tensors: config_groups is missing",
        ),
        ({"hidden_act": 7}, "hidden_act is 7, and has to be a text"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes', and has to be true or false or null"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"rope_scaling": {"type": "longrope", "factor": 2.0}}, "rope_type 'longrope'.*llama3"),
        ({"rope_scaling": {"type": "linear"}}, "'linear' needs factor"),
        ({"rope_scaling": {"type": ["linear"]}}, r"rope_type is \['linear'\], and has to be a text"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "'llama3' needs low_freq_factor"),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": "two"}},
            "rotary parameters: factor is 'two', and has to be a number or null",
        ),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "full_attention"),
        ({"architectures": ["Qwen2ForCausalLM"], "layer_types": ["full_attention"]}, "layer_types has 1 entries"),
        (
            {"architectures": ["Qwen2ForCausalLM"], "layer_types": ["chunked_attention"] * 4},
            "layer types {'chunked_attention'}",
        ),
        ({"num_attention_heads": 8, "num_key_value_heads": 3}, "no multiple of num_key_value_heads"),
        ({"head_dim": 7}, "head_dim 7 is odd"),
        ({"dtype": "float8_e4m3fn"}, "dtype 'float8_e4m3fn'"),
        ({"hidden_size": "64"}, r"hidden_size"),
        ({"vocab_size": None}, r"vocab_size"),
        *[({size: number}, f"{size} is {number}, and has to be at least 1") for size in SIZES for number in (0, -8)],
        *[({size: 10**30}, size) for size in SIZES],
        ({"num_hidden_layers": 2**31 - 1}, "num_hidden_layers is 2147483647, and has to be at most 10000"),
        ({"rms_norm_eps": -1e-6}, "rms_norm_eps"),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 0}, "sliding_window 0"),
        ({"rope_parameters": {"rope_theta": 0.0}}, "rope_theta"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}, "rope_theta": 1.0}, "rope_theta"),
        ({"rope_scaling": {"type": "linear", "factor": 0.0}}, "factor"),
        ({"rope_scaling": {"type": "yarn", "factor": 1e300}}, "factor"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0, "beta_slow": -1.0}}, "beta_slow"),
        ({"rope_scaling": {"type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 4}}, "above low"),
        ({"rope_scaling": {"type": "dynamic", "factor": 4.0}, "head_dim": 2}, "'dynamic' needs more than one"),
        ({"quantization_config": {"quant_method": ["awq"]}}, r"quant_method \['awq'\] is not supported"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(tmp_path: Path, keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as refusal:
        read_model_config(write(tmp_path, **keys))
    assert str(tmp_path / "config.json") in str(refusal.value)


@pytest.mark.parametrize(
    "content",
    [
        "{}",
        '{"architectures": "LlamaForCausalLM"}',
        '{"architectures": [',
        "[]",
        '{"architectures": ["LlamaForCausalLM"]}',
    ],
)
def test_a_config_of_another_form_is_named_with_what_helps(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ValueError, match=r"config\.json: .*: download the model again, or,.*save_pretrained write it"):
        read_model_config(tmp_path)


def test_a_directory_without_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no config\.json"):
        read_model_config(tmp_path)


def test_broken_json_is_refused_with_its_place(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": [')
    with pytest.raises(ValueError, match=r"config\.json"):
        read_model_config(tmp_path)


def test_a_config_that_is_nested_without_end_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ' + "[" * 100_000 + "]" * 100_000 + "}")
    with pytest.raises(ValueError, match=r"config\.json: "):
        read_model_config(tmp_path)


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "GemmaForCausalLM"])
@pytest.mark.parametrize(
    ("scaling", "unused"),
    [
        ({"factor": 2.0}, "(no rope_type is named, and the|rope_type 'default').* has no factor: no effect"),
        ({"rope_type": "default", "factor": 2.0, "beta_fast": 4.0}, "has no factor, beta_fast: no effect"),
        ({"type": "linear", "factor": 2.0, "low_freq_factor": 1.0}, "rope_type 'linear' has no low_freq_factor"),
        ({"type": "linear", "factor": 2.0}, None),
        ({"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 128}, None),
        ({"rope_type": "default", "rope_theta": 5000.0}, None),
        (None, None),
    ],
)
def test_rotary_parameters_without_effect_are_named(
    architecture: str, scaling: object, unused: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keys = {"architectures": [architecture], "dtype": "float32", "head_dim": 8, "rope_scaling": scaling}
    model_type = "gemma" if architecture.startswith("Gemma") else "llama"
    read_model_config(write(tmp_path, model_type=model_type, **keys))
    said = [message for message in caplog.messages if "rope" in message]
    assert len(said) == (0 if unused is None else 1)
    if unused is not None:
        assert re.search(rf"config\.json: .*{unused}", said[0])


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (
            '{"bits": 2, "group_size": 128}',
            "quantization_config of gptq: bits is 2, which is not supported; supported: 4, 8",
        ),
        ('[{"bits": 4}]', "it is not a JSON object. Download the model again"),
        ('{"bits": 4}', "quantization_config of gptq: group_size is missing"),
    ],
)
def test_an_older_file_of_a_quantizing_tool_is_refused_with_its_name(content: str, said: str, tmp_path: Path) -> None:
    (write(tmp_path) / "quantize_config.json").write_text(content)
    with pytest.raises(ValueError, match=rf"quantize_config\.json: {re.escape(said)}"):
        read_model_config(tmp_path)


def test_a_value_inside_a_group_is_named_with_its_place(tmp_path: Path) -> None:
    weights = {"num_bits": "four", "type": "int", "strategy": "group"}
    config = {"quant_method": "compressed-tensors", "format": "x", "config_groups": {"group_0": {"weights": weights}}}
    with pytest.raises(ValueError, match=r"config_groups\[\.\.\.\]\.weights\.num_bits is .* has to be a whole number"):
        read_model_config(write(tmp_path, quantization_config=config))


OTHER_MODELS = {
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "logit_scale": 0.0625,
    "logits_scaling": 8.0,
    "embedding_multiplier": 12.0,
    "is_causal": False,
    "num_local_experts": 8,
    "kv_lora_rank": 512,
    "vision_config": {"hidden_size": 8},
    "pruned_heads": {"0": [1]},
    "no_rope_layers": [1, 0],
}


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM"])
@pytest.mark.parametrize("key", OTHER_MODELS)
def test_a_key_of_another_forward_pass_is_refused_by_name(key: str, architecture: str, tmp_path: Path) -> None:
    keys = {"architectures": [architecture], key: OTHER_MODELS[key]}
    with pytest.raises(ValueError, match=rf"config\.json: {key} .* is not supported with this architecture"):
        read_model_config(write(tmp_path, **keys))


def test_such_keys_pass_with_values_that_change_nothing(tmp_path: Path) -> None:
    expected = read_model_config(write(tmp_path))
    for index in (0, -1):
        assert read_model_config(write(tmp_path, **{key: values[index] for key, values in NEUTRAL.items()})) == expected


@pytest.mark.parametrize(
    "model_class",
    [transformers.LlamaConfig, transformers.MistralConfig, transformers.Qwen2Config, transformers.Qwen3Config],
)
def test_what_transformers_writes_passes(model_class: Any, tmp_path: Path) -> None:
    model_class(architectures=[model_class.__name__.replace("Config", "ForCausalLM")]).save_pretrained(tmp_path)
    assert read_model_config(tmp_path).num_layers > 1
