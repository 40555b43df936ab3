"""Commands where little is as usual: no home, no name for the user, no room. None ends in a traceback."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

# What a container under any uid is: a user whom nobody knows, and no variable that names a home.
NOBODY = "import os, sys; os.getuid = lambda: 4_242_424; from octavo.cli import program; program(sys.argv[1:])"


def run(*arguments: str, code: str = NOBODY, **variables: str) -> subprocess.CompletedProcess[str]:
    environ = {"PATH": os.environ["PATH"], "HF_HUB_OFFLINE": "1", **variables}
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize("command", [("pull", "org/name"), ("serve", "--dry-run"), ("serve", "~nobody-here/x")])
def test_a_user_without_home_or_name_is_told_what_to_do(command: tuple[str, ...], tmp_path: Path) -> None:
    done = run(*command, NUMBA_CACHE_DIR=str(tmp_path))  # which root could make in its home
    assert "Traceback" not in done.stderr
    assert done.returncode in (0, 1)
    assert done.returncode == 0 or done.stderr.startswith("octavo: ")


def test_the_home_of_nobody_is_that_of_containers() -> None:
    code = "import os; os.getuid = lambda: 4_242_424\nfrom octavo.protocol.process import know_home; know_home()\n"
    shown = "from octavo.models.cache import models_directory; print(os.environ['HOME'], models_directory())"
    assert run(code=code + shown).stdout.split() == ["/", "/.cache/octavo/models"]
    assert run(code=code + shown, HOME="/h").stdout.split()[0] == "/h"


NO_SERVER = "http://127.0.0.1:1"
NO_ADDRESS = "tcp://203.0.113.1:1"  # not this machine's
READ_SETTINGS = (
    *("octavo serve ./nowhere", "octavo serve --dry-run ./nowhere", "octavo serve --dry-run", "octavo pull ./nowhere"),
    "octavo generate ./nowhere --input-path prompts.txt --output-path results.txt",
    *(f"octavo {command} -q hi --url {NO_SERVER}/v1" for command in ("chat", "complete")),
    *(f"octavo {command} -q hi ./nowhere" for command in ("chat", "complete")),
    f"octavo bench serve --base-url {NO_SERVER}",
    "octavo supervise -- python -m octavo.gateway --model ./nowhere",
    *("octavo.gateway --model ./nowhere", "octavo.executor --model ./nowhere"),
    f"octavo.scheduler --frontend-address {NO_ADDRESS} --insecure-links",
)


@pytest.mark.parametrize("command", READ_SETTINGS)
def test_each_that_reads_settings_names_once_what_has_no_effect(command: str, tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("hi\n")
    done = subprocess.run(
        [sys.executable, "-m", *command.split()],
        env=os.environ | {"VLLM_USE_V1": "1", "HF_TOKN": "x"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    for said in ("VLLM_USE_V1 is a variable of vLLM and has no effect here", "did you mean HF_TOKEN?"):
        assert done.stderr.count(said) == 1, done.stderr
    assert "Traceback" not in done.stderr


def test_a_directory_for_sockets_that_is_none_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    code = "from octavo.scheduler.__main__ import main; raise SystemExit(main())"
    done = run(code=code, XDG_RUNTIME_DIR=str(tmp_path / "file"))
    assert done.returncode == 2
    assert done.stderr.startswith("python -m octavo.scheduler: no directory for sockets can be made at ")
    assert done.stderr.count("\n") == 1


def test_a_dry_run_whose_output_has_no_room_is_one_sentence(tmp_path: Path) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full")
    command = [sys.executable, "-m", "octavo", "serve", "--dry-run"]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=120, check=False)
    assert "Traceback" not in done.stderr
    assert "standard output cannot be written: No space left on device" in done.stderr
    assert done.returncode == 1
