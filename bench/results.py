"""Results as JSON: what was measured, and on what."""

import importlib.metadata
import os
import platform
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from protocol import __version__

PACKAGES = ("msgspec", "pyzmq", "starlette", "tokenizers", "uvicorn", "uvloop")


def write_results(path: Path, bench: str, flags: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> None:
    """Write the rows that `octavo bench BENCH` measured, with its flags, to `path`."""
    asked = {name: value for name, value in flags.items() if name != "json"}
    results = {"bench": bench, "flags": asked, "rows": rows, **surroundings()}
    path.write_bytes(msgspec.json.format(msgspec.json.encode(results, enc_hook=str)) + b"\n")


def surroundings() -> dict[str, Any]:
    """Return the machine, the versions and the date."""
    return {
        "machine": {"cpu": _cpu_name(), "num_cores": len(os.sched_getaffinity(0)), "system": platform.platform()},
        "versions": {
            "octavo": __version__,
            "python": platform.python_version(),
            **{package: importlib.metadata.version(package) for package in PACKAGES},
        },
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
