"""An installation owns one name, `octavo`: files of users and packages of others that share our folders' names."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", ["protocol", "gateway", "scheduler", "executor", "kernels", "bench"])
@pytest.mark.parametrize("form", ["{}.py", "{}/__init__.py"])
def test_a_users_file_of_a_folders_name_does_no_harm(name: str, form: str, tmp_path: Path) -> None:
    """Beside a script, and in PYTHONPATH, for this process and its children."""
    path = tmp_path / form.format(name)
    path.parent.mkdir(exist_ok=True)
    path.write_text("print('ran the wrong file')\n")
    code = f"import octavo.{name}.__main__" if name in ("gateway", "scheduler", "executor") else f"import octavo.{name}"
    (tmp_path / "script.py").write_text(f"{code}\nfrom octavo import LLM, SamplingParams\nprint(SamplingParams(n=2))\n")
    environ = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    for command in (["script.py"], ["-m", "script"], ["-P", "-m", "octavo", "--version"]):
        done = subprocess.run(
            [sys.executable, *command], capture_output=True, text=True, env=environ, cwd=tmp_path, check=False
        )
        assert (done.returncode, done.stderr) == (0, "")
        assert "ran the wrong file" not in done.stdout


def test_another_python_in_the_checkout_finds_no_package_of_ours_but_octavo() -> None:
    """A folder without __init__.py never comes before a package, and transformers takes it for none."""
    for name in ("protocol", "gateway", "scheduler", "executor", "kernels", "bench"):
        assert not (ROOT / name / "__init__.py").exists()
        assert (ROOT / "octavo" / name).samefile(ROOT / name)


def test_the_package_alone_loads_nothing_heavy() -> None:
    code = "import sys, octavo; print({'torch', 'octavo.gateway', 'zmq', 'tqdm'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
