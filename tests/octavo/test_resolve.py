"""Every kind of MODEL that lies on this machine, and every way in which it can be wrong."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from octavo.errors import ModelError
from octavo.models.resolve import ResolvedModel, resolve_model
from tests.fakes.safetensors_files import NO_TENSORS
from tests.fakes.tiny_gguf import tiny_model, vocabulary, write_gguf


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty model cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "octavo" / "models"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A directory with the files that make a model, as far as resolution looks at them."""
    directory = tmp_path / "checkpoint"
    directory.mkdir()
    write(directory, "config.json", {"model_type": "llama"})
    write(directory, "tokenizer.json", {})
    (directory / "model.safetensors").write_bytes(NO_TENSORS)
    return directory


def write(directory: Path, name: str, content: dict[str, Any]) -> None:
    (directory / name).write_text(json.dumps(content))


def refusal(model: str, **options: bool) -> str:
    with pytest.raises(ModelError) as error:
        resolve_model(model, **options)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_directory_is_used_as_it_is(checkpoint: Path, cache: Path) -> None:
    assert resolve_model(str(checkpoint)) == ResolvedModel(checkpoint, str(checkpoint))
    assert not cache.exists()


def test_a_directory_is_served_under_the_name_that_was_typed(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(checkpoint.parent)
    assert resolve_model("checkpoint/") == ResolvedModel(checkpoint, "checkpoint/")
    monkeypatch.setenv("HOME", str(checkpoint.parent))
    assert resolve_model("~/checkpoint") == ResolvedModel(checkpoint, "~/checkpoint")


@pytest.mark.parametrize("model", ["/nowhere/at/all", "./nowhere", "~/nowhere", "nowhere.gguf", "a/b/c", ""])
def test_what_is_not_there_is_named(model: str) -> None:
    assert f"no file or directory {model!r}" in refusal(model)


def test_a_directory_without_config_is_no_model(checkpoint: Path) -> None:
    (checkpoint / "config.json").unlink()
    assert "has no config.json" in refusal(str(checkpoint))
    (checkpoint / "tiny.gguf").touch()
    assert f"give one of them as MODEL, for instance {checkpoint}/tiny.gguf" in refusal(str(checkpoint))


@pytest.mark.parametrize("text", ["{", "[]", "\xff"])
def test_a_damaged_config_is_named(text: str, checkpoint: Path) -> None:
    (checkpoint / "config.json").write_text(text, encoding="latin-1")
    assert str(checkpoint / "config.json") in refusal(str(checkpoint))


@pytest.mark.parametrize("name", ["consolidated.00.pth", "training_args.bin", "model.pt"])
def test_weights_must_be_safetensors_or_torchs_files_under_their_name(name: str, checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").rename(checkpoint / name)
    message = refusal(str(checkpoint))
    assert f"has no weights that can be read: {checkpoint} has none of model.safetensors, " in message
    assert "Its other files are pickles, which are not loaded: save the model as safetensors" in message
    assert resolve_model(str(checkpoint), needs_weights=False).directory == checkpoint


def test_every_shard_must_be_there(checkpoint: Path) -> None:
    shards = {"a": "model.safetensors", "b": "model-2.safetensors"}
    write(checkpoint, "model.safetensors.index.json", {"weight_map": shards})
    assert "lacks model-2.safetensors of model.safetensors.index.json (1 of 2 files)" in refusal(str(checkpoint))
    (checkpoint / "model-2.safetensors").write_bytes(NO_TENSORS)
    assert resolve_model(str(checkpoint)).directory == checkpoint


@pytest.mark.parametrize("weight_map", [{"a": "../other/model.safetensors"}, {"a": "x" * 5000}, {"a": 1}, ["a"]])
def test_an_index_must_name_files_of_its_directory(checkpoint: Path, weight_map: Any) -> None:
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert "model.safetensors.index.json" in refusal(str(checkpoint))


def test_code_from_a_repository_needs_permission(checkpoint: Path) -> None:
    write(checkpoint, "config.json", {"model_type": "mystery", "auto_map": {"AutoModelForCausalLM": "m.Model"}})
    message = refusal(str(checkpoint))
    assert str(checkpoint) in message
    assert "--trust-remote-code" in message
    assert resolve_model(str(checkpoint), trust_remote_code=True).directory == checkpoint


def test_code_is_not_needed_for_an_architecture_that_is_known(checkpoint: Path) -> None:
    write(checkpoint, "config.json", {"model_type": "llama", "auto_map": {"AutoModelForCausalLM": "m.Model"}})
    assert resolve_model(str(checkpoint)).directory == checkpoint


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is empty. Download it again"),
        (b"\0" * 100, "begins with nothing but zeros: its download has not ended"),
        (b"<!DOCTYPE html><title>404", "is a web page (HTML), and not what should have been downloaded"),
        (b"\xff" * 100, "is damaged or incomplete: it has 100 bytes, less than its header"),
        ((4).to_bytes(8, "little") + b"none", "its header is not that of a safetensors file"),
        (
            (48).to_bytes(8, "little") + b'{"a": {"dtype": "U8", "data_offsets": [0, 100]}} ' + bytes(60),
            "it has 117 bytes where its header tells of 156",
        ),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "Run `git lfs pull` in its directory"),
    ],
)
def test_a_file_of_weights_that_is_not_whole_is_refused(content: bytes, said: str, checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").write_bytes(content)
    message = refusal(str(checkpoint))
    assert str(checkpoint / "model.safetensors") in message
    assert said in message


def test_what_a_cache_would_not_fetch_again_is_to_be_removed(checkpoint: Path) -> None:
    blob = (checkpoint / "model.safetensors").rename(checkpoint / "blob")
    (checkpoint / "model.safetensors").symlink_to(blob)
    assert resolve_model(str(checkpoint)).directory == checkpoint
    blob.write_bytes(b"")
    assert f"Download it again (remove {blob} first)" in refusal(str(checkpoint))


def test_a_file_of_weights_may_have_notes(checkpoint: Path) -> None:
    header = b'{"__metadata__": {"format": "pt"}, "a": {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]}}'
    (checkpoint / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"abc")
    assert resolve_model(str(checkpoint)).directory == checkpoint


def test_a_model_without_any_tokenizer_is_refused(checkpoint: Path) -> None:
    (checkpoint / "tokenizer.json").unlink()
    assert "neither tokenizer.json nor files to make one from" in refusal(str(checkpoint))


def test_a_link_to_nothing_is_no_tokenizer(checkpoint: Path) -> None:
    (checkpoint / "tokenizer.json").unlink(missing_ok=True)
    (checkpoint / "tokenizer.json").symlink_to(checkpoint / "gone")
    (checkpoint / "tokenizer_config.json").write_text("{}")
    assert "neither tokenizer.json nor files to make one from" in refusal(str(checkpoint))


def test_a_tokenizer_of_another_format_is_converted(checkpoint: Path, cache: Path) -> None:
    (checkpoint / "tokenizer.json").unlink()
    write(checkpoint, "config.json", {"model_type": "gpt2"})
    write(checkpoint, "tokenizer_config.json", {"tokenizer_class": "GPT2Tokenizer"})
    tokens = [*vocabulary()[0], "Ġhe"]
    write(checkpoint, "vocab.json", {token: i for i, token in enumerate(tokens)})
    (checkpoint / "merges.txt").write_text("#version: 0.2\nh e\nĠ he\n")

    resolved = resolve_model(str(checkpoint))
    assert resolved.served_name == str(checkpoint)
    assert resolved.directory.parent == cache
    tokenizer = Tokenizer.from_file(str(resolved.directory / "tokenizer.json"))
    assert tokenizer.encode("he he").tokens == ["he", "Ġhe"]
    assert (resolved.directory / "model.safetensors").resolve() == checkpoint / "model.safetensors"
    assert resolve_model(str(checkpoint)) == resolved
    assert not (checkpoint / "tokenizer.json").exists()


def test_a_tokenizer_that_cannot_be_converted_is_refused(checkpoint: Path, cache: Path) -> None:
    (checkpoint / "tokenizer.json").rename(checkpoint / "tokenizer.model")
    assert "its tokenizer cannot be converted" in refusal(str(checkpoint))
    assert not [path for path in cache.iterdir() if path.is_dir()]


def test_a_gguf_file_is_read_through_a_directory_that_is_made_once(tmp_path: Path, cache: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", tiny_model("llama"))
    resolved = resolve_model(str(path))
    assert resolved.served_name == str(path)
    assert resolved.directory.parent == cache
    names = ["config.json", "generation_config.json", "model.gguf", "model.gguf.index.json"]
    names += ["tokenizer.json", "tokenizer_config.json"]
    assert sorted(file.name for file in resolved.directory.iterdir()) == names
    assert (resolved.directory / "model.gguf").readlink() == path

    written = (resolved.directory / "config.json").stat()
    assert resolve_model(str(path)) == resolved
    assert (resolved.directory / "config.json").stat().st_ino == written.st_ino
    assert resolve_model(str(resolved.directory)).directory == resolved.directory


def test_a_directory_whose_gguf_file_is_gone_is_refused(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", tiny_model("llama"))
    directory = resolve_model(str(path)).directory
    path.unlink()
    assert f"read from {path}, which is not there any more" in refusal(str(directory))


def test_a_gguf_type_that_cannot_be_run_is_refused_by_name(tmp_path: Path, cache: Path) -> None:
    model = tiny_model("llama", hidden_size=256, intermediate_size=256)
    path = write_gguf(tmp_path / "tiny.gguf", model, kinds={"ffn_down.weight": "Q2_K"})
    assert "stores blk.0.ffn_down.weight as Q2_K, which is not supported; supported: F32, F16" in refusal(str(path))
    assert not [path for path in cache.iterdir() if path.is_dir()]


def test_a_gguf_file_that_changed_is_another_model(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", tiny_model("llama"))
    first = resolve_model(str(path))
    os.utime(path, ns=(0, 0))
    assert resolve_model(str(path)) != first


def test_a_file_that_is_not_gguf_is_refused(checkpoint: Path) -> None:
    assert "not a GGUF file" in refusal(str(checkpoint / "tokenizer.json"))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "Run `git lfs pull` in its directory"),
        (b"", "is empty. Download it again."),
        (b"\n<!DOCTYPE html>\n<title>Sign in", "is a web page (HTML), and not what should have been downloaded."),
        (b"<?xml version='1.0'?><Error><Code>AccessDenied", "is a server's message (XML)"),
        (b'{"error": "Invalid username or password."}', "is a text (JSON), and not what should have been downloaded."),
        (b"\0" * 4096, "begins with nothing but zeros: its download has not ended. Download it again."),
        (b"PK\3\4", "is a file, but not a GGUF file. To serve safetensors, give the directory it is in."),
    ],
)
def test_a_broken_download_of_a_gguf_file_is_named(content: bytes, said: str, tmp_path: Path) -> None:
    path = tmp_path / "broken.gguf"
    path.write_bytes(content)
    message = refusal(str(path))
    assert str(path) in message
    assert said in message
