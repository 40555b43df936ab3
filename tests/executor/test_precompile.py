"""What a set-up compiles ahead is all that the demo's first start would have compiled."""

import subprocess
import sys
from pathlib import Path

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
    _run("-m", "octavo.executor.start.precompile")
    assert _run("-c", START, str(resolve_model(None).directory)) == "0\n"


def _run(*arguments: str) -> str:
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=180).stdout
