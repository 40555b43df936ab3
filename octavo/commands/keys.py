"""`octavo keys`: makes the keys of tcp:// links, in a directory for each kind of process."""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from octavo.errors import CommandError
from octavo.protocol.link_keys import make_keys

DESCRIPTION = (
    "Make the keys that scheduler, gateways and executors need to speak by tcp:// (ZeroMQ CURVE). Each kind of process"
    " gets a directory, which goes to its machines alone: --link-keys-dir names it there. For other keys, remove these,"
    " make new ones, and restart all processes."
)


def describe(parser: argparse.ArgumentParser) -> None:
    parser.description = DESCRIPTION
    parser.set_defaults(run=run)
    parser.add_argument(
        "directory", metavar="DIR", type=Path, help="where to make the directories; nothing is replaced"
    )


def run(flags: Mapping[str, Any]) -> int:
    try:
        made = make_keys(flags["directory"])
    except OSError as error:
        raise CommandError(f"cannot make keys: {_words(error)}") from None
    for directory in made:
        print(f"{directory}  for the machines of: python -m octavo.{directory.name} --link-keys-dir {directory}")
    return 0


def _words(error: OSError) -> str:
    return f"{error.filename}: {error.strerror}" if error.filename else str(error)
