"""`python -m tests.fakes.loading_process DIRECTORY`: print by how many bytes loading a model makes a process grow."""

import subprocess
import sys
from pathlib import Path

from octavo.kernels import cpu  # before torch: one OpenMP runtime

# isort: split
import torch

from octavo.executor.models import LoadPlan, load_model, read_model_config


def loading_bytes(directory: Path) -> int:
    """Return by how much a process of its own grows when it loads a model."""
    command = [sys.executable, "-m", "tests.fakes.loading_process", str(directory)]
    root = Path(__file__).parents[2]
    return int(subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout)


def _grown_bytes(directory: Path) -> int:
    config = read_model_config(directory)
    before = _anonymous_bytes()
    model = load_model(LoadPlan(directory, config, torch.float32, max_model_len=64, backend=cpu, progress=False))
    grown = _anonymous_bytes() - before
    del model
    return grown


def _anonymous_bytes() -> int:
    """Return the resident memory that is no file's."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


if __name__ == "__main__":
    print(_grown_bytes(Path(sys.argv[1])))
