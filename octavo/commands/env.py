"""`octavo env`: shows facts about the machine and the installation, for a bug report."""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from octavo.environment import sections


def describe(parser: argparse.ArgumentParser) -> None:
    parser.description = "Show this machine and installation, for a bug report. Keys and tokens are hidden."
    parser.set_defaults(run=run)
    parser.add_argument("path", metavar="MODEL", nargs="?", type=Path, help="a directory or file to be listed as well")


def run(flags: Mapping[str, Any]) -> int:
    for title, section in sections(flags["path"]):
        print(f"{title}:", flush=True)
        width = min(30, max(map(len, section), default=0))
        for name, value in section.items():
            print(f"  {name:<{width}}  {value}", flush=True)
        print()
    return 0
