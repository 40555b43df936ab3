"""The start that all three processes share: read the configuration, set up logging, end with the parent.

On SIGQUIT a process prints the stacks of all its threads and goes on.
"""

import argparse
import faulthandler
import logging
import os
import pwd
import signal
import socket
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from octavo.protocol.config import FIELDS, Config, ConfigError
from octavo.protocol.lifeline import LIFELINE_FLAG, Heart
from octavo.protocol.settings.flags import add_flags
from octavo.protocol.settings.foreign import say_what_has_no_effect
from octavo.protocol.settings.loading import load_config, refuse_foreign_keys
from octavo.protocol.settings.suggestions import setting_suggestion

# Packages that log at the level asked for. Libraries log from WARNING on, unless that level is debug.
OURS = ("__main__", "octavo")
CONTROLS = dict.fromkeys((*range(32), *range(127, 160)), "\ufffd")  # characters that move a cursor, or worse
REFUSED = 2  # exit status of a process that printed, in one paragraph, why it does not start
PROGRAM = "python -m octavo."  # begins that paragraph; the process's name and a colon follow


class ArgumentParser(argparse.ArgumentParser):
    """An argparse that answers an unknown flag with the nearest known one, and that allows no shortened flags."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"allow_abbrev": False, **options})

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        values, unknown = super().parse_known_args(args, namespace)
        if unknown:
            flag = unknown[0].split("=")[0]
            self.error(f"unknown argument {flag}{setting_suggestion(flag, self._option_string_actions)}")
        return values, unknown

    def _get_option_tuples(self, option_string: str) -> list[Any]:
        return []  # otherwise argparse takes -t, another server's number of threads, for a short -tp

    def error(self, message: str) -> NoReturn:
        self.exit(REFUSED, f"{self.prog}: {paragraph(message)}\n")


def start_process(
    name: str, description: str, fields: Sequence[str], argv: Sequence[str] | None = None
) -> tuple[Config, Heart]:
    """Return the Config of this process's environment and flags, with logging set up and the parent watched.

    The process has flags for the `fields` that it reads; variables may set other fields, which are for its peers. The
    loop that does the process's work must call `beat` of the Heart. A wrong setting ends the process with one line and
    status 2.
    """
    know_home()
    parser = ArgumentParser(prog=f"{PROGRAM}{name}", description=description)
    add_flags(parser, (*fields, "log_level"))
    parser.add_argument(LIFELINE_FLAG, type=int, help=argparse.SUPPRESS)
    flags = vars(parser.parse_args(argv))
    lifeline = flags.pop("lifeline_fd")
    try:
        config = load_config(os.environ, flags)
        if "api_key" in fields:
            refuse_foreign_keys(config, os.environ)
    except ConfigError as error:
        parser.error(str(error))
    begin_log(f"{name} {config.rank}" if config.rank else name, config, has_parent=lifeline is not None)
    faulthandler.register(signal.SIGQUIT)
    heart = inherited_heart(lifeline)
    heart.end_with_parent()
    return config, heart


def know_home() -> None:
    """Set HOME to / for this process and its children if the user has no home, like an arbitrary uid in a container.

    Container engines set the same. Code that writes there handles the error.
    """
    if "HOME" not in os.environ:
        try:
            pwd.getpwuid(os.getuid())
        except KeyError:
            os.environ["HOME"] = "/"


def inherited_heart(fd: int | None) -> Heart:
    """Return this process's end of the inherited lifeline, or a Heart to which nobody listens."""
    if fd is None:
        return Heart()
    lifeline = socket.socket(fileno=fd)
    lifeline.set_inheritable(False)  # a child's copy would outlive this process
    return Heart(lifeline)


def refuse(name: str, reason: Exception | str) -> int:
    """Print in one paragraph why the process does not start; return the exit status."""
    print(f"{PROGRAM}{name}: {paragraph(reason)}", file=sys.stderr)
    return REFUSED


def paragraph(reason: Exception | str) -> str:
    """Return the reason as one line that is safe to print: a stranger's words in it cannot control a terminal."""
    return " ".join(str(reason).split()).translate(CONTROLS) or type(reason).__name__


class HarmlessFormatter(logging.Formatter):
    """Makes records safe to print: a stranger's words in one cannot control a terminal."""

    def format(self, record: logging.LogRecord) -> str:
        return "\n".join(line.translate(CONTROLS) for line in super().format(record).split("\n"))


def begin_log(name: str, config: Config, *, has_parent: bool = False) -> None:
    """Set up the log of a process or command, and say which variables have no effect, unless a parent says so."""
    configure_logging(name, config.log_level)
    if not has_parent:
        say_what_has_no_effect(os.environ, FIELDS)


def configure_logging(name: str, level: str) -> None:
    """Log to stderr, each line with the time and the process's name; libraries log below WARNING only at `debug`."""
    least = logging.getLevelNamesMapping()[level.upper()]
    for package in OURS:
        logging.getLogger(package).setLevel(least)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(HarmlessFormatter(f"%(asctime)s %(levelname).1s {name}: %(message)s", "%H:%M:%S"))
    level_of_others = least if least == logging.DEBUG else max(least, logging.WARNING)
    logging.basicConfig(level=level_of_others, handlers=[handler])
