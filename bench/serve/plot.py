"""Plots of results, as PNG."""

from collections.abc import Callable, Mapping, Sequence
from io import BytesIO

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas

from octavo.bench.serve.compare import COMPARED, Figure, Servers
from octavo.bench.serve.results import MS, Record, Result

COLOURS = ("#3b6fb6", "#e08a3c", "#5a9e6f", "#b0547a", "#7a6bb0", "#8c8c8c")
MARKED = {"p50": "-", "p99": "--"}
NUM_BINS, DPI = 40, 120
LEAST_WINDOW_S, NUM_WINDOWS = 0.5, 60  # shorter ones would show the rhythm of the steps


def plot_result(result: Result) -> bytes:
    """Return a picture of the first-token times, the gaps and the tokens a second over time of all runs."""
    canvas = Canvas(figsize=(12, 3.8), layout="constrained")
    canvas.suptitle(f"{result.label}: {result.name}", fontsize=12)
    first, gaps, rate = canvas.subplots(1, 3)
    done = [[record for record in run.requests if record.failure is None] for run in result.runs]
    records = [record for run in done for record in run]
    _histogram(first, [record.ttft_s * MS for record in records], "time to the first token (ms)", "requests")
    _histogram(gaps, [gap * MS for record in records for gap in record.gaps_s], "gap between chunks (ms)", "gaps")
    gaps.set_yscale("log")
    _rates(rate, done)
    return _png(canvas)


def _histogram(axes: Axes, values: Sequence[float], title: str, counted: str) -> None:
    _plain(axes, title, counted)
    if not values:
        return
    axes.hist(values, bins=NUM_BINS, color=COLOURS[0], alpha=0.8)
    for (name, style), value in zip(MARKED.items(), np.percentile(values, (50, 99)), strict=True):
        axes.axvline(value, color=COLOURS[1], linestyle=style, label=f"{name} {value:.1f}")
    axes.legend(frameon=False)


def _rates(axes: Axes, runs: Sequence[Sequence[Record]]) -> None:
    _plain(axes, "time (s)", "output tokens/s")
    for number, records in enumerate(runs):
        if records:
            middles, rates = tokens_over_time(records)
            axes.plot(middles, rates, color=COLOURS[number % len(COLOURS)], label=f"run {number + 1}")
    if len(runs) > 1:
        axes.legend(frameon=False)
    axes.set_ylim(bottom=0)


def tokens_over_time(records: Sequence[Record]) -> tuple[np.ndarray, np.ndarray]:
    """Return the middles of windows of time (s) and the tokens a second in them; chunks of an answer weigh alike."""
    times = np.array([record.start_s + time for record in records for time in record.chunks_s])
    weights = np.array([record.num_output_tokens / len(record.chunks_s) for record in records for _ in record.chunks_s])
    end_s = max(record.start_s + record.latency_s for record in records)
    num_windows = max(1, min(NUM_WINDOWS, int(end_s / LEAST_WINDOW_S)))
    tokens, edges = np.histogram(times, bins=num_windows, range=(0, end_s), weights=weights)
    return (edges[:-1] + edges[1:]) / 2, tokens / np.diff(edges)


def plot_comparison(works: Mapping[str, Servers]) -> bytes:
    """Return a picture with a group of bars for each work and a bar for each server, one panel a figure."""
    canvas = Canvas(figsize=(max(6.0, 2.2 * len(works)), 8.5), layout="constrained")
    labels = list(dict.fromkeys(label for servers in works.values() for label in servers))
    colours: Callable[[str], str] = lambda label: COLOURS[labels.index(label) % len(COLOURS)]  # noqa: E731
    panels = canvas.subplots(len(COMPARED), 1, sharex=True)
    for axes, figure in zip(panels, COMPARED, strict=True):
        _bars(axes, figure, works, colours)
    panels[-1].set_xticks(range(len(works)), [work.replace(", ", "\n") for work in works])
    handles = {label: bar for axes in panels for bar, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    canvas.legend(handles.values(), handles.keys(), loc="outside upper center", ncols=4, frameon=False)
    return _png(canvas)


def _bars(axes: Axes, figure: Figure, works: Mapping[str, Servers], colours: Callable[[str], str]) -> None:
    """Draw the bars of a group side by side around the group's place, and write above each what it shows."""
    _plain(axes, "", figure.title)
    width = 0.8 / max(map(len, works.values()))
    for place, servers in enumerate(works.values()):
        for index, (label, figures) in enumerate(servers.items()):
            value = figure.of(figures)
            bars = axes.bar(place + (index - (len(servers) - 1) / 2) * width, value or 0, width * 0.92)
            bars[0].set(color=colours(label), label=label)
            axes.bar_label(bars, ["-" if value is None else f"{value:.0f}"], fontsize=8, padding=2)
    axes.margins(y=0.15)


def _plain(axes: Axes, x_title: str, y_title: str) -> None:
    axes.set(xlabel=x_title, ylabel=y_title)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)


def _png(canvas: Canvas) -> bytes:
    """Return `canvas` as bytes; a Figure of its own, without pyplot, draws with Agg wherever it runs."""
    drawn = BytesIO()
    canvas.savefig(drawn, format="png", dpi=DPI)
    return drawn.getvalue()
