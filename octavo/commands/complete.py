"""`octavo complete`: a model continues a text, on a running server or on a server for this command alone."""

import argparse
from collections.abc import Mapping
from typing import Any

from octavo.commands.chat import add_terminal_flags, connected, lines


def describe(parser: argparse.ArgumentParser) -> None:
    parser.usage = "octavo complete [MODEL] [--url URL] [--flag VALUE ...]"
    parser.description = (
        "Let a model continue the typed text, without a chat template. Ctrl-C stops an answer, Ctrl-D ends. Each line"
        " of a pipe is a text of its own."
    )
    parser.set_defaults(run=run)
    add_terminal_flags(parser)


def run(flags: Mapping[str, Any]) -> int:
    with connected(flags) as terminal:
        terminal.complete(lines(flags))
    return 0
