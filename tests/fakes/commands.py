"""`octavo` as a process of its own, with a tiny model to run, and what it leaves behind."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil

from tests.fakes.checkpoints import make_checkpoint
from tests.fakes.model_directories import VOCAB_SIZE, write_tiny_model

# What a tiny model needs, and starts fastest with.
ENGINE_FLAGS = ("--dtype", "float32", "--kv-cache-memory-bytes", "64MiB", "--max-num-seqs", "32")


def tiny_checkpoint(directory: Path) -> Path:
    """Write a random model with a tokenizer that spells text byte by byte, and return its directory."""
    write_tiny_model(directory)
    return make_checkpoint(directory, vocab_size=VOCAB_SIZE)


def start(module: str, *arguments: str, environ: dict[str, str] | None = None, **options: Any) -> Any:
    """Start `python -m module` with `arguments` and return the process, its standard streams as text."""
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    variables = {**os.environ, **(environ or {})}
    return subprocess.Popen([sys.executable, "-m", module, *arguments], env=variables, **{**pipes, **options})


def descendants(process: Any) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)
