"""What a load gave, in figures: pure arithmetic on records."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from octavo.bench.machine import Place
from octavo.bench.serve.work import Work
from octavo.errors import CommandError

FORMAT = 1  # counts up when a file of results means something else
MS = 1000.0
TARGETS = ("ttft", "tpot", "e2el")  # what a goodput may be asked of, by vLLM's names


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """One request. Times in seconds: `start_s` since the load began, the others since the request was sent.

    A chunk is what one event brought of the text, often one token. Token counts are the server's, None without.
    """

    index: int
    start_s: float
    latency_s: float
    chunks_s: list[float]
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    failure: str | None = None

    @property
    def num_output_tokens(self) -> int:
        return len(self.chunks_s) if self.output_tokens is None else self.output_tokens

    @property
    def ttft_s(self) -> float:
        """The time of the first text; of the end, where there was none."""
        return self.chunks_s[0] if self.chunks_s else self.latency_s

    @property
    def tpot_s(self) -> float | None:
        """The mean time of an output token beyond the first; None if there was only one."""
        if self.num_output_tokens < 2:
            return None
        return ((self.chunks_s[-1] if self.chunks_s else self.latency_s) - self.ttft_s) / (self.num_output_tokens - 1)

    @property
    def gaps_s(self) -> list[float]:
        return [later - earlier for earlier, later in pairwise(self.chunks_s)]


class Spread(msgspec.Struct, frozen=True):
    """How many milliseconds, on average and at most for 50, 90 and 99 of 100."""

    mean: float
    p50: float
    p90: float
    p99: float


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """One run in figures. Times are of the requests that did not fail; `goodput_per_s` is None without targets.

    `ttft_ms` is until the first text, `gap_ms` between chunks of text, `tpot_ms` a request's mean for each token beyond
    the first, `e2el_ms` until the end.
    """

    num_requests: int
    num_failed: int
    duration_s: float
    prompt_tokens: int
    output_tokens: int
    requests_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    ttft_ms: Spread | None
    gap_ms: Spread | None
    tpot_ms: Spread | None
    e2el_ms: Spread | None
    goodput_per_s: float | None = None
    goodput_share: float | None = None  # of the requests that were sent


class Run(msgspec.Struct, frozen=True):
    """Failures are counted by reason; notes say what a reader of the figures has to know."""

    figures: Figures
    failures: dict[str, int]
    notes: list[str]
    requests: list[Record]


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """A file of results. `median` has each figure's median over the runs."""

    format: int
    label: str
    name: str  # of the work
    work: Work
    server: dict[str, str]
    targets_ms: dict[str, float]
    place: Place
    median: Figures
    runs: list[Run]

    @property
    def num_failed(self) -> int:
        return sum(run.figures.num_failed for run in self.runs)


def summarize(
    records: Sequence[Record],
    duration_s: float,
    targets_ms: Mapping[str, float] | None = None,
    wanted_tokens: Sequence[int] | None = None,
) -> Run:
    """Return the figures of one run. `wanted_tokens` has how long each answer had to be, if that was certain."""
    done = [record for record in records if record.failure is None]
    prompt_tokens = sum(record.prompt_tokens or 0 for record in done)
    output_tokens = sum(record.num_output_tokens for record in done)
    good = sum(meets(record, targets_ms) for record in done) if targets_ms else None
    figures = Figures(
        num_requests=len(records),
        num_failed=len(records) - len(done),
        duration_s=duration_s,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        requests_per_s=len(done) / duration_s,
        output_tokens_per_s=output_tokens / duration_s,
        total_tokens_per_s=(prompt_tokens + output_tokens) / duration_s,
        ttft_ms=spread(record.ttft_s for record in done),
        gap_ms=spread(gap for record in done for gap in record.gaps_s),
        tpot_ms=spread(tpot for record in done if (tpot := record.tpot_s) is not None),
        e2el_ms=spread(record.latency_s for record in done),
        goodput_per_s=None if good is None else good / duration_s,
        goodput_share=None if good is None else good / max(1, len(records)),
    )
    failures = dict(Counter(record.failure for record in records if record.failure is not None).most_common())
    ordered = sorted(records, key=lambda record: record.index)
    return Run(figures, failures, list(_notes(done, wanted_tokens)), ordered)


def meets(record: Record, targets_ms: Mapping[str, float]) -> bool:
    """Return whether a request came to its end within all targets; an answer of one token meets any `tpot`."""
    times_s = {"ttft": record.ttft_s, "tpot": record.tpot_s or 0.0, "e2el": record.latency_s}
    return record.failure is None and all(times_s[name] * MS <= limit_ms for name, limit_ms in targets_ms.items())


def spread(times_s: Iterable[float]) -> Spread | None:
    """Return the spread of `times_s`, of which there may be none."""
    times_ms = np.fromiter(times_s, float) * MS
    if not times_ms.size:
        return None
    return Spread(float(times_ms.mean()), *(float(each) for each in np.percentile(times_ms, (50, 90, 99))))


def _notes(done: Sequence[Record], wanted_tokens: Sequence[int] | None) -> Iterable[str]:
    if uncounted := sum(record.output_tokens is None for record in done):
        yield f"answers whose tokens the server did not count: {uncounted}; chunks are counted, prompts are not"
    if silent := sum(not record.chunks_s for record in done):
        yield f"answers without text: {silent}; their end counts as their first token"
    if wanted_tokens and (
        short := sum(record.num_output_tokens != wanted_tokens[record.index] for record in done if record.output_tokens)
    ):
        yield f"answers not as long as asked: {short}; a server that does not know ignore_eos does other work"


def median_figures(runs: Sequence[Figures]) -> Figures:
    """Return each figure's median; a figure that a run lacks is left out of its own."""
    plain = [msgspec.to_builtins(figures) for figures in runs]
    return msgspec.convert(_median(plain), Figures, strict=False)


def _median(values: Sequence[Any]) -> Any:
    present = [value for value in values if value is not None]
    if not present:
        return None
    if isinstance(present[0], dict):
        return {name: _median([value[name] for value in present]) for name in present[0]}
    middle = float(np.median(present))
    return round(middle) if all(isinstance(value, int) for value in present) else middle


def write_result(path: Path, result: Result) -> None:
    """Write `result` as JSON. Raises CommandError."""
    write_bytes(path, msgspec.json.encode(result) + b"\n", "--json")


def read_result(path: Path) -> Result:
    """Return what `write_result` wrote. Raises CommandError."""
    try:
        result = msgspec.json.decode(path.read_bytes(), type=Result)
    except OSError as error:
        raise CommandError(f"{path} cannot be read: {error.strerror}") from None
    except msgspec.DecodeError as error:
        raise CommandError(f"{path} is no result of `octavo bench serve`: {error}") from None
    if result.format != FORMAT:
        raise CommandError(f"{path} was written by another version of Octavo ({result.place.octavo})")
    return result


def write_bytes(path: Path, content: bytes, flag: str) -> None:
    try:
        path.write_bytes(content)
    except OSError as error:
        raise CommandError(f"{flag} {path} cannot be written: {error.strerror}") from None
