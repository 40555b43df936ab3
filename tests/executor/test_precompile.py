"""What a set-up compiles ahead is all that the demo's first start would have compiled."""

import os
import re
import subprocess
import sys
from pathlib import Path

import torch

from octavo.executor.start.precompile import compilation_for_demo
from octavo.kernels import cpu
from octavo.models.resolve import resolve_model

ROOT = Path(__file__).parents[2]

START = """
import sys
import octavo.kernels.choice
from numba.core import event
from octavo.executor.start.startup import start_executor
from octavo.protocol.config import Config

with event.install_recorder("numba:run_pass") as passes:
    start_executor(Config(model=sys.argv[1], kv_cache_memory_bytes=2**22, max_model_len=64, attention_backend="cpu"))
print(len(passes.buffer))
"""


def test_the_demo_has_nothing_left_to_compile() -> None:
    """Whatever the user's cache has: both say which of its files they read or wrote."""
    ahead = _run("-m", "octavo.executor.start.precompile")
    start = _run("-c", START, str(resolve_model(None).directory))
    assert start.endswith("\n0\n")
    assert set() < _kernels(start) <= _kernels(ahead)


def test_kernels_for_few_bits_are_compiled_where_plain_weights_need_none() -> None:
    """oneDNN multiplies plain weights of float32 everywhere, and those of bfloat16 on some CPUs."""
    names = [name for name, _ in compilation_for_demo(cpu, torch.float32).calls]
    assert {"program", "panel linear"} <= set(names)


def _kernels(said: str) -> set[str]:
    return set(re.findall(r"^\[cache\] data (?:loaded from|saved to) '(.+)'$", said, re.MULTILINE))


def _run(*arguments: str) -> str:
    command = [sys.executable, *arguments]
    environ = os.environ | {"NUMBA_DEBUG_CACHE": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, check=True, timeout=280)
    return done.stdout
