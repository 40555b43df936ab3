"""Files of users that have the names of our packages."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from octavo.shadows import OURS, shadowed_in_children


def run_beside(directory: Path, shadow: str, code: str) -> "subprocess.CompletedProcess[str]":
    """Run a script with `code` beside a file or package `shadow` that would say so if it ran."""
    path = directory / shadow
    path.parent.mkdir(exist_ok=True)
    path.write_text("print('ran the shadow')\n")
    (directory / "script.py").write_text(code)
    environ = {**os.environ, "PYTHONPATH": str(OURS)}
    return subprocess.run([sys.executable, str(directory / "script.py")], capture_output=True, text=True, env=environ)


@pytest.mark.parametrize("shadow", ["protocol.py", "gateway.py", "gateway/__init__.py"])
def test_a_file_beside_the_script_that_shadows_a_package_is_named(shadow: str, tmp_path: Path) -> None:
    done = run_beside(tmp_path, shadow, "from octavo import LLM\n")
    assert done.returncode == 1
    assert f"ImportError: {tmp_path / shadow} has the name of Octavo's own package" in done.stderr
    assert "rename that file" in done.stderr
    assert "ran the shadow" not in done.stdout


def test_other_names_do_no_harm_in_the_users_process(tmp_path: Path) -> None:
    for shadow in ("scheduler.py", "executor.py", "kernels.py"):
        (tmp_path / shadow).write_text(f"print('ran {shadow}')\n")
    code = "import octavo\nprint(octavo.LLM.__name__, octavo.SamplingParams(n=2))\n"
    done = run_beside(tmp_path, "gateway/notes.txt", code)
    assert done.stdout == "LLM SamplingParams(n=2)\n", done.stderr


def test_the_package_alone_loads_nothing_heavy() -> None:
    code = "import sys, octavo; print({'torch', 'gateway', 'zmq', 'tqdm'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_what_children_would_find_in_pythonpath(tmp_path: Path) -> None:
    (tmp_path / "scheduler.py").touch()
    for pythonpath in (f"{tmp_path}:{OURS}", f"{OURS}:{tmp_path}"):
        complaint = shadowed_in_children(["protocol", "scheduler"], pythonpath)
        assert complaint is not None
        assert f"{tmp_path / 'scheduler.py'} has the name" in complaint
    assert shadowed_in_children(["protocol", "scheduler"], str(OURS)) is None
    assert shadowed_in_children(["protocol", "scheduler"], "") is None
