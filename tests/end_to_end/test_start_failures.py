"""What a start that fails says: one paragraph, last, with cause and remedy, and a status that tells."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from octavo.protocol.model_files.weight_files import INDEX_FILE
from tests.fakes.checkpoints import make_checkpoint
from tests.fakes.fake_hub import FakeHub, running
from tests.fakes.model_directories import VOCAB_SIZE, write_tiny_model

ROOT = Path(__file__).parents[2]
LOG_LINE = re.compile(r"\d\d:\d\d:\d\d [DIW] ")
LIMIT_S = 10.0  # for every failure: nobody is to wait longer for what cannot be. Most of it is torch's import


class Failure(NamedTuple):
    """A way in which a start fails, who says so, and the words of cause and remedy."""

    name: str
    words: tuple[str, ...]
    damage: Callable[[Path], object] | None = None  # to a copy of the model
    flags: tuple[str, ...] = ()
    environ: dict[str, str] = {}  # noqa: RUF012
    said_by: str = "resolution"


def edit(name: str, **keys: Any) -> Callable[[Path], object]:
    def damage(model: Path) -> None:
        content = json.loads((model / name).read_text())
        (model / name).write_text(json.dumps(content | keys))

    return damage


def shard(model: Path) -> Path:
    return model / "model-00001-of-00005.safetensors"


def truncate(model: Path) -> None:
    os.truncate(shard(model), 1000)


def spoil_header(model: Path) -> None:
    with shard(model).open("r+b") as file:
        file.seek(8)
        file.write(b"?")


LARGE = {"hidden_size": 32768, "intermediate_size": 131072, "num_hidden_layers": 500, "num_attention_heads": 128}
FAILURES = (
    Failure("shard missing", ("lacks model-00001-of-00005", "Download it again"), lambda model: shard(model).unlink()),
    Failure("shard truncated", ("model-00001-of-00005.safetensors is damaged", "Download it again"), truncate),
    Failure("header corrupt", ("its header is not that of a safetensors file", "Download it again"), spoil_header),
    Failure(
        "index corrupt", (INDEX_FILE, "Download the model again"), lambda model: (model / INDEX_FILE).write_text("{")
    ),
    Failure(
        "tokenizer missing",
        ("has no tokenizer", "Copy tokenizer.json"),
        lambda model: (model / "tokenizer.json").unlink(),
    ),
    Failure("block size", ("block_size cannot be 5000", "at most 1024"), flags=("--block-size", "5000")),
    Failure("value", ("did you mean bfloat16?",), flags=("--dtype", "bfloat")),
    Failure(
        "no modelscope",
        ("pip install modelscope", "leave out --use-modelscope"),
        flags=("--model", "org/x", "--use-modelscope"),
    ),
    Failure("endpoint", ("HF_ENDPOINT", "local path"), flags=("--model", "x"), environ={"HF_ENDPOINT": "nonsense"}),
    Failure("path", ("there is no file or directory './nowhere'",), flags=("--model", "./nowhere")),
    Failure(
        "tokenizer broken",
        ("tokenizer.json cannot be used", "Download the model again"),
        lambda model: (model / "tokenizer.json").write_text("{}"),
        said_by="gateway",
    ),
    Failure(
        "chat template",
        ("chat template is not valid: line 1", "Put it right in", "tokenizer_config.json"),
        edit("tokenizer_config.json", chat_template="{% for x in %}"),
        said_by="gateway",
    ),
    Failure(
        "no room for a sequence",
        ("196608 bytes", "room for 100000", "--max-model-len to 128 or less", "--kv-cache-memory-bytes to 196608"),
        flags=("--kv-cache-memory-bytes", "100k"),
        said_by="executor",
    ),
    Failure(
        "no room for the weights",
        ("the weights take", "--quantization int8 or int4", "--tensor-parallel-size"),
        edit("config.json", **LARGE),
        ("--load-format", "dummy", "--max-model-len", "16"),
        said_by="executor",
    ),
    Failure(
        "too long",
        ("max_model_len (100000)", "Set --max-model-len to 256 or less"),
        flags=("--max-model-len", "100000"),
        said_by="executor",
    ),
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model in five shards, with all that serving needs."""
    directory = write_tiny_model(tmp_path_factory.mktemp("tiny"))
    return make_checkpoint(directory, vocab_size=VOCAB_SIZE, max_shard_size="150KB")


@pytest.mark.parametrize("failure", FAILURES, ids=lambda failure: failure.name)
def test_a_start_that_fails_says_why_in_one_paragraph(failure: Failure, model: Path, tmp_path: Path) -> None:
    if failure.damage is not None:
        model = Path(shutil.copytree(model, tmp_path / "model"))
        failure.damage(model)
    named = () if "--model" in failure.flags else ("--model", str(model))
    said = refusal(*named, *failure.flags, environ=failure.environ)
    assert said.startswith("octavo: " if failure.said_by == "resolution" else f"python -m octavo.{failure.said_by}: ")
    for words in failure.words:
        assert words in said


CHATTER = """
import os, sys, threading, time

def chatter():
    while True:
        os.write(2, b"12:00:00 I scheduler: still here\\n")
        time.sleep(0.01)

if "octavo.scheduler" in sys.orig_argv:
    threading.Thread(target=chatter, daemon=True).start()
"""


def test_the_reason_comes_last_whatever_others_log_meanwhile(model: Path, tmp_path: Path) -> None:
    broken = Path(shutil.copytree(model, tmp_path / "model"))
    (broken / "tokenizer.json").write_text("{}")
    (tmp_path / "sitecustomize.py").write_text(CHATTER)
    done = subprocess.run(
        [sys.executable, "-m", "octavo", "serve", "--model", str(broken), "--port", "0"],
        env=os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1
    lines = done.stderr.splitlines()
    assert "12:00:00 I scheduler: still here" in lines
    assert [line for line in lines if line.startswith("python -m ")] == [lines[-1]]


# What the gateway finds in a model, a command without one finds itself.
GENERATE_FAILURES = (
    *(failure for failure in FAILURES if failure.name == "tokenizer broken"),
    Failure(
        "generation config",
        ("generation_config '/nowhere' is not a directory",),
        flags=("--generation-config", "/nowhere"),
    ),
)


@pytest.mark.parametrize("failure", GENERATE_FAILURES, ids=lambda failure: failure.name)
def test_so_does_generate(failure: Failure, model: Path, tmp_path: Path) -> None:
    if failure.damage is not None:
        model = Path(shutil.copytree(model, tmp_path / "model"))
        failure.damage(model)
    (tmp_path / "prompts.txt").write_text("hi\n")
    files = ("--input-path", str(tmp_path / "prompts.txt"), "--output-path", str(tmp_path / "results.txt"))
    command = ("octavo", "generate", str(model), *files, *failure.flags)
    said = ended(*command, environ=None, begun=f"Starting {model}")
    assert said.startswith("octavo: ")
    for words in failure.words:
        assert words in said


def test_a_port_in_use_is_told_before_the_model_is_looked_at() -> None:
    with listening() as port:
        said = refusal("--model", "./nowhere", "--port", str(port))
    assert f"cannot listen on 127.0.0.1:{port}: Address already in use" in said
    assert "choose another with --port" in said


def test_a_hub_that_keeps_silent_is_not_waited_for(tmp_path: Path) -> None:
    with listening() as port:
        environ = {"HF_ENDPOINT": f"http://127.0.0.1:{port}", "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0"}
        said = refusal("--model", "org/name", environ=environ)
    assert f"org/name could not be fetched from http://127.0.0.1:{port} (no answer within" in said
    assert "HF_ENDPOINT" in said
    assert "a local path" in said


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("org/tiny", ("downloading org/tiny needs 1,000,000,000,000 MB", "HF_HOME")),
        ("org/tinny", ("has no model 'org/tinny', or it is private", "Check the spelling", "a local path")),
        ("org/gated", ("org/gated", "HF_TOKEN")),
    ],
    ids=["disk too small", "misspelt", "gated"],
)
def test_what_a_hub_says_against_a_model_is_explained(model: str, words: tuple[str, ...], tmp_path: Path) -> None:
    with running(FakeHub({"config.json": b"{}", "model.safetensors": b"weights"})) as hub:
        hub.announced_bytes["model.safetensors"] = 10**18
        environ = {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0"}
        said = refusal("--model", model, environ=environ)
        assert hub.downloaded == []
    assert said.startswith("octavo: ")
    for each in words:
        assert each in said


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    said = refusal(environ={"XDG_CACHE_HOME": str(tmp_path / "file")})
    assert f"cannot write to the model cache {tmp_path / 'file' / 'octavo' / 'models'}" in said
    assert "set XDG_CACHE_HOME to another directory" in said


def test_triton_without_a_gpu(model: Path) -> None:
    environ = {"CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "0"}
    flags = ("--model", str(model), "--attention-backend", "triton")
    said = refusal(*flags, environ=environ)
    assert "attention_backend 'triton' is not available on this machine: it needs a GPU" in said
    assert "it has: auto, cpu, reference" in said


def refusal(*flags: str, environ: dict[str, str] | None = None) -> str:
    port = () if "--port" in flags else ("--port", "0")
    return ended("octavo", "serve", *flags, *port, environ=environ)


def ended(*arguments: str, environ: dict[str, str] | None, begun: str | None = None) -> str:
    """Return the one paragraph that a command says last, having checked that it failed and said `begun` at most."""
    done = subprocess.run(
        [sys.executable, "-m", *arguments],
        env=os.environ | {"PYTHONPATH": str(ROOT)} | (environ or {}),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode in (1, 2)
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    lines = done.stderr.splitlines()
    [paragraph] = [line for line in lines if not LOG_LINE.match(line) and line != begun]
    assert lines[-1] == paragraph
    return paragraph


@contextmanager
def listening() -> Iterator[int]:
    """Yield a port whose connections nobody answers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]
