"""Every kernel against the reference and the roofline of this GPU, then one whole model, in a table of Markdown.

Exits with 1 if a check failed, with 2 where there is no GPU.
"""

import argparse
import math
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from octavo.kernels.choice import choose_backend  # before torch

# isort: split
import torch
from torch import Tensor

from octavo.bench.cases import LLAMA_1B, TINY, Case, Sizes, make_cases
from octavo.bench.timing import Roofline, measure_roofline, time_call
from octavo.bench.whole_model import Length, WholeModel, logits_error
from octavo.kernels import reference
from octavo.kernels.backend import Backend

NEAR = 0.03  # of hidden states and logits in bfloat16, relative: what is rounded on the way is rounded elsewhere
NUM_LAYERS = 16
HEAD = """
| what | shape | error | allowed | µs | GB/s | TFLOP/s | of the roofline |
|---|---|---|---|---|---|---|---|"""


class Row(NamedTuple):
    """One line of the table. An `error` that is a text is what was raised; None: nothing was compared."""

    name: str
    shape: str
    error: float | str | None
    tolerance: float = 0.0
    seconds: float | None = None
    num_bytes: int = 0
    num_flops: int = 0

    @property
    def is_right(self) -> bool:
        return self.error is None or (isinstance(self.error, float) and self.error <= self.tolerance)


class Bench(NamedTuple):
    """What is checked, and where. Without a roofline nothing is timed."""

    backend: Backend
    device: torch.device
    dtype: torch.dtype
    sizes: Sizes
    num_layers: int
    length: Length
    roofline: Roofline | None


def main(argv: Sequence[str] | None = None) -> int:
    """Return the exit status."""
    parser = argparse.ArgumentParser(prog="gpu_check", description=__doc__)
    parser.add_argument("--interpret", action="store_true", help="only check, tiny shapes, in Triton's interpreter")
    parser.add_argument("--backend", metavar="NAME", default="triton", help="kernels to check (default: triton)")
    parser.add_argument("--only", metavar="TEXT", help="only the kernels whose name contains this, and no model")
    options = parser.parse_args(argv)
    if options.interpret:
        os.environ["TRITON_INTERPRET"] = "1"  # Triton is imported where the backend is chosen, and reads it then
    elif not torch.cuda.is_available():
        print("gpu_check: torch sees no GPU on this machine; --interpret checks without one", file=sys.stderr)
        return 2
    bench = make_bench(options.backend, is_timed=not options.interpret)
    return report(rows(bench, options.only), bench.roofline)


def make_bench(backend_name: str, *, is_timed: bool) -> Bench:
    chosen = choose_backend(backend_name)
    if not is_timed:
        return Bench(chosen.backend, torch.device("cpu"), torch.float32, TINY, 2, Length(6, 3), None)
    roofline = measure_roofline(chosen.device)
    return Bench(chosen.backend, chosen.device, torch.bfloat16, LLAMA_1B, NUM_LAYERS, Length(128, 50), roofline)


def report(lines: Iterable[Row], roofline: Roofline | None) -> int:
    """Print the table as it grows, and what failed; return the exit status."""
    if roofline is not None:
        print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, Python {sys.version.split()[0]}")
        print(f"copy: {roofline.bytes_per_s / 1e9:.0f} GB/s, product: {roofline.flops_per_s / 1e12:.0f} TFLOP/s")
    print(HEAD)
    failed, num_compared = [], 0
    for row in lines:
        print(format_row(row, roofline), flush=True)
        num_compared += row.error is not None
        failed += [] if row.is_right else [f"failed: {row.name} {row.shape}"]
    print(f"\n{num_compared} checks, {len(failed)} failed", *failed, sep="\n")
    return 1 if failed else 0


def format_row(row: Row, roofline: Roofline | None) -> str:
    error = "" if row.error is None else row.error if isinstance(row.error, str) else f"{row.error:.1e}"
    cells = [row.name, row.shape, error, "" if row.error is None else f"{row.tolerance:.1e}"]
    if row.seconds is None or roofline is None:
        cells += ["", "", "", ""]
    else:
        share = roofline.least_s(row.num_bytes, row.num_flops) / row.seconds
        cells += [f"{row.seconds * 1e6:.1f}", f"{row.num_bytes / row.seconds / 1e9:.0f}"]
        cells += [f"{row.num_flops / row.seconds / 1e12:.1f}", f"{share:.0%}"]
    return f"| {' | '.join(cells)} |"


def rows(bench: Bench, only: str | None) -> Iterator[Row]:
    for case in make_cases(bench.sizes, bench.device, bench.dtype):
        if only is None or only in case.kernel:
            yield kernel_row(case, bench)
    if only is None:
        yield from model_rows(bench)


def kernel_row(case: Case, bench: Bench) -> Row:
    try:
        error = largest_error(results(case, bench.backend), results(case, reference))
        seconds = None
        if bench.roofline is not None:
            call = case.bind(bench.backend)
            seconds = time_call(lambda: call(*case.inputs), bench.device)
    except Exception as raised:  # a row of its own: the other kernels are to be seen as well
        return Row(case.kernel, case.shape, f"{type(raised).__name__}: {raised}".splitlines()[0])
    return Row(case.kernel, case.shape, error, case.tolerance, seconds, case.num_bytes, case.num_flops)


def results(case: Case, backend: Backend) -> list[Tensor]:
    """Return what the kernel returns and what it changes, computed on copies of the inputs."""
    inputs = [tensor.clone() for tensor in case.inputs]
    returned = case.bind(backend)(*inputs)
    outputs = () if returned is None else returned if isinstance(returned, tuple) else (returned,)
    return [*outputs, *(inputs[index] for index in case.changed)]


def largest_error(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Return the largest difference relative to the largest value; of token ids (int64) the share of mismatches."""
    errors = []
    for got, want in zip(found, expected, strict=True):
        if got.dtype != want.dtype or got.shape != want.shape:
            raise ValueError(f"{got.dtype} of {tuple(got.shape)} where {want.dtype} of {tuple(want.shape)} is expected")
        equal, sizes = got == want, want.double().abs()  # of a masked logit both are -inf
        difference = (got.double() - want.double()).abs().masked_fill(equal, 0.0)
        largest = sizes[sizes.isfinite()].max()
        error = (~equal).double().mean() if want.dtype == torch.int64 else difference.max() / largest
        errors.append(float(error))
    return math.nan if any(map(math.isnan, errors)) else max(errors)


def model_rows(bench: Bench) -> Iterator[Row]:
    sizes, roofline = bench.sizes, bench.roofline
    error = logits_error(sizes, bench.backend, reference, bench.device, bench.dtype)
    yield Row("model, logits", "2 layers", error, NEAR)
    model = WholeModel(sizes, bench.num_layers, bench.backend, bench.device, bench.dtype, bench.length)
    timed = [] if roofline is None else [model.time_prefill(), *map(model.time_decode, sizes.batches)]
    model.capture()
    for num_seqs in sizes.batches:
        yield Row("model, graph", f"{num_seqs} sequences", model.graph_error(num_seqs), NEAR)
    timed += [] if roofline is None else map(model.time_decode, sizes.batches)
    for each in timed:
        yield Row("model", each.name, None, 0.0, each.seconds, each.num_bytes, each.num_flops)


if __name__ == "__main__":
    sys.exit(main())
