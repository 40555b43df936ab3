"""The `octavo` command: finds the typed command and runs its module in `octavo.commands`."""

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

from octavo import __version__
from octavo.errors import ChildRefusedError, CommandError, GenerationError, LaunchError, ModelError
from octavo.protocol.config import ConfigError
from octavo.protocol.extras import MissingExtraError, require_extras
from octavo.protocol.process import ArgumentParser, know_home, paragraph
from octavo.streams import OutputEndedError, open_standard_streams

INTERRUPTED = 130  # a shell's exit status for a process that SIGINT ended
DESCRIPTION = """Octavo serves large language models over an OpenAI-compatible API.

  octavo serve                           serve the demo model on http://127.0.0.1:8000
  octavo serve Qwen/Qwen3-0.6B           serve a model of the Hugging Face hub
  octavo serve ./my-model --port 9000    serve a directory
  octavo pull Qwen/Qwen3-0.6B            download and convert, without serving
  octavo chat                            talk to the model that is served
  octavo generate MODEL --input-path prompts.txt --output-path results.txt
"""


class Command(NamedTuple):
    summary: str
    extras: tuple[str, ...] = ()  # whose packages its module or its processes import


COMMANDS = {
    "serve": Command("serve a model", ("gateway", "executor")),
    "pull": Command("download and convert a model", ("gateway",)),
    "generate": Command("generate for a file of prompts", ("gateway", "executor")),
    "chat": Command("talk to a model in the terminal", ("gateway",)),
    "complete": Command("complete text in the terminal", ("gateway",)),
    "bench": Command("measure a server, or a part of it"),  # each measurement has its own extras
    "env": Command("show what a bug report needs"),
    "keys": Command("make the keys of links between machines"),
    "supervise": Command("keep one of the processes running"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status: 0 done, 1 failed, 2 wrong arguments or settings."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    know_home()
    try:
        try:
            return _run(arguments)
        finally:
            sys.stdout.flush()
    except OutputEndedError:
        return 0
    except ChildRefusedError:
        return 1
    except (CommandError, GenerationError, LaunchError, MissingExtraError, ModelError) as error:
        print(f"octavo: {paragraph(error)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return INTERRUPTED


def program(argv: Sequence[str] | None = None) -> NoReturn:
    """Run `main` and end the process. After an interruption it waits for no thread, such as a download's."""
    open_standard_streams()
    status = main(argv)
    if status == INTERRUPTED:
        os._exit(status)
    sys.exit(status)


def _run(arguments: Sequence[str]) -> int:
    parser = build_parser(*arguments[:1])
    if not arguments:
        parser.print_help(sys.stderr)
        return 2
    flags: dict[str, Any] = vars(parser.parse_args(arguments))
    run = flags.pop("run")
    try:
        return int(run(flags))
    except ConfigError as error:
        parser.error(str(error))


def build_parser(typed: str = "") -> ArgumentParser:
    """Return the parser of all commands, with the flags of the `typed` command.

    The modules of other commands are not imported: they may need packages that are not installed. Raises
    MissingExtraError if the typed command needs such a package.
    """
    parser = ArgumentParser(
        prog="octavo", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-v", "--version", action="version", version=__version__)
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for name, command in COMMANDS.items():
        command_parser = commands.add_parser(name, help=command.summary)
        if name == typed:
            require_extras(f"octavo {name}", *command.extras)
            importlib.import_module(f"octavo.commands.{name}").describe(command_parser)
    return parser
