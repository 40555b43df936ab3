"""Results as JSON: what was measured, how, and where."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from octavo.bench.machine import this_place


def write_results(path: Path, bench: str, flags: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> None:
    """Write the rows that `octavo bench BENCH` measured, with its flags, to `path`."""
    asked = {name: value for name, value in flags.items() if name != "json"}
    results = {"bench": bench, "flags": asked, "rows": rows, "place": this_place()}
    path.write_bytes(msgspec.json.format(msgspec.json.encode(results)) + b"\n")
