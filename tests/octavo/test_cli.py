"""The command line: what it takes, what it refuses, and that it says what to do instead."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from octavo import __version__
from octavo.cli import build_parser, main
from octavo.commands.flags import read_config
from octavo.models.resolve import resolve_model
from octavo.protocol.config import FIELDS
from octavo.python.settings import LAUNCHER_FIELDS


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exited:
        main(["--version"])
    assert exited.value.code == 0
    assert capsys.readouterr().out.strip() == __version__


def test_help_of_serve_names_every_setting_a_person_may_change(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    shown = capsys.readouterr().out
    for name in FIELDS.keys() - set(LAUNCHER_FIELDS):
        assert f"--{name.replace('_', '-')}" in shown


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["serve", "--max-num-seq", "8"], "did you mean --max-num-seqs?"),
        (["serve", "--dtype", "bfloat"], "did you mean bfloat16?"),
        (["serve", "--port", "http"], "port cannot be 'http'"),
        (["serve", "--block-size", "0"], "block_size cannot be 0"),
        (["serve", "a", "--model", "b"], "the model is given twice"),
        (["serve", "--allowed-origins", "https://a.example/"], "no slash at its end"),
        (["serve", "--allowed-origins", "https://a.example,https://b.example"], "an origin as browsers send it"),
        (["serve", "--allowed-origins", "a.example"], "an origin as browsers send it"),
        (["serve", "--root-path", "llm/"], "a path such as /llm"),
        (["serve", "--no-enable-chunked-prefill"], "enable_chunked_prefill cannot be off"),
        (["serve", "--no-enable-prompt-tokens-details"], "every usage has them"),
        (["serv"], "serve"),
    ],
)
def test_wrong_arguments_end_with_status_2_and_a_hint(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exited:
        main(arguments)
    assert exited.value.code == 2
    assert said in capsys.readouterr().err


def test_without_a_command_the_help_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "octavo pull Qwen/Qwen3-0.6B" in capsys.readouterr().err


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


@pytest.mark.parametrize("flags", [("--port",), ("--port", "0", "--metrics-port")])
def test_a_port_in_use_is_found_before_anything_is_loaded(
    flags: tuple[str, ...], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        assert main(["serve", str(tmp_path), *flags, str(port)]) == 1
    said = capsys.readouterr().err
    assert f"127.0.0.1:{port}" in said
    assert f"choose another with {flags[-1]} " in said


def test_a_model_that_is_not_there_is_one_paragraph(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["serve", str(tmp_path / "missing.gguf"), "--port", "0"]) == 1
    said = capsys.readouterr().err
    assert "missing.gguf" in said
    assert "Traceback" not in said


def test_a_dry_run_says_what_a_model_takes_and_starts_nothing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = {"architectures": ["LlamaForCausalLM"], "vocab_size": 320, "max_position_embeddings": 256, **sizes}
    (tmp_path / "config.json").write_text(json.dumps(config))
    arguments = ["serve", str(tmp_path), "--dry-run", "--dtype", "float32", "--kv-cache-memory-bytes"]
    assert main([*arguments, "1MiB"]) == 0
    assert (
        "1.00 MiB (as set by kv_cache_memory_bytes): 1,024 tokens, 4.0 sequences of max_model_len"
        in capfd.readouterr().out
    )
    assert main([*arguments, "1KiB"]) == 1
    assert "fits                    no" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ([], "`octavo pull` does that (93 MB)"),
        (["--dtype", "bfloat16"], "`octavo pull --dtype bfloat16` does that"),
        (["tiny.gguf"], "tiny.gguf is empty. Download it again."),
    ],
)
def test_a_dry_run_fetches_no_weights(
    model: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    Path("tiny.gguf").touch()
    assert main(["serve", *model, "--dry-run"]) == 1
    assert said in capsys.readouterr().err
    assert not (tmp_path / "octavo").exists()


def test_pull_prints_the_directory(demo_directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pull", "--dtype", "bfloat16"]) == 0
    assert capsys.readouterr().out.strip() == str(demo_directory)
    assert main(["pull"]) == 0
    assert capsys.readouterr().out.strip() == str(resolve_model(None).directory)


@pytest.mark.parametrize(
    ("role", "flag", "meant"),
    [
        ("gateway", "--prot", "--port"),
        ("scheduler", "--max-num-seq", "--max-num-seqs"),
        ("executor", "--block-siz", "--block-size"),
    ],
)
def test_each_process_has_a_help_of_its_own(role: str, flag: str, meant: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", f"octavo.{role}", "--help"], capture_output=True, text=True, check=True
    )
    assert f"python -m octavo.{role}" in done.stdout
    wrong = subprocess.run([sys.executable, "-m", f"octavo.{role}", flag, "1"], capture_output=True, text=True)
    assert wrong.returncode == 2
    assert f"did you mean {meant}?" in wrong.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--seed", "-1"], "'-1' is not a number of 0 or more"),
        (["--port", "65536"], "a number of at least 0 and at most 65535"),
        (["--gpu-memory-utilization", "x"], "a number of more than 0 and at most 1"),
        (["model", "--served-model-name", "a", ""], "takes a text that is not empty"),
        (["--api-key", ""], "api_key cannot be used: it takes a text that is not empty"),
    ],
)
def test_what_a_value_may_be_is_said_in_words(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["serve", *arguments])
    assert said in capsys.readouterr().err


def test_a_wrong_key_is_not_shown(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("OCTAVO_API_KEY", '["secret"')
    with pytest.raises(SystemExit):
        main(["serve"])
    said = capsys.readouterr().err
    assert "api_key cannot be used" in said
    assert "secret" not in said


@pytest.mark.parametrize("host", ["no.such.host.invalid", "192.0.2.1", "..x"])
@pytest.mark.parametrize("port", ["0", "18999"])
def test_a_host_that_is_not_this_machines_is_one_paragraph(
    host: str, port: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "--host", host, "--port", port]) == 1
    said = capsys.readouterr().err
    assert f"cannot listen on {host}:{port}" in said
    assert "--host takes an address or a name of this machine" in said


def test_names_may_be_given_one_by_one() -> None:
    flags = build_parser("serve").parse_args(["serve", "--served-model-name", "a", "--served-model-name", "b", "c"])
    assert flags.served_model_name == ["a", "b", "c"]


@pytest.mark.parametrize("flag", ["--api-key", "--allowed-origins"])
def test_a_flag_of_one_value_leaves_the_model_behind_it(flag: str) -> None:
    typed = build_parser("serve").parse_args(["serve", flag, "http://a", flag, "http://b", "/nonexistent"])
    assert vars(typed)[flag.strip("-").replace("-", "_")] == ["http://a", "http://b"]
    assert typed.positional_model == "/nonexistent"


def test_a_model_behind_a_key_is_the_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--api-key", "KEY", "/nonexistent"]) == 1
    assert "there is no file or directory '/nonexistent'" in capsys.readouterr().err


def test_a_model_behind_a_flag_of_several_values_is_to_go_first(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["serve", "--served-model-name", "a", "b", "MODEL"])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert "put MODEL first, as in MODEL --served-model-name a b" in said
    assert "the demo's name as MODEL is SmolLM2-135M-Instruct" in said
    typed = build_parser("serve").parse_args(["serve", "MODEL", "--served-model-name", "a", "b"])
    assert (typed.positional_model, typed.served_model_name) == ("MODEL", ["a", "b"])


@pytest.mark.parametrize("command", [["serve"], ["serve", "--dry-run"]])
def test_the_key_of_another_server_is_no_key_here(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "abc")
    with pytest.raises(SystemExit) as ended:
        main(command)
    assert ended.value.code == 2
    assert "VLLM_API_KEY has no effect here" in capsys.readouterr().err


@pytest.mark.parametrize("role", ["gateway", "scheduler"])
def test_an_address_that_is_none_is_refused(role: str) -> None:
    flag = "--schedulers" if role == "gateway" else "--frontend-address"
    done = subprocess.run(
        [sys.executable, "-m", f"octavo.{role}", flag, "localhost:5555"], capture_output=True, text=True
    )
    assert done.returncode == 2
    assert "takes an address such as ipc://" in done.stderr


@pytest.mark.parametrize(("level", "said"), [("info", ["ours"]), ("debug", ["ours", "theirs"]), ("error", [])])
def test_the_log_is_ours_unless_all_is_asked_for(level: str, said: list[str]) -> None:
    program = (
        "import logging; from octavo.protocol.process import configure_logging; "
        f"configure_logging('x', {level!r}); "
        "logging.getLogger('octavo.serving.launcher').info('ours'); logging.getLogger('uvicorn.error').info('theirs')"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert [line.rsplit(" ", 1)[1] for line in done.stderr.splitlines()] == said


def test_addresses_of_processes_started_alone_concern_serve_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OCTAVO_FRONTEND_ADDRESS", "tcp://127.0.0.1:5555")
    with pytest.raises(SystemExit):
        main(["serve", str(tmp_path)])
    assert "OCTAVO_FRONTEND_ADDRESS is for processes started one by one" in capsys.readouterr().err
    assert main(["pull", str(tmp_path)]) == 1
    assert "has no config.json" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "streams", "said"),
    [
        (["env"], ">/dev/full", "standard output cannot be written: No space left on device"),
        (["env"], ">&-", "standard output cannot be written: Bad file descriptor"),
        (["--help"], ">/dev/full", "standard output cannot be written: No space left on device"),
        (
            ["chat", "--url", "http://127.0.0.1:1/v1", "--model-name", "any"],
            "<&-",
            "standard input cannot be read: Bad file descriptor",
        ),
    ],
)
def test_a_standard_stream_that_is_closed_or_full_is_said(command: list[str], streams: str, said: str) -> None:
    shell = ["sh", "-c", f'exec "$@" {streams}', "sh", sys.executable, "-m", "octavo", *command]
    ended = subprocess.run(shell, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (1, f"octavo: {said}\n")


def test_who_reads_no_more_ends_the_command() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "octavo", "env"]
    ended = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=writer, stderr=subprocess.PIPE, check=False)
    os.close(writer)
    assert (ended.returncode, ended.stderr) == (0, b"")


def test_an_error_reaches_nobody_where_all_streams_are_closed() -> None:
    shell = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", sys.executable, "-m", "octavo", "env"]
    assert subprocess.run(shell, check=False).returncode == 1


def test_flags_of_vllm_s_that_say_what_is_the_case_are_taken() -> None:
    flags = build_parser("serve").parse_args(
        ["serve", "--enable-chunked-prefill", "--enable-prompt-tokens-details", "--shutdown-timeout", "9"]
    )
    config = read_config(vars(flags))
    assert (config.enable_chunked_prefill, config.enable_prompt_tokens_details) == (True, True)
    assert config.shutdown_timeout_s == 9
