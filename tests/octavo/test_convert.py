"""GGUF files become directories that transformers reads as the model they were made from."""

import json
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from octavo.errors import ModelError
from octavo.models.convert import convert_gguf
from tests.fakes.tiny_gguf import CHAT_TEMPLATE, tiny_model, vocabulary, write_gguf

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama, tied": ("llama", {"tie_word_embeddings": True}),
    "llama, biased, standard head size": ("llama", {"attention_bias": True, "head_dim": 16}),
    "llama, Llama 3 rotary scaling": ("llama", {"rope_parameters": LLAMA3, "max_position_embeddings": 131072}),
    "qwen2": ("qwen2", {"head_dim": 16}),
    "qwen3": ("qwen3", {}),
}


def converted(path: Path) -> Path:
    directory = path.with_suffix("")
    convert_gguf(path, directory)
    return directory


def read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", MODELS)
def test_a_converted_model_computes_the_same_logits(name: str, tmp_path: Path) -> None:
    """Every weight is exact in bf16, so any difference is a wrong name, order, shape or configuration."""
    from transformers import AutoModelForCausalLM

    architecture, config = MODELS[name]
    model = tiny_model(architecture, **config)
    directory = converted(write_gguf(tmp_path / "tiny.gguf", model))
    loaded = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    assert type(loaded) is type(model)
    input_ids = torch.arange(3, 99)[None]
    with torch.no_grad():
        assert torch.equal(loaded(input_ids).logits, model(input_ids).logits)


def test_quantized_tensors_are_dequantized(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", tiny_model("qwen3"), kinds="Q8_0")
    [source] = [tensor for tensor in gguf.GGUFReader(path).tensors if tensor.name == "blk.1.ffn_down.weight"]
    assert source.tensor_type == gguf.GGMLQuantizationType.Q8_0
    expected = torch.from_numpy(gguf.dequantize(source.data, source.tensor_type)).bfloat16()
    weights = load_file(converted(path) / "model.safetensors")
    assert torch.equal(weights["model.layers.1.mlp.down_proj.weight"], expected)
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}


def test_config_says_what_the_file_says(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", tiny_model("llama", rms_norm_eps=1e-5, tie_word_embeddings=True))
    config = read_json(converted(path) / "config.json")
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["rms_norm_eps"] == 1e-05  # not its float32 neighbour 9.999999747378752e-06
    assert config["tie_word_embeddings"] is True
    assert (config["bos_token_id"], config["eos_token_id"]) == (1, 2)
    assert "pad_token_id" not in config


def test_yarn_scaling_is_kept(tmp_path: Path) -> None:
    keys = {"type": "yarn", "factor": 4.0, "original_context_length": 128}
    named: dict[str, Any] = {f"qwen2__rope__scaling__{key}": value for key, value in keys.items()}
    path = write_gguf(tmp_path / "tiny.gguf", tiny_model("qwen2", head_dim=16), **named)
    expected = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    assert read_json(converted(path) / "config.json")["rope_scaling"] == expected


def test_every_end_of_turn_is_an_end(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", tiny_model("llama"), tokenizer__ggml__eot_token_id=0)
    assert read_json(converted(path) / "generation_config.json") == {"bos_token_id": 1, "eos_token_id": [0, 2]}


# How each family splits the same text; "12" and "o " are merges that must not cross a split.
SPLITS = {
    "smollm": ["1", "2", "Ġ", "1", "2", "3", "4", "hello", "Ġw", "!"],
    "gpt-2": ["12", "Ġ", "12", "3", "4", "hello", "Ġw", "!"],
    "qwen2": ["1", "2", "Ġ", "1", "2", "3", "4", "hello", "Ġw", "!"],
    "llama-bpe": ["<|im_start|>", "12", "Ġ", "12", "3", "4", "hello", "Ġw", "!"],
    "tekken": ["<|im_start|>", "1", "2", "Ġ", "1", "2", "3", "4", "hello", "Ġw", "!"],
}


@pytest.mark.parametrize("pre", SPLITS)
def test_text_is_split_as_the_vocabulary_was_learned(pre: str, tmp_path: Path) -> None:
    directory = converted(write_gguf(tmp_path / "tiny.gguf", tiny_model("llama"), pre=pre))
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    assert tokenizer.encode("12 1234hello w!").tokens == SPLITS[pre]


def test_a_sentencepiece_vocabulary_is_converted(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", tiny_model("llama", vocab_size=271), sentencepiece=True)
    tokenizer = Tokenizer.from_file(str(converted(path) / "tokenizer.json"))
    encoded = tokenizer.encode("hello  wé\n")
    assert encoded.tokens == ["<s>", "▁hello", "▁", "▁w", "<0xC3>", "<0xA9>", "<0x0A>"]
    assert tokenizer.decode(encoded.ids) == "hello  wé\n"


def test_transformers_reads_the_same_tokenizer(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    directory = converted(write_gguf(tmp_path / "tiny.gguf", tiny_model("llama"), tokenizer__ggml__add_bos_token=True))
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    loaded = AutoTokenizer.from_pretrained(directory)
    text = "<|im_start|>hello\u00a012 <think>é\n<|im_end|>"
    assert loaded(text)["input_ids"] == tokenizer.encode(text).ids
    assert loaded.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == (
        "<|im_start|>hi<|im_end|>"
    )
    assert read_json(directory / "tokenizer_config.json")["chat_template"] == CHAT_TEMPLATE
    assert loaded.eos_token_id == 2


def test_tokens_keep_their_kind(tmp_path: Path) -> None:
    directory = converted(write_gguf(tmp_path / "tiny.gguf", tiny_model("llama")))
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokens, types = vocabulary()
    added = tokenizer.get_added_tokens_decoder()
    assert {i for i, token in added.items() if token.special} == {i for i, kind in enumerate(types) if kind == 3}
    assert [token.content for token in added.values() if not token.special] == ["<think>"]
    assert tokenizer.token_to_id("[PAD0]") is None
    assert all(tokenizer.token_to_id(token) == i for i, token in enumerate(tokens[:-1]))


def refused(path: Path) -> str:
    """The refusal's message; nothing was written."""
    directory = path.with_suffix("")
    with pytest.raises(ModelError) as refusal:
        convert_gguf(path, directory)
    assert not directory.exists()
    return str(refusal.value)


def test_an_unknown_architecture_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    writer = gguf.GGUFWriter(path, "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    assert "architecture 'mamba', which is not supported. Supported: llama, qwen2, qwen3" in refused(path)


@pytest.mark.parametrize("pre", ["some-new-split", None])
def test_an_unknown_split_is_refused_by_name(pre: str | None, tmp_path: Path) -> None:
    assert f"tokenizer.ggml.pre is {pre!r}" in refused(write_gguf(tmp_path / "a.gguf", tiny_model("llama"), pre=pre))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"llama__expert_count": 8}, "mixture of experts"),
        ({"llama__rope__dimension_count": 16}, "only a part of each head"),
        ({"llama__rope__scaling__type": "longrope"}, "'longrope'"),
        ({"split__count": 3}, "llama-gguf-split --merge"),
    ],
)
def test_what_the_decoder_cannot_express_is_refused(keys: dict[str, Any], message: str, tmp_path: Path) -> None:
    assert message in refused(write_gguf(tmp_path / "tiny.gguf", tiny_model("llama"), **keys))


def test_rotary_factors_that_are_not_llama3s_are_refused(tmp_path: Path) -> None:
    other = LLAMA3 | {"high_freq_factor": 2.0}
    model = tiny_model("llama", rope_parameters=other, max_position_embeddings=131072)
    assert "rope_freqs.weight" in refused(write_gguf(tmp_path / "tiny.gguf", model))


def test_missing_and_unknown_tensors_are_named(tmp_path: Path) -> None:
    model = tiny_model("llama")
    model.config.num_hidden_layers = 3
    assert "it lacks blk.2.attn_k.weight" in refused(write_gguf(tmp_path / "missing.gguf", model))
    model = tiny_model("qwen3", attention_bias=True)
    del model.model.layers[0].self_attn.q_proj.bias
    assert "it has blk.0.attn_k.bias" in refused(write_gguf(tmp_path / "unknown.gguf", model))


@pytest.mark.parametrize("kept", [0.01, 0.5, 0.99])
def test_a_truncated_file_is_refused(kept: float, tmp_path: Path) -> None:
    whole = write_gguf(tmp_path / "whole.gguf", tiny_model("llama")).read_bytes()
    part = tmp_path / "part.gguf"
    part.write_bytes(whole[: int(len(whole) * kept)])
    said = f"is not a whole GGUF file: its {part.stat().st_size} bytes end before what its header announces"
    assert said in refused(part)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is empty. Download it again."),
        (b"<html>", "is a web page (HTML), and not what should have been downloaded. Download it again."),
        (b"none", "is not a whole GGUF file: it does not begin as one. Download it again."),
        (b"GGUF", "is not a whole GGUF file: its 4 bytes end before what its header announces, or are damaged."),
        (b"GGUF\1\0\0\0" + bytes(16), "is of version 1 of the GGUF format, which is not read."),
    ],
)
def test_a_beginning_is_refused_with_the_cause(content: bytes, said: str, tmp_path: Path) -> None:
    path = tmp_path / "begun.gguf"
    path.write_bytes(content)
    assert said in refused(path)


@pytest.mark.parametrize(
    "keys",
    [
        {"llama__block_count": 2**31 - 1},
        {"llama__block_count": 0},
        {"llama__embedding_length": -64},
        {"llama__embedding_length": "64"},
        {"llama__attention__head_count": 0},
        {"llama__context_length": 2**32 - 1},
        {"llama__rope__freq_base": float("nan")},
        {"tokenizer__ggml__tokens": [1, 2, 3]},
        {"tokenizer__ggml__token_type": [1]},
        {"tokenizer__ggml__merges": "a b"},
        {"tokenizer__ggml__model": 5},
        {"general__architecture": ["llama"]},
    ],
    ids=repr,
)
def test_metadata_that_makes_no_sense_is_refused(keys: dict[str, Any], tmp_path: Path) -> None:
    """At once, and before anything is built that is as large as it says."""
    path = write_gguf(tmp_path / "tiny.gguf", tiny_model("llama"), **keys)
    with pytest.raises(ModelError, match=str(path)):
        converted(path)


def test_an_id_beyond_the_vocabulary_is_none(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", tiny_model("llama"), tokenizer__ggml__padding_token_id=2**32 - 1)
    assert "pad_token" not in read_json(converted(path) / "tokenizer_config.json")
