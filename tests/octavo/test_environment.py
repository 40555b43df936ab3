"""`octavo env`: what a bug report needs, without secrets, also where torch is missing."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from octavo.kernels import cpu  # before torch

# isort: split
import torch

from octavo import __version__
from octavo.cli import main
from octavo.executor.start import environment


def test_the_report_names_what_a_bug_depends_on_and_no_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "octavo" / "models" / "mine"
    model.mkdir(parents=True)
    (model / "model.safetensors").write_bytes(bytes(2_500_000))
    secrets = {"OCTAVO_API_KEY": "sesame-1", "HF_TOKEN": "sesame-2", "https_proxy": "http://user:sesame-3@proxy:1"}
    secrets |= {
        "http_proxy": "http://me:p@sesame/4@proxy:2",
        "all_proxy": "me:sesame-5@proxy:3",
        "HF_ENDPOINT": "http://h/a",
    }
    for name, value in {**secrets, "OCTAVO_MAX_NUM_SEQ": "8", "XDG_CACHE_HOME": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    assert main(["env", str(model)]) == 0
    shown = capsys.readouterr().out
    assert "sesame" not in shown
    lines = {" ".join(line.split()) for line in shown.splitlines()}
    assert {
        f"version {__version__}",
        "OCTAVO_API_KEY (set, not shown)",
        "HF_TOKEN (set, not shown)",
        "https_proxy http://...@proxy:1",
        "http_proxy http://...@proxy:2",
        "all_proxy ...@proxy:3",
        "HF_ENDPOINT http://h/a",
        "OCTAVO_MAX_NUM_SEQ 8",
        "mine 2.5 MB",
        "model.safetensors 2,500,000 bytes",
    } <= lines
    titles = {line.rstrip(":") for line in shown.splitlines() if line and not line.startswith(" ")}
    assert {"Packages", "System", "CPU and memory", "GPUs", "What computes"} <= titles
    assert [line for line in lines if line.startswith("backends ") and "reference (on " in line]


def test_the_report_says_how_bfloat16_weights_are_multiplied(capsys: pytest.CaptureFixture[str]) -> None:
    """In the words of the layer that holds them: oneDNN takes bfloat16 also where it only emulates it."""
    held = cpu.pack_linear(torch.zeros(32, 32, dtype=torch.bfloat16)).form.removeprefix("bfloat16 weights, ")
    environment.main()
    said = json.loads(capsys.readouterr().out)["bfloat16 on the CPU"]
    assert said.split(" (")[0] == held.removesuffix(" prepacked")


def test_without_torch_the_rest_is_found() -> None:
    program = "import sys; sys.modules['torch'] = None; from octavo.executor.start.environment import main; main()"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    assert found["backends"].startswith("none: ")
    assert "threads of the model" in found
