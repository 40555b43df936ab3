"""The command line: what it takes, what it refuses, and that it says what to do instead."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from octavo import __version__
from octavo.cli import main
from protocol.config import FIELDS


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exited:
        main(["--version"])
    assert exited.value.code == 0
    assert capsys.readouterr().out.strip() == __version__


def test_help_of_serve_names_every_setting_a_person_may_change(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    shown = capsys.readouterr().out
    for name in FIELDS.keys() - {"frontend_address", "backend_address", "schedulers"}:
        assert f"--{name.replace('_', '-')}" in shown


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["serve", "--max-num-seq", "8"], "did you mean --max-num-seqs?"),
        (["serve", "--dtype", "bfloat"], "did you mean bfloat16?"),
        (["serve", "--port", "http"], "port cannot be 'http'"),
        (["serve", "--block-size", "0"], "block_size cannot be 0"),
        (["serve", "a", "--model", "b"], "the model is given twice"),
        (["serv"], "serve"),
        ([], "COMMAND"),
    ],
)
def test_wrong_arguments_end_with_status_2_and_a_hint(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exited:
        main(arguments)
    assert exited.value.code == 2
    assert said in capsys.readouterr().err


def test_an_unknown_variable_is_an_error(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("OCTAVO_MAX_NUM_SEQ", "8")
    with pytest.raises(SystemExit) as exited:
        main(["serve"])
    assert exited.value.code == 2
    assert "did you mean OCTAVO_MAX_NUM_SEQS?" in capsys.readouterr().err


def test_the_launchers_own_addresses_cannot_be_set(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OCTAVO_BACKEND_ADDRESS", "ipc:///elsewhere")
    with pytest.raises(SystemExit):
        main(["serve"])
    assert "OCTAVO_BACKEND_ADDRESS" in capsys.readouterr().err


def test_a_port_in_use_is_found_before_anything_is_loaded(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        assert main(["serve", str(tmp_path), "--port", str(port)]) == 1
    assert f"127.0.0.1:{port}" in capsys.readouterr().err


def test_a_model_that_is_not_there_is_one_paragraph(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["serve", str(tmp_path / "missing.gguf"), "--port", "0"]) == 1
    said = capsys.readouterr().err
    assert "missing.gguf" in said
    assert "Traceback" not in said


def test_pull_prints_the_directory(demo_directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pull"]) == 0
    assert capsys.readouterr().out.strip() == str(demo_directory)


@pytest.mark.parametrize("role", ["gateway", "scheduler", "executor"])
def test_each_process_has_a_help_of_its_own(role: str) -> None:
    done = subprocess.run([sys.executable, "-m", role, "--help"], capture_output=True, text=True, check=True)
    assert f"python -m {role}" in done.stdout
    wrong = subprocess.run([sys.executable, "-m", role, "--prot", "1"], capture_output=True, text=True)
    assert wrong.returncode == 2
    assert "did you mean --port?" in wrong.stderr
