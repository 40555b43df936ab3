"""`octavo bench step`: the executor alone, in this process, over batch and context, against the machine's floor."""

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from octavo.bench.step.settings import SETTINGS
from octavo.commands.flags import EPILOG, add_model, read_quiet_config, typed_settings
from octavo.errors import CommandError
from octavo.models.resolve import resolve_model_of
from octavo.protocol.config import ConfigError
from octavo.protocol.process import configure_logging
from octavo.protocol.settings.flags import add_flags

SUMMARY = "Time the executor alone, without sockets, over batch and context, against the floor of this machine's CPU."
PROFILED = (1, 8, 32)


def describe(parser: argparse.ArgumentParser) -> None:
    """Give the parser of `octavo bench step` its flags."""
    parser.usage = "octavo bench step [MODEL] [--flag VALUE ...]"
    parser.epilog = EPILOG
    parser.set_defaults(run=run)
    add_model(parser)
    group = parser.add_argument_group("what is measured")
    _add_numbers(group, "--batch", (1, 2, 4, 8, 16, 32, 64), 1, "sequences that decode together")
    _add_numbers(group, "--context", (128, 512, 2048, 8192), 2, "tokens that each of them grows to")
    _add_numbers(group, "--prefill", (128, 512, 2048), 2, "tokens of one prompt in a step")
    group.add_argument(
        "--profile",
        nargs="?",
        type=_numbers(1),
        const=PROFILED,
        default=(),
        metavar="N,N,...",
        help=f"show one decode step of so many sequences part by part (default, if it is given: {_show(PROFILED)}), at"
        " the first of the contexts",
    )
    group.add_argument("--repeats", type=_count, default=30, metavar="N", help="times of each step (default: 30)")
    group.add_argument(
        "--temperature", type=_temperature, default=0.0, metavar="T", help="of the sampling (default: 0)"
    )
    group.add_argument("--json", type=Path, metavar="FILE", help="write the results there as well")
    add_flags(parser.add_argument_group("model and machine"), SETTINGS)


def run(flags: Mapping[str, Any]) -> int:
    """Measure, print tables, perhaps write JSON; return the exit status."""
    config = read_quiet_config(typed_settings(flags))
    if config.tensor_parallel_size != 1:
        raise ConfigError("tensor_parallel_size: `octavo bench step` measures one executor of one process")
    if config.attention_backend not in ("auto", "cpu"):
        raise ConfigError(
            f"attention_backend {config.attention_backend}: `octavo bench step` measures the CPU; leave it out"
        )
    configure_logging("bench", config.log_level)
    resolved = resolve_model_of(config)
    # Only now, so that --help and a wrong setting do not wait for torch. Numba's OpenMP comes before torch's.
    import octavo.kernels.choice  # noqa: F401
    from octavo.bench.step.measure import Request, measure
    from octavo.bench.step.results import show
    from octavo.executor.start.startup import START_FAILURES

    request = Request(*(flags[name] for name in Request._fields))
    config = msgspec.structs.replace(config, model=str(resolved.directory), attention_backend="cpu")
    try:
        result = measure(config, resolved.served_name, request)
    except START_FAILURES as error:
        raise CommandError(str(error)) from error
    try:
        show(result, flags["json"])
    except OSError as error:
        raise CommandError(f"--json {error.filename} cannot be written: {error.strerror}") from None
    return 0


def _add_numbers(group: Any, flag: str, default: tuple[int, ...], least: int, shown: str) -> None:
    help_text = f"{shown} (default: {_show(default)})"
    group.add_argument(flag, type=_numbers(least), default=default, metavar="N,N,...", help=help_text)


def _numbers(least: int) -> Callable[[str], tuple[int, ...]]:
    """Return what reads a list of numbers, of which none is below `least`; an empty one is a way to measure none."""

    def numbers(text: str) -> tuple[int, ...]:
        return tuple(_at_least(least, number) for number in text.split(",") if number)

    return numbers


def _count(text: str) -> int:
    return _at_least(1, text)


def _temperature(text: str) -> float:
    temperature = float(text)  # argparse says of a ValueError what was typed
    if not 0 <= temperature <= 2:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and 2")
    return temperature


def _at_least(least: int, text: str) -> int:
    if not text.strip().isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"{text} is no number of {least} or more")
    return int(text)


def _show(numbers: Sequence[int]) -> str:
    return ",".join(map(str, numbers))
