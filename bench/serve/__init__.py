"""`octavo bench serve`: loads a server of OpenAI's API, or compares what was measured."""

import argparse
import asyncio
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from octavo.bench.machine import this_place
from octavo.bench.serve.client import Server
from octavo.bench.serve.compare import by_work, markdown
from octavo.bench.serve.dataset import named, read_dataset
from octavo.bench.serve.flags import COMPARING, add_flags, read_work
from octavo.bench.serve.measure import Times, measure
from octavo.bench.serve.plot import plot_comparison, plot_result
from octavo.bench.serve.requests import Request
from octavo.bench.serve.results import FORMAT, Result, median_figures, read_result, write_bytes, write_result
from octavo.bench.serve.table import format_result
from octavo.bench.serve.work import Work
from octavo.cli import INTERRUPTED
from octavo.commands.flags import read_quiet_config
from octavo.protocol.config import ConfigError
from octavo.protocol.process import begin_log

SUMMARY = (
    "Load a running server with streamed requests and show throughput and latency. The exit status is 1 if a request"
    " failed. Flags have the names of `vllm bench serve` where they mean the same."
)


def describe(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=run)
    add_flags(parser)


def run(flags: Mapping[str, Any]) -> int:
    if "compare" in flags:
        return _compare(flags)
    work, dataset = _with_dataset(read_work(flags), flags)
    server = Server(_base_url(flags), _api_key(flags), flags.get("timeout_s", Server._field_defaults["timeout_s"]))
    times = Times(flags.get("num_warmups", Times().num_warmups), flags.get("repeat", Times().num_runs))
    targets_ms = flags.get("goodput", {})
    measured = asyncio.run(
        measure(server, work, model=flags.get("model"), dataset=dataset, times=times, targets_ms=targets_ms)
    )
    result = Result(
        format=FORMAT,
        label=flags.get("label", measured.model),
        name=work.name,
        work=work,
        server={"base_url": server.base_url, "model": measured.model},
        targets_ms=targets_ms,
        place=this_place(),
        median=median_figures([each.figures for each in measured.runs]),
        runs=measured.runs,
    )
    _show(result, flags)
    if measured.was_interrupted:
        return INTERRUPTED
    return 1 if result.num_failed else 0


def _with_dataset(work: Work, flags: Mapping[str, Any]) -> tuple[Work, Sequence[Request] | None]:
    """Return `work` with as many prompts as are asked of its dataset, and these; entries of no use are named."""
    if work.dataset is None:
        return work, None
    dataset = read_dataset(Path(work.dataset), work.endpoint, int(work.output_len))
    if dataset.problems:
        print(f"{len(dataset.problems)} entries are left out: {named(dataset.problems)}", file=sys.stderr)
    num_prompts = flags.get("num_prompts", len(dataset.requests))
    if num_prompts > len(dataset.requests):
        raise ConfigError(f"--num-prompts {num_prompts} is more than the {len(dataset.requests)} of {work.dataset}")
    return msgspec.structs.replace(work, num_prompts=num_prompts), dataset.requests[:num_prompts]


def _base_url(flags: Mapping[str, Any]) -> str:
    url = str(flags.get("base_url", "http://127.0.0.1:8000"))
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"--base-url {url} has to begin with http:// or https://")
    return url.rstrip("/").removesuffix("/v1")


def _api_key(flags: Mapping[str, Any]) -> str | None:
    """Return the key that is given, or the first of OCTAVO_API_KEY."""
    if "api_key" in flags:
        return str(flags["api_key"])
    config = read_quiet_config({})
    begin_log("octavo", config)
    return next(iter(config.api_key), None)


def _show(result: Result, flags: Mapping[str, Any]) -> None:
    print(format_result(result))
    if "json" in flags:
        write_result(flags["json"], result)
    if "plot" in flags:
        write_bytes(flags["plot"], plot_result(result), "--plot")


def _compare(flags: Mapping[str, Any]) -> int:
    if others := [name for name in flags if name not in COMPARING]:
        raise ConfigError(
            f"--{others[0].replace('_', '-')} is nothing that --compare does: it reads results, and --plot"
        )
    works = by_work([read_result(path) for path in flags["compare"]])
    print(markdown(works))
    if "plot" in flags:
        write_bytes(flags["plot"], plot_comparison(works), "--plot")
    return 0
