"""The flags of `octavo bench serve`, and the work that they describe."""

import argparse
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from octavo.bench.serve.lengths import parse_lengths
from octavo.bench.serve.results import TARGETS
from octavo.bench.serve.work import Work
from octavo.protocol.config import ConfigError

DEFAULT_DATASET_OUTPUT_LEN = 256
COMPARING = ("compare", "plot")
LENGTHS = "128, 64-256, normal:MEAN,SD or lognormal:MEAN,SD"
OF_RANDOM_PROMPTS = ("random_input_len", "random_output_len", "random_prefix_len", "num_prefixes")
ENDPOINTS = ("completions", "chat")


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Give `parser` all flags; one that is not typed is absent from what it reads."""
    for add in (_add_server, _add_load, _add_prompts, _add_results):
        add(parser)


def _add_server(parser: argparse.ArgumentParser) -> None:
    group = _Group(parser, "server")
    group.add("--base-url", metavar="URL", help="where the server is (http://127.0.0.1:8000)")
    group.add("--model", metavar="NAME", help="what to ask for (the first that the server has)")
    group.add("--api-key", metavar="KEY", help="sent as bearer token (the first of OCTAVO_API_KEY)")
    group.add("--endpoint", choices=ENDPOINTS, help="/v1/completions (default) or /v1/chat/completions")
    group.add("--timeout-s", type=positive_float, metavar="X", help="what one answer may take (600)")


def _add_load(parser: argparse.ArgumentParser) -> None:
    group = _Group(parser, "load")
    group.add("--num-prompts", type=positive_int, metavar="N", help="requests in a run (100; of a dataset: all)")
    group.add(
        "--max-concurrency",
        type=positive_int,
        metavar="N",
        help="requests under way at every moment; without this and --request-rate all are sent at once",
    )
    group.add(
        "--request-rate",
        type=positive_float,
        metavar="X",
        help="Poisson arrivals a second, however many are under way; inf sends all at once",
    )
    group.add("--num-warmups", type=whole_number, metavar="N", help="requests before anything is counted (1)")
    group.add("--repeat", type=positive_int, metavar="N", help="runs of the same work, of which medians are shown (1)")
    group.add("--seed", type=whole_number, metavar="N", help="of prompts, lengths and arrivals (0)")


def _add_prompts(parser: argparse.ArgumentParser) -> None:
    group = _Group(parser, "prompts", "Random common words, each about one token, unless there is a dataset.")
    group.add(
        *("--random-input-len", "--input-len"),
        type=lengths,
        metavar="LENGTHS",
        help=f"tokens of a prompt: {LENGTHS} (128)",
    )
    group.add(
        *("--random-output-len", "--output-len"),
        type=lengths,
        metavar="LENGTHS",
        help="tokens of an answer, likewise (64)",
    )
    group.add(
        *("--random-prefix-len", "--prefix-len"),
        type=whole_number,
        metavar="N",
        help="tokens before those, shared by all prompts (0)",
    )
    group.add("--num-prefixes", type=positive_int, metavar="N", help="different prefixes that take turns (1)")
    group.add(
        *("--dataset-path", "--dataset"),
        type=Path,
        metavar="FILE",
        help="ShareGPT's JSON array, or JSON lines, of conversations, messages or prompts (and max_tokens), in order",
    )
    group.add(
        "--sharegpt-output-len",
        type=positive_int,
        metavar="N",
        help=f"most tokens of an answer to a prompt of the dataset without max_tokens ({DEFAULT_DATASET_OUTPUT_LEN})",
    )
    group.add(
        "--ignore-eos",
        action=argparse.BooleanOptionalAction,
        help="have every answer as long as it may be (on for random words, off for a dataset)",
    )
    group.add("--temperature", type=not_negative, metavar="X", help="0 takes the likeliest token (0)")


def _add_results(parser: argparse.ArgumentParser) -> None:
    group = _Group(parser, "results")
    group.add(
        "--goodput",
        type=targets,
        metavar="TARGETS",
        help="count the requests that meet these, in milliseconds: ttft:500,tpot:50,e2el:5000, or some of them",
    )
    group.add("--label", metavar="TEXT", help="what the result is called, as in --compare (the model's name)")
    group.add("--json", type=Path, metavar="FILE", help="write figures, requests, work, machine and versions")
    group.add("--plot", type=Path, metavar="FILE", help="draw latencies and throughput, or what is compared, as PNG")
    group.add(
        "--compare",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="load nothing: show results that --json wrote side by side, with the first label's ratio to the others;"
        " of several with one label the median",
    )


class _Group:
    def __init__(self, parser: argparse.ArgumentParser, title: str, description: str | None = None) -> None:
        self._group = parser.add_argument_group(title, description)

    def add(self, *spellings: str, **options: Any) -> None:
        """Add a flag, known in the results and in messages by the first of its `spellings`."""
        self._group.add_argument(*spellings, default=argparse.SUPPRESS, **options)


def read_work(flags: Mapping[str, Any]) -> Work:
    """Return the work that `flags` describe. Raises ConfigError for some that do not go together."""
    if "max_concurrency" in flags and "request_rate" in flags:
        raise ConfigError("--max-concurrency and --request-rate are two ways to send requests: give one")
    if "num_prefixes" in flags and "random_prefix_len" not in flags:
        raise ConfigError("--num-prefixes needs --random-prefix-len")
    rate = flags.get("request_rate")
    asked = {
        name: flags[name]
        for name in ("num_prompts", "max_concurrency", "endpoint", "temperature", "seed")
        if name in flags
    }
    asked["request_rate"] = None if rate is None or math.isinf(rate) else rate
    asked["ignore_eos"] = flags.get("ignore_eos", "dataset_path" not in flags)
    return Work(**asked, **(_of_dataset(flags) if "dataset_path" in flags else _of_words(flags)))


def _of_dataset(flags: Mapping[str, Any]) -> dict[str, Any]:
    for name in OF_RANDOM_PROMPTS:
        if name in flags:
            raise ConfigError(f"--{name.replace('_', '-')} is for random prompts, not for those of --dataset-path")
    output_len = flags.get("sharegpt_output_len", DEFAULT_DATASET_OUTPUT_LEN)
    return {"dataset": str(flags["dataset_path"]), "output_len": str(output_len)}


def _of_words(flags: Mapping[str, Any]) -> dict[str, Any]:
    if "sharegpt_output_len" in flags:
        raise ConfigError("--sharegpt-output-len needs --dataset-path; for random prompts there is --random-output-len")
    given = {"num_prefixes": flags["num_prefixes"]} if "num_prefixes" in flags else {}
    for name in OF_RANDOM_PROMPTS[:3]:
        if name in flags:
            given[name.removeprefix("random_")] = flags[name]
    return given


def targets(text: str) -> dict[str, float]:
    """Return the milliseconds that a goodput allows, by name."""
    found = {}
    for part in text.split(","):
        name, _, limit = part.strip().partition(":")
        if name not in TARGETS:
            raise argparse.ArgumentTypeError(f"{part.strip()!r} is not one of {', '.join(TARGETS)}, with :MILLISECONDS")
        found[name] = positive_float(limit)
    return found


def lengths(text: str) -> str:
    try:
        return parse_lengths(text).text
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def positive_int(text: str) -> int:
    return int(_at_least(text, 1))


def whole_number(text: str) -> int:
    return int(_at_least(text, 0))


def positive_float(text: str) -> float:
    number = not_negative(text)
    if number == 0:
        raise argparse.ArgumentTypeError("it has to be above 0")
    return number


def not_negative(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not number >= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of at least 0")
    return number


def _at_least(text: str, least: int) -> int:
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least {least}")
    return int(text)
