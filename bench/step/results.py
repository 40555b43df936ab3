"""What `octavo bench step` finds, as JSON and as tables."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from octavo.bench.machine import Place
from octavo.bench.step.floor import Ceilings, Work, part_floor_s, step_floor_s
from octavo.bench.step.steps import Case

LEGEND = """\
floor: what the step takes at least here, the sum over its parts (products by layer, attention, what lies between) of
max(bytes / read bandwidth, operations / product rate): weights as they are held, and keys and values, are read once; a
multiply-add is two operations. See bench/step/floor.py."""


class Timing(msgspec.Struct, frozen=True):
    """A step of equal sequences, repeated. Times in seconds."""

    batch: int  # sequences
    new_tokens: int  # that each computes: 1 in a decode step
    context: int  # tokens of a sequence, at most
    repeats: int
    median_s: float
    p10_s: float
    p90_s: float
    tokens_per_s: float  # computed
    floor_s: float

    @property
    def share(self) -> float:
        """Return the floor's share of the median."""
        return self.floor_s / self.median_s


class PartTiming(msgspec.Struct, frozen=True):
    """A part of a step. Without a floor it is work that a better program would not have."""

    name: str
    median_s: float
    bytes: int
    flops: int
    floor_s: float


class Profile(msgspec.Struct, frozen=True):
    """A decode step by part, as a server does it. Its parts' medians add up to about the median of the step."""

    batch: int
    context: int
    repeats: int
    median_s: float
    clocks_s: float  # what the clocks around the calls add
    num_calls: int  # of kernels; of compiled layers, one for all
    parts: list[PartTiming]


class Result(msgspec.Struct, frozen=True):
    place: Place
    model: str
    settings: dict[str, Any]  # those that are not the defaults
    num_threads: int
    dtype: str  # of activations
    ceilings: Ceilings  # the better of those measured before and after
    start_s: float  # from settings to an executor that is ready, imports left out
    pss_bytes: int | None  # of the process, started and before any of these steps; None where the system does not say
    weight_bytes: dict[str, int]  # by the form in which they are held
    decode: list[Timing]
    prefill: list[Timing]
    left_out: list[str]
    profiles: list[Profile]


def timing(case: Case, times_s: Sequence[float], parts: Mapping[str, Work], ceilings: Ceilings) -> Timing:
    """Return what the times of a case come to."""
    p10_s, median_s, p90_s = np.percentile(times_s, [10, 50, 90]).tolist()
    return Timing(
        batch=case.num_seqs,
        new_tokens=case.num_new_tokens,
        context=case.length,
        repeats=len(times_s),
        median_s=median_s,
        p10_s=p10_s,
        p90_s=p90_s,
        tokens_per_s=case.shape.num_tokens / median_s,
        floor_s=step_floor_s(parts, ceilings),
    )


def profile(
    case: Case,
    times_ns: Sequence[Mapping[str, int]],
    parts: Mapping[str, Work],
    ceilings: Ceilings,
    *,
    num_calls: int,
    overhead_ns: float,
) -> Profile:
    """Return what the times of a case's parts come to; `times_ns` has those of each repetition."""

    def part(name: str) -> PartTiming:
        median_s = float(np.median([each[name] for each in times_ns])) / 1e9
        work = parts.get(name, Work())
        return PartTiming(name, median_s, work.num_bytes, work.num_flops, part_floor_s(work, ceilings))

    return Profile(
        batch=case.num_seqs,
        context=case.length,
        repeats=len(times_ns),
        median_s=float(np.median([sum(each.values()) for each in times_ns])) / 1e9,
        clocks_s=num_calls * overhead_ns / 1e9,
        num_calls=num_calls,
        parts=[part(name) for name in times_ns[0]],
    )


def show(result: Result, json_path: Path | None) -> None:
    """Print a result, and write it as JSON if there is a path. Raises OSError if it cannot be written."""
    print(report(result))
    if json_path is not None:
        json_path.write_bytes(msgspec.json.format(msgspec.json.encode(result)))


def report(result: Result) -> str:
    """Return all of a result as text."""
    blocks = [_head(result)]
    if result.decode:
        blocks.append(_table(("batch", "context", *TIMES), (_row(t.batch, t.context, timing=t) for t in result.decode)))
    if result.prefill:
        blocks.append(_table(("prompt tokens", *TIMES), (_row(t.new_tokens, timing=t) for t in result.prefill)))
    blocks += [_profile(each) for each in result.profiles]
    if result.left_out:
        blocks.append("Left out:\n" + "\n".join(f"  {line}" for line in result.left_out))
    return "\n\n".join([*blocks, LEGEND])


TIMES = ("median ms", "p10", "p90", "tokens/s", "floor ms", "floor / measured")


def _head(result: Result) -> str:
    ceilings = result.ceilings
    rates = ", ".join(f"{rate / 1e9:.0f} GFLOP/s in {name}" for name, rate in ceilings.flops_per_s.items())
    weights = "; ".join(f"{form}: {num_bytes / 1e6:.1f} MB" for form, num_bytes in result.weight_bytes.items())
    pss = "not known" if result.pss_bytes is None else f"{result.pss_bytes / 1e6:.0f} MB"
    return "\n".join(
        (
            f"{result.model} in {result.dtype}, {result.num_threads} threads of {result.place.cpu.get('CPU', 'a CPU')}",
            f"machine: {ceilings.read_bytes_per_s / 1e9:.1f} GB/s read, {rates}",
            f"start: {result.start_s:.2f} s; memory (PSS): {pss}",
            f"weights: {weights}",
        )
    )


def _row(*first: int, timing: Timing) -> list[str]:
    times_ms = [f"{1000 * seconds:.2f}" for seconds in (timing.median_s, timing.p10_s, timing.p90_s)]
    floor = [f"{1000 * timing.floor_s:.2f}", f"{timing.share:.0%}"]
    return [*map(str, first), *times_ms, f"{timing.tokens_per_s:.0f}", *floor]


def _profile(profile: Profile) -> str:
    title = (
        f"One decode step, batch {profile.batch}, context {profile.context}: {1000 * profile.median_s:.2f} ms, of which"
        f" the clocks around {profile.num_calls} calls take {1000 * profile.clocks_s:.2f}"
    )
    rows = (
        [
            part.name,
            f"{1000 * part.median_s:.3f}",
            f"{part.median_s / profile.median_s:.1%}",
            f"{part.bytes / 1e6:.1f}",
            f"{part.flops / 1e6:.0f}",
            f"{1000 * part.floor_s:.3f}",
            f"{part.floor_s / part.median_s:.0%}" if part.floor_s else "",
        ]
        for part in profile.parts
    )
    return f"{title}\n{_table(('part', 'ms', 'share', 'MB', 'MFLOP', 'floor ms', 'floor / measured'), rows)}"


def _table(names: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table, aligned."""
    cells = [list(names), *map(list, rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join(_lines(cells, widths))


def _lines(cells: Sequence[Sequence[str]], widths: Sequence[int]) -> Iterator[str]:
    for index, row in enumerate(cells):
        yield f"| {' | '.join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))} |"
        if index == 0:
            yield f"|{'|'.join('-' * (width + 1) + ':' for width in widths)}|"
