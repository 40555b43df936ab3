"""Results of several servers beside one another, as ratios."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any, NamedTuple

from octavo.bench.serve.results import Figures, Result, median_figures

# Of one work: the median figures of each server, by label.
Servers = Mapping[str, Figures]


class Figure(NamedTuple):
    """What is compared: a field of Figures, perhaps one of its spread."""

    title: str
    field: str
    part: str | None = None

    def of(self, figures: Figures) -> float | None:
        value: Any = getattr(figures, self.field)
        found: float | None = value if self.part is None or value is None else getattr(value, self.part)
        return found


COMPARED = (
    Figure("output tokens/s", "output_tokens_per_s"),
    Figure("first token, p50 (ms)", "ttft_ms", "p50"),
    Figure("gap, p99 (ms)", "gap_ms", "p99"),
)


def by_work(results: Sequence[Result]) -> dict[str, Servers]:
    """Return the results by work and label, in their order; of several with the same of both, the median."""
    found: dict[str, dict[str, list[Figures]]] = {}
    for result in results:
        runs = [run.figures for run in result.runs]
        found.setdefault(result.name, {}).setdefault(result.label, []).extend(runs)
    return {work: {label: median_figures(runs) for label, runs in servers.items()} for work, servers in found.items()}


def ratio(value: float | None, other: float | None) -> float | None:
    """Return how many times `other` goes into `value`, if both are there."""
    return value / other if value is not None and other else None


def markdown(works: Mapping[str, Servers]) -> str:
    """Return tables of ratios, one for neighbouring works of the same servers: the first server's to each other's."""
    return "\n\n".join(
        "\n".join(_table(labels, [(work, works[work]) for work, _ in group]))
        for labels, group in groupby(((work, tuple(servers)) for work, servers in works.items()), itemgetter(1))
    )


def _table(labels: tuple[str, ...], works: list[tuple[str, Servers]]) -> Iterator[str]:
    first, *others = labels
    head = ["requests/concurrency/prompt/output", "", *labels, *(f"{first} ÷ {other}" for other in others)]
    yield _row(head)
    yield "|" + "---|" * 2 + "---:|" * (len(head) - 2)
    for work, servers in works:
        for index, figure in enumerate(COMPARED):
            values = [figure.of(servers[label]) for label in labels]
            ratios = [ratio(values[0], value) for value in values[1:]]
            shown = [*(_shown(value, ".1f") for value in values), *(_shown(each, ".2f") for each in ratios)]
            yield _row(["" if index else work, figure.title, *shown])


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _shown(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
