"""`octavo supervise`: keeps one process running, also as process 1 of a container."""

import argparse
import sys
from collections.abc import Mapping
from typing import Any

from octavo.commands.flags import read_config
from octavo.protocol.process import begin_log
from octavo.protocol.settings.flags import add_flags
from octavo.serving.processes import STOP_GRACE_S
from octavo.serving.supervise import supervise

DESCRIPTION = (
    "Run one of Octavo's processes, and start it again when it ends or hangs. The exit status 2 of the process (its"
    " settings or model cannot be used) ends this too. SIGTERM and SIGINT are passed on. As process 1 of a container it"
    " also reaps orphaned processes."
)


def describe(parser: argparse.ArgumentParser) -> None:
    parser.usage = (
        "octavo supervise [--hang-timeout-s X] [--all-ranks] -- python -m octavo.scheduler [--flag VALUE ...]"
    )
    parser.description = DESCRIPTION
    parser.set_defaults(run=run)
    add_flags(parser, ("hang_timeout_s", "log_level"))
    parser.add_argument(
        "--all-ranks",
        action="store_true",
        help="COMMAND is an executor's: run it OCTAVO_TENSOR_PARALLEL_SIZE times, as its ranks",
    )
    parser.add_argument("program", metavar="COMMAND", nargs="+", help="python -m octavo.gateway, scheduler or executor")


def run(flags: Mapping[str, Any]) -> int:
    all_ranks = flags["all_ranks"]
    config = read_config({name: value for name, value in flags.items() if name != "all_ranks"})
    begin_log("supervise", config)
    # Every process gets the time that a gateway has for its streams: OCTAVO_SHUTDOWN_TIMEOUT_S sets it for both.
    program = flags["program"]
    if program[0] in ("python", "python3"):
        program = [sys.executable, *program[1:]]  # the interpreter that has Octavo
    return supervise(
        program,
        config.hang_timeout_s,
        STOP_GRACE_S + config.shutdown_timeout_s,
        num_ranks=config.tensor_parallel_size if all_ranks else 1,
    )
