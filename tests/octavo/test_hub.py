"""Models from a hub. Each resolution is a process of its own, since huggingface_hub reads HF_* when imported."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from octavo.gateway.text.model_files import read_model_files
from octavo.protocol.config import Config
from tests.fakes.fake_hub import COMMIT, FakeHub, running
from tests.fakes.model_directories import write_byte_level_model
from tests.fakes.safetensors_files import NO_TENSORS

ROOT = Path(__file__).parents[2]
WANTED = {
    "config.json": b'{"model_type": "llama"}',
    "generation_config.json": b'{"eos_token_id": 2}',
    "tokenizer.json": b'{"version": "1.0"}',
    "tokenizer_config.json": b'{"eos_token": "</s>"}',
    "chat_template.jinja": b"{{ messages }}",
    "additional_chat_templates/tool_use.jinja": b"{{ messages[0].content }} with tools",
    "model-1.safetensors": NO_TENSORS,
    "model-2.safetensors": (3).to_bytes(8, "little") + b"{} ",  # no file that the cache holds already
    "model.safetensors.index.json": json.dumps(
        {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    ).encode(),
}
UNWANTED_NAMES = (
    "README.md",
    "additional_chat_templates/README.md",
    "additional_chat_templates/old/rag.jinja",
    "assets/model.safetensors",
    "assets/rag.jinja",
    "consolidated.safetensors",
    "modeling_tiny.py",
    "onnx/model.onnx",
    "original/model.safetensors",
    "pytorch_model.bin",
    "tiny.gguf",
    "tokenizer/rag.jinja",
)
UNWANTED = dict.fromkeys(UNWANTED_NAMES, b"large")
RESOLVE = """
import sys
from octavo.errors import ModelError
from octavo.models.resolve import resolve_config, resolve_model
try:
    if "--config" in sys.argv:
        print(resolve_config(sys.argv[1]))
    else:
        print(resolve_model(sys.argv[1], needs_weights="--dummy" not in sys.argv))
except ModelError as error:
    print("refused:", error)
"""


def resolve(model: str, cache: Path, endpoint: str, *flags: str, **environment: str) -> str:
    """What `resolve_model(model)` returns or raises in a fresh process with that cache and that hub."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    variables = {"HF_HOME": str(cache), "HF_ENDPOINT": endpoint, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", RESOLVE, model, *flags],
        env=clean | variables | environment,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=60,
    )
    return done.stdout.strip()


def snapshot(cache: Path) -> Path:
    return cache / "hub" / "models--org--tiny" / "snapshots" / COMMIT


@pytest.fixture
def endpoint_of_nobody() -> str:
    """The address of a hub that has gone."""
    with running(FakeHub({})) as hub:
        return hub.endpoint


def test_only_what_serving_needs_is_downloaded(tmp_path: Path, endpoint_of_nobody: str) -> None:
    resolved = f"ResolvedModel(directory={snapshot(tmp_path)!r}, served_name='org/tiny')"
    with running(FakeHub(WANTED | UNWANTED)) as hub:
        assert resolve("org/tiny", tmp_path, hub.endpoint, HF_TOKEN="secret") == resolved
    assert sorted(hub.downloaded) == sorted(WANTED)
    assert "Bearer secret" in hub.tokens
    # From now on it needs no hub.
    assert resolve("org/tiny", tmp_path, endpoint_of_nobody) == resolved
    assert resolve("org/tiny", tmp_path, endpoint_of_nobody, HF_HUB_OFFLINE="1") == resolved


def test_random_weights_need_no_download_of_weights(tmp_path: Path) -> None:
    with running(FakeHub(WANTED)) as hub:
        assert str(snapshot(tmp_path)) in resolve("org/tiny", tmp_path, hub.endpoint, "--dummy")
        assert not [name for name in hub.downloaded if "safetensors" in name]
        # A process without the network must not take the rest of the snapshot for the whole.
        assert "HF_HUB_OFFLINE forbids" in resolve("org/tiny", tmp_path, hub.endpoint, HF_HUB_OFFLINE="1")


def test_a_dry_run_fetches_settings_alone(tmp_path: Path) -> None:
    with running(FakeHub(WANTED)) as hub:
        assert resolve("org/tiny", tmp_path, hub.endpoint, "--config") == str(snapshot(tmp_path))
    assert sorted(hub.downloaded) == [
        *("additional_chat_templates/tool_use.jinja", "chat_template.jinja", "config.json", "generation_config.json"),
    ]


@pytest.mark.parametrize("name", ["chat_template.jinja", "chat_template.json"])
def test_every_chat_template_of_a_repository_is_at_hand(name: str, tmp_path: Path) -> None:
    default = "{{ messages[0].content }} by default"
    content = default if name.endswith(".jinja") else json.dumps({"chat_template": default})
    tokenizer = write_byte_level_model(tmp_path / "model") / "tokenizer.json"
    files = {name: content for name, content in WANTED.items() if not name.startswith("chat_template.")}
    with running(FakeHub(files | {name: content.encode(), "tokenizer.json": tokenizer.read_bytes()})) as hub:
        resolve("org/tiny", tmp_path, hub.endpoint)
    for chosen, expected in (("", "hi by default"), ("tool_use", "hi with tools")):
        model = read_model_files(Config(model=str(snapshot(tmp_path)), chat_template=chosen))
        assert model.chat_template.render([{"role": "user", "content": "hi"}]).text == expected


WITHOUT_WEIGHTS = {name: content for name, content in WANTED.items() if "safetensors" not in name}


def test_torchs_files_are_downloaded_where_there_are_no_safetensors(tmp_path: Path, endpoint_of_nobody: str) -> None:
    torch.save({"a": torch.zeros(1)}, tmp_path / "made")
    weights = {
        "pytorch_model-1.bin": (tmp_path / "made").read_bytes(),
        "pytorch_model.bin.index.json": b'{"weight_map": {"a": "pytorch_model-1.bin"}}',
    }
    others = dict.fromkeys(("training_args.bin", "optimizer.bin", "original/pytorch_model.bin", "rng.pth"), b"large")
    with running(FakeHub(WITHOUT_WEIGHTS | weights | others)) as hub:
        resolved = resolve("org/tiny", tmp_path, hub.endpoint)
    assert str(snapshot(tmp_path)) in resolved
    assert sorted(hub.downloaded) == sorted(WITHOUT_WEIGHTS | weights)
    assert resolve("org/tiny", tmp_path, endpoint_of_nobody) == resolved


def test_what_torchs_files_take_is_compared_with_the_disk(tmp_path: Path) -> None:
    with running(FakeHub(WITHOUT_WEIGHTS | {"pytorch_model.bin": b"large"})) as hub:
        hub.announced_bytes["pytorch_model.bin"] = 10**18
        assert "downloading org/tiny" in resolve("org/tiny", tmp_path, hub.endpoint)
    assert "pytorch_model.bin" not in hub.downloaded


def test_a_repository_without_weights_is_refused(tmp_path: Path) -> None:
    with running(FakeHub(WITHOUT_WEIGHTS | {"rust_model.ot": b"large"})) as hub:
        assert "org/tiny has no weights that can be read" in resolve("org/tiny", tmp_path, hub.endpoint)
    assert "rust_model.ot" not in hub.downloaded


@pytest.mark.parametrize(
    ("model", "cause"),
    [
        ("org/tyni", "has no model 'org/tyni', or it is private"),
        ("tyni", "has no model 'tyni', or it is private"),
        ("org/gated", "org/gated is gated"),
        ("not an id", "'not an id' is neither a file or directory here nor a Hugging Face id"),
    ],
)
def test_what_the_hub_refuses_is_explained(model: str, cause: str, tmp_path: Path) -> None:
    with running(FakeHub(WANTED)) as hub:
        message = resolve(model, tmp_path, hub.endpoint)
    assert message.startswith("refused:")
    assert "\n" not in message
    assert cause in message


def test_a_hub_that_cannot_be_reached_is_named_with_the_remedies(tmp_path: Path, endpoint_of_nobody: str) -> None:
    message = resolve("org/tiny", tmp_path, endpoint_of_nobody)
    assert f"could not be fetched from {endpoint_of_nobody} (" in message
    assert "\n" not in message
    assert "HF_ENDPOINT" in message
    assert "a local path" in message


@pytest.mark.parametrize("endpoint", ["nonsense", "http://[", "ftp://hub", "http://hub:port"])
def test_an_endpoint_that_is_no_address_is_named(endpoint: str, tmp_path: Path) -> None:
    message = resolve("org/tiny", tmp_path, endpoint)
    assert "no address of a hub: set it to one such as https://huggingface.co" in message


def test_room_for_the_download_is_made_sure_of(tmp_path: Path) -> None:
    with running(FakeHub(WANTED)) as hub:
        hub.announced_bytes["model-2.safetensors"] = 10**18
        message = resolve("org/tiny", tmp_path, hub.endpoint)
        assert "downloading org/tiny needs 1,000,000,000,000 MB" in message
        assert "HF_HOME" in message
        assert hub.downloaded == []
        # What is there already takes no more room, and what serving does not need takes none.
        hub.announced_bytes = {"pytorch_model.bin": 10**18}
        hub.files["pytorch_model.bin"] = b"large"
        resolve("org/tiny", tmp_path, hub.endpoint)
        hub.announced_bytes["model-2.safetensors"] = 10**18
        assert str(snapshot(tmp_path)) in resolve("org/tiny", tmp_path, hub.endpoint)


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with running(FakeHub(WANTED)) as hub:
        message = resolve("org/tiny", tmp_path / "file", hub.endpoint)
    assert f"cannot be written to the cache {tmp_path / 'file' / 'hub'}" in message
    assert "HF_HOME" in message


def test_offline_and_not_cached_is_said(tmp_path: Path, endpoint_of_nobody: str) -> None:
    message = resolve("org/tiny", tmp_path, endpoint_of_nobody, HF_HUB_OFFLINE="1")
    assert f"not (or not wholly) in the cache {tmp_path / 'hub'}" in message
    assert "HF_ENDPOINT" in message
    assert "a local path" in message


def test_ctrl_c_ends_a_download(tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("hi\n")
    hub = FakeHub(WANTED)
    hub.held = "model-1.safetensors"
    files = ["--input-path", str(tmp_path / "prompts.txt"), "--output-path", str(tmp_path / "results.txt")]
    variables = {"HF_HOME": str(tmp_path), "HF_ENDPOINT": hub.endpoint, "HF_HUB_OFFLINE": "0", "PYTHONPATH": str(ROOT)}
    with running(hub):
        process = subprocess.Popen(
            [sys.executable, "-m", "octavo", "generate", "org/tiny", *files],
            env=os.environ | variables,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            assert hub.holding.wait(60)
            process.send_signal(signal.SIGINT)
            said = process.communicate(timeout=30)[1]
        finally:
            process.kill()
            process.wait()
    assert process.returncode == 130
    assert said.endswith("0 of 1 are done; run again, it goes on from there\n")
