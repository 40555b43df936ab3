"""What the three processes do alike before their own work: read the configuration, log, end with their parent."""

import argparse
import logging
import os
import signal
import sys
import threading
from collections.abc import Sequence
from typing import Any, NoReturn

from protocol.config import Config, ConfigError, add_flags, load_config, nearest

LIFELINE_FLAG = "--lifeline-fd"
# The packages whose messages a person sees at every level; libraries speak from WARNING on, unless all is asked for.
OURS = ("__main__", "executor", "gateway", "kernels", "octavo", "protocol", "scheduler")
REFUSED = 2  # exit status of a process that has said, in one paragraph, why it does not start
GRACE_S = 10.0  # between being asked to end because the parent is gone, and ending


class ArgumentParser(argparse.ArgumentParser):
    """argparse, but an unknown flag names the nearest known one, and no flag may be shortened."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"allow_abbrev": False, **options})

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        values, unknown = super().parse_known_args(args, namespace)
        if unknown:
            flag = unknown[0].split("=")[0]
            self.error(f"unknown argument {flag}{nearest(flag, self._option_string_actions)}")
        return values, unknown

    def error(self, message: str) -> NoReturn:
        self.exit(REFUSED, f"{self.prog}: {message}\n")


def start_process(name: str, description: str, fields: Sequence[str], argv: Sequence[str] | None = None) -> Config:
    """Return the Config of this process's environment and flags, with logging set up and the parent watched.

    It has flags for the `fields` that it reads; variables may name all others too, which are for its peers. Ends the
    process with status 2 and one line if a setting is wrong.
    """
    parser = ArgumentParser(prog=f"python -m {name}", description=description)
    add_flags(parser, (*fields, "log_level"))
    parser.add_argument(LIFELINE_FLAG, type=int, help=argparse.SUPPRESS)
    flags = vars(parser.parse_args(argv))
    lifeline = flags.pop("lifeline_fd")
    try:
        config = load_config(os.environ, flags)
    except ConfigError as error:
        parser.error(str(error))
    configure_logging(f"{name} {config.rank}" if config.rank else name, config.log_level)
    if lifeline is not None:
        threading.Thread(target=_end_with_parent, args=(lifeline,), name="lifeline", daemon=True).start()
    return config


def refuse(name: str, reason: Exception | str) -> int:
    """Say in one paragraph why the process does not start, and return its exit status."""
    print(f"python -m {name}: {paragraph(reason)}", file=sys.stderr)
    return REFUSED


def paragraph(reason: Exception | str) -> str:
    """Return what is wrong as one line, in words for an operator."""
    if isinstance(reason, ModuleNotFoundError) and reason.name:
        return (
            f"the Python package {reason.name.partition('.')[0]} is missing: a base installation has the scheduler "
            'alone. Add the rest: pip install "octavo[gateway,executor]"'
        )
    return " ".join(str(reason).split()) or type(reason).__name__


def configure_logging(name: str, level: str) -> None:
    """Log to stderr, each line with the time and which process speaks; what libraries note only at `debug`."""
    least = logging.getLevelNamesMapping()[level.upper()]
    for package in OURS:
        logging.getLogger(package).setLevel(least)
    logging.basicConfig(
        stream=sys.stderr,
        level=least if least == logging.DEBUG else max(least, logging.WARNING),
        format=f"%(asctime)s %(levelname).1s {name}: %(message)s",
        datefmt="%H:%M:%S",
    )


def _end_with_parent(lifeline: int) -> None:
    """Wait until the parent's end of the pipe is closed, which is when it died; end in order, or else at once."""
    while os.read(lifeline, 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    threading.Event().wait(GRACE_S)
    os._exit(1)
