"""`python -m octavo.bench.versus --server NAME=COMMAND --server NAME=COMMAND --output-dir DIRECTORY`."""

import argparse
import asyncio
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from octavo.bench.machine import this_place
from octavo.bench.serve.flags import positive_float, positive_int
from octavo.bench.serve.measure import measure
from octavo.bench.serve.results import FORMAT, Result
from octavo.bench.serve.table import format_result
from octavo.bench.serve.work import Work
from octavo.bench.versus.plan import ROWS, Plan, ServerPlan, read_plan, typed_plan, typed_work
from octavo.bench.versus.process import ServerProcess, started
from octavo.bench.versus.report import Life, Report, report_markdown, write_report
from octavo.cli import INTERRUPTED
from octavo.errors import CommandError
from octavo.protocol.process import ArgumentParser, paragraph

ALL = ""  # names the rows that are for every server


def main(argv: Sequence[str] | None = None) -> int:
    """Return the exit status: 1 if a server does not start or a request failed."""
    parser = build_parser()
    options = parser.parse_args(argv)
    try:
        report = compare(options)
    except CommandError as error:
        print(f"{parser.prog}: {paragraph(error)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return INTERRUPTED
    print(report_markdown(report))
    return 1 if any(result.num_failed for result in report.results) else 0


def build_parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog="python -m octavo.bench.versus",
        description="Start servers in turn, several times, and measure each under the same loads: the first server's"
        " ratio to the others, as tables, a plot and JSON. The exit status is 1 if a server does not answer.",
    )
    servers = parser.add_mutually_exclusive_group(required=True)
    servers.add_argument(
        "--server",
        action="append",
        metavar="NAME=COMMAND",
        help="a server and what starts it, without a shell; {port} in it becomes a free one. Once for each server",
    )
    servers.add_argument(
        "plan",
        type=Path,
        nargs="?",
        metavar="SERVERS.toml",
        help="a file of servers, with variables and rows of their own; bench/README.md has an example",
    )
    rows = parser.add_mutually_exclusive_group()
    rows.add_argument(
        "--rows", choices=ROWS, action="append", help="rows of work; once for each (bf16; of a plan: its)"
    )
    rows.add_argument(
        "--work",
        action="append",
        metavar="WORK",
        help="instead: REQUESTS/CONCURRENCY/PROMPT/OUTPUT, as 32/8/128/64 or '32/8/504 shared+8/64'. Once for each",
    )
    parser.add_argument(
        "--repeats",
        "--rounds",
        dest="rounds",
        type=positive_int,
        default=3,
        metavar="N",
        help="lives of each server (3)",
    )
    parser.add_argument("--output-dir", type=Path, required=True, metavar="DIRECTORY", help="for results and logs")
    parser.add_argument("--timeout-s", type=positive_float, default=900.0, metavar="X", help="for one answer (900)")
    return parser


def compare(options: argparse.Namespace) -> Report:
    """Start one server after the other, round by round; what is known is written after each. Raises CommandError."""
    plan = read_plan(options.plan) if options.plan else typed_plan(options.server, options.rows or [])
    rows = _rows(options)
    logs = options.output_dir / "logs"
    try:
        logs.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CommandError(f"--output-dir {options.output_dir} cannot be made: {error.strerror}") from None
    report = Report(this_place(), plan, [], [])
    for number, label, server_plan in _turns(plan, options.rounds):
        works = list(_works(server_plan, rows))
        if not works:
            continue
        print(f"round {number} of {options.rounds}: {label}", file=sys.stderr)
        with started(server_plan, logs / f"{label}-{number}.log", options.timeout_s) as process:
            life, results = asyncio.run(_live(process, label, number, server_plan, works))
        report = msgspec.structs.replace(report, lives=[*report.lives, life], results=[*report.results, *results])
        write_report(options.output_dir, report)
    return report


def _rows(options: argparse.Namespace) -> dict[str, Sequence[Work]]:
    """Return the rows that are asked for, by group; those of ALL are every server's."""
    if options.work:
        return {ALL: [typed_work(text, seed) for seed, text in enumerate(options.work, 1)]}
    return {group: ROWS[group] for group in options.rows or ROWS}


def _turns(plan: Plan, num_rounds: int) -> Iterator[tuple[int, str, ServerPlan]]:
    for number in range(1, num_rounds + 1):
        for label, server_plan in plan.servers.items():
            yield number, label, server_plan


def _works(plan: ServerPlan, rows: Mapping[str, Sequence[Work]]) -> Iterator[tuple[str, Work]]:
    """Yield what a server is to do, with the name that its row has in the tables."""
    for group, works in rows.items():
        if group == ALL:
            yield from ((work.name, work) for work in works)
        elif group in plan.rows:
            yield from ((f"{group}, {work.name}", work) for work in works)


async def _live(
    process: ServerProcess, label: str, number: int, plan: ServerPlan, works: Sequence[tuple[str, Work]]
) -> tuple[Life, list[Result]]:
    """Measure a server that was just started, from its first token to the last row."""
    first_token_s = await process.first_token_s(plan.start_timeout_s)
    results, pss_bytes = [], []
    for name, work in works:
        results.append(await _result(process, label, name, work))
        pss_bytes.append(process.pss_bytes())
    return Life(label, number, first_token_s, max(pss_bytes)), results


async def _result(process: ServerProcess, label: str, name: str, work: Work) -> Result:
    measured = await measure(process.server, work)
    if measured.was_interrupted:
        raise KeyboardInterrupt
    [run] = measured.runs
    result = Result(
        format=FORMAT,
        label=label,
        name=name,
        work=work,
        server={"base_url": process.server.base_url, "model": measured.model},
        targets_ms={},
        place=this_place(),
        median=run.figures,
        runs=[msgspec.structs.replace(run, requests=[])],
    )
    print(format_result(result), file=sys.stderr)
    return result


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the server that runs then is ended too
    sys.exit(main())
