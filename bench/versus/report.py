"""What came of a comparison, as one file of JSON, tables of Markdown and a plot."""

import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from octavo.bench.machine import Place
from octavo.bench.serve.compare import by_work, markdown
from octavo.bench.serve.plot import plot_comparison
from octavo.bench.serve.results import Result, write_bytes
from octavo.bench.versus.plan import Plan

GIB = 1 << 30


class Life(msgspec.Struct, frozen=True):
    """One life of a server: seconds from its start to its first token, and the most memory that it was seen with."""

    label: str
    round: int
    first_token_s: float
    pss_bytes: int


class Report(msgspec.Struct, frozen=True):
    place: Place
    plan: Plan
    lives: list[Life]
    results: list[Result]  # without their requests


def write_report(directory: Path, report: Report) -> None:
    """Write versus.json, versus.md and versus.png into `directory`. Raises CommandError."""
    flag = "--output-dir"
    write_bytes(directory / "versus.json", msgspec.json.format(msgspec.json.encode(report), indent=1), flag)
    write_bytes(directory / "versus.md", (report_markdown(report) + "\n").encode(), flag)
    if works := by_work(report.results):
        write_bytes(directory / "versus.png", plot_comparison(works), flag)


def report_markdown(report: Report) -> str:
    place = report.place
    cpu = f"{place.cpu['CPU']}; CPUs: {place.cpu['CPUs']}; memory: {place.cpu['memory']}"
    parts = [f"{cpu}; Octavo {place.octavo}; {place.date}", markdown(by_work(report.results))]
    return "\n\n".join([*parts, "\n".join(_lives(report.lives)), *_reservations(report.results)])


def _reservations(results: Sequence[Result]) -> Iterator[str]:
    """Yield what a reader of the tables has to know: requests that failed, and other work than was asked."""
    for result in results:
        for run in result.runs:
            for reason in (*(f"{count} failed: {each}" for each, count in run.failures.items()), *run.notes):
                yield f"* {result.label}, {result.name}: {reason}"


def _lives(lives: Sequence[Life]) -> Iterator[str]:
    yield "| server | start to first token, each time (s) | most memory, PSS (GiB) |"
    yield "|---|---:|---:|"
    for label in dict.fromkeys(life.label for life in lives):
        own = [life for life in lives if life.label == label]
        pss_gib = statistics.median(life.pss_bytes for life in own) / GIB
        yield f"| {label} | {', '.join(f'{life.first_token_s:.1f}' for life in own)} | {pss_gib:.2f} |"
