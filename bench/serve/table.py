"""A result as a table in the terminal."""

from collections import Counter
from collections.abc import Iterator

from octavo.bench.serve.results import Figures, Result, Spread

SPREADS = {
    "first token (ttft)": "ttft_ms",
    "between chunks (gap)": "gap_ms",
    "per output token (tpot)": "tpot_ms",
    "whole answer (e2el)": "e2el_ms",
}
WIDTH = 26  # of what stands before a figure


def format_result(result: Result) -> str:
    """Return all that a person reads of `result`, in lines."""
    return "\n".join(_lines(result))


def _lines(result: Result) -> Iterator[str]:
    many = len(result.runs) > 1
    yield f"{result.label}: {result.name}" + (f", median of {len(result.runs)} runs" if many else "")
    for name, value in _rates(result.median, result.targets_ms).items():
        yield f"  {name:<{WIDTH}}{value}"
    yield f"  {'milliseconds':<{WIDTH}}{'mean':>10}{'p50':>10}{'p90':>10}{'p99':>10}"
    for name, field in SPREADS.items():
        yield f"  {name:<{WIDTH}}{_columns(getattr(result.median, field))}"
    failures: Counter[str] = Counter()
    for run in result.runs:
        failures.update(run.failures)
    for reason, count in failures.most_common():
        yield f"{count} failed: {reason}"
    for note in dict.fromkeys(note for run in result.runs for note in run.notes):
        yield f"note: {note}"


def _rates(figures: Figures, targets_ms: dict[str, float]) -> dict[str, str]:
    shown = {
        "requests": f"{figures.num_requests - figures.num_failed} done, {figures.num_failed} failed",
        "duration": f"{figures.duration_s:.2f} s",
        "tokens": f"{figures.prompt_tokens} in, {figures.output_tokens} out",
        "output tokens/s": f"{figures.output_tokens_per_s:.1f}",
        "total tokens/s": f"{figures.total_tokens_per_s:.1f}",
        "requests/s": f"{figures.requests_per_s:.2f}",
    }
    if figures.goodput_per_s is not None and figures.goodput_share is not None:
        targets = ", ".join(f"{name} within {limit:g} ms" for name, limit in targets_ms.items())
        shown["goodput"] = f"{figures.goodput_per_s:.2f} requests/s, {figures.goodput_share:.0%} ({targets})"
    return shown


def _columns(spread: Spread | None) -> str:
    values = [spread.mean, spread.p50, spread.p90, spread.p99] if spread else [None] * 4
    return "".join(f"{'-' if value is None else format(value, '.1f'):>10}" for value in values)
