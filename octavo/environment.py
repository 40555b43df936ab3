"""Facts about a machine and an installation for a bug report, as sections of names and texts."""

import importlib.metadata
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from octavo.models.cache import models_directory
from octavo.protocol.version import __version__

Section = Mapping[str, str]

PACKAGES = (
    "torch",
    "triton",
    "transformers",
    "tokenizers",
    "numba",
    "llvmlite",
    "numpy",
    "safetensors",
    "gguf",
    "huggingface_hub",
    "msgspec",
    "pyzmq",
    "starlette",
    "uvicorn",
    "httpx",
)
VARIABLES = re.compile(
    r"(OCTAVO|HF|HUGGING|TRANSFORMERS|TORCH|CUDA|NVIDIA|ROCR?|HIP|NCCL|GLOO|OMP|GOMP|KMP|MKL|NUMBA|TRITON)_.*"
    r"|XDG_(CACHE_HOME|RUNTIME_DIR)|PYTHONPATH|LD_LIBRARY_PATH|LD_PRELOAD|(https?|no|all)_proxy",
    re.IGNORECASE,
)
SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL", re.IGNORECASE)
# Up to the last @: a password may contain @ and slashes. A proxy may be given without its scheme.
PASSWORD_IN_URL = re.compile(r"((?<=://)|^(?=[^/\s:]+:[^/\s]*@))\S*(?=@)")
# Instruction sets that matrix products and attention may use.
INSTRUCTIONS = re.compile(r"avx\w*|amx\w*|fma|f16c|sse4_2|asimd\w*|sve\w*|bf16|i8mm")
TOOL_TIMEOUT_S = 10
CHILD_TIMEOUT_S = 120
GIB, MB = 1 << 30, 10**6


def sections(model: Path | None = None) -> Iterator[tuple[str, Section]]:
    """Yield the sections by title, the slowest last. `model` is a directory or file to list as well."""
    yield "Octavo", _octavo()
    yield "Packages", {name: _version(name) for name in PACKAGES}
    yield "System", _system()
    yield "CPU and memory", _cpu()
    yield "Variables", _variables(os.environ)
    yield "Models in the cache", _cached_models()
    if model is not None:
        yield f"Files of {model}", _files(model)
    yield "GPUs", _gpus()
    yield "What computes", _computes()


def _octavo() -> Section:
    return {
        "version": __version__,
        "installed in": str(Path(__file__).parents[1]),
        "Python": f"{platform.python_version()} ({sys.executable})",
    }


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _system() -> Section:
    try:
        name = platform.freedesktop_os_release().get("PRETTY_NAME", "")
    except OSError:
        name = platform.platform()
    inside = any(Path(mark).exists() for mark in ("/.dockerenv", "/run/.containerenv"))
    return {
        "system": name,
        "kernel": f"{platform.release()} {platform.machine()}",
        "C library": " ".join(platform.libc_ver()) or "unknown",
        "container": "yes" if inside or "KUBERNETES_SERVICE_HOST" in os.environ else "not that one can tell",
    }


def _cpu() -> Section:
    cpu, memory = _table("/proc/cpuinfo"), _table("/proc/meminfo")
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    flags = (cpu.get("flags") or cpu.get("Features") or "").split()
    return {
        "CPU": cpu.get("model name") or platform.processor() or "unknown",
        "CPUs": f"{os.cpu_count()}, of which this process may use {usable}",
        "instructions": " ".join(sorted(flag for flag in flags if INSTRUCTIONS.fullmatch(flag))) or "unknown",
        "memory": f"{_gib(memory, 'MemTotal')} in all, {_gib(memory, 'MemAvailable')} available",
    }


def _table(path: str) -> dict[str, str]:
    """Return the first value of each name in a file of lines such as "model name : X"."""
    found: dict[str, str] = {}
    try:
        lines = Path(path).read_text(errors="replace").splitlines()
    except OSError:
        return found
    for line in lines:
        name, _, value = line.partition(":")
        found.setdefault(name.strip(), value.strip())
    return found


def _gib(table: Mapping[str, str], name: str) -> str:
    number = table.get(name, "").split()
    return f"{int(number[0]) * 1024 / GIB:.1f} GiB" if number else "unknown"


def _variables(environ: Mapping[str, str]) -> Section:
    named = {name: value for name, value in sorted(environ.items()) if VARIABLES.fullmatch(name)}
    return {
        name: "(set, not shown)" if SECRET.search(name) else PASSWORD_IN_URL.sub("...", value)
        for name, value in named.items()
    }


def _cached_models() -> Section:
    try:
        return _models_in(models_directory())
    except OSError as error:
        return {str(error.filename): f"cannot be looked at: {error.strerror}"}


def _models_in(directory: Path) -> Section:
    named = {str(directory): "not there yet"}
    if directory.is_dir():
        found = sorted(path for path in directory.iterdir() if not path.name.startswith("."))
        free_bytes = shutil.disk_usage(directory).free
        named = {str(directory): f"{len(found)} models, {free_bytes / MB:,.0f} MB free on the disk"}
        named |= {path.name: _size(path) for path in found}
    hub = _hub_cache()
    return named | {str(hub): _size(hub) if hub.is_dir() else "not there yet"}


def _hub_cache() -> Path:
    """Return the directory of huggingface_hub's downloads, according to its variables."""
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    return Path(os.environ.get("HF_HUB_CACHE") or Path(home, "hub")).expanduser()


def _size(path: Path) -> str:
    return f"{sum(size for _, size in _walk(path)) / MB:,.1f} MB"


def _files(path: Path) -> Section:
    if not path.exists():
        return {str(path): "not there"}
    return {name: f"{size:,} bytes" for name, size in sorted(_walk(path))}


def _walk(path: Path) -> Iterator[tuple[str, int]]:
    """Yield the files in `path`, or `path` itself, with their bytes. Of links, only `path` is followed."""
    if path.is_file():
        yield path.name, path.stat().st_size
        return
    for folder, _, names in os.walk(path):
        for name in names:
            file = Path(folder, name)
            try:
                yield str(file.relative_to(path)), file.lstat().st_size
            except OSError:  # removed meanwhile
                continue


def _gpus() -> Section:
    """Return the output of the drivers' own tools, which work without torch."""
    queried = "--query-gpu=name,memory.total,driver_version,compute_cap"
    nvidia = _output(["nvidia-smi", queried, "--format=csv,noheader"])
    amd = _output(["rocm-smi", "--showproductname", "--showdriverversion", "--csv"])
    return {"nvidia-smi": nvidia, "rocm-smi": amd}


def _output(command: list[str]) -> str:
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=TOOL_TIMEOUT_S, check=False
        )
    except FileNotFoundError:
        return "not installed"
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"failed: {error}"
    return "; ".join((done.stdout.strip() or done.stderr.strip()).splitlines()) or "says nothing"


def _computes() -> Section:
    """Return the findings of a child process, which may import torch; the command itself never does."""
    command = [sys.executable, "-P", "-m", "octavo.executor.start.environment"]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=CHILD_TIMEOUT_S, check=False
        )
        found: dict[str, str] = json.loads(done.stdout)
    except subprocess.TimeoutExpired:
        return {"backends": f"no result within {CHILD_TIMEOUT_S} s"}
    except OSError as error:
        return {"backends": f"failed: {error}"}
    except json.JSONDecodeError:
        return {"backends": f"failed: {done.stderr.strip()[-1000:]}"}
    return found
