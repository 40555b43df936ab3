"""An executor in this process, its steps timed, and the machine that they are compared with."""

import time
from collections import Counter
from collections.abc import Callable
from itertools import product
from typing import NamedTuple

import torch
from tqdm import tqdm

from octavo.bench.machine import this_place
from octavo.bench.step import results
from octavo.bench.step.ceilings import better_of, measure_ceilings
from octavo.bench.step.floor import Ceilings, ModelWork
from octavo.bench.step.model_work import model_work, product_names
from octavo.bench.step.results import Profile, Result, Timing
from octavo.bench.step.settings import SETTINGS
from octavo.bench.step.steps import Case, Steps, why_not
from octavo.bench.step.timed import Stopwatch, overhead_ns
from octavo.executor.machine.cgroups import ROOT, read_table
from octavo.executor.machine.threads import choose_num_threads
from octavo.executor.models import LoadedModel
from octavo.executor.start.startup import start_executor
from octavo.executor.step.runner import ModelRunner
from octavo.kernels.cpu import set_num_threads
from octavo.protocol.config import FIELDS, Config


class Request(NamedTuple):
    """What is to be measured: steps of each batch at each context, chunks of a prompt, steps by part."""

    batch: tuple[int, ...]
    context: tuple[int, ...]
    prefill: tuple[int, ...]
    profile: tuple[int, ...]  # batches, at the first context
    repeats: int
    temperature: float

    def cases(self) -> list[Case]:
        """Return the steps to time; those that grow the longest sequences come last."""
        decode = [Case(num_seqs, 1, context) for context, num_seqs in product(self.context, self.batch)]
        return decode + [Case(1, num_tokens, num_tokens) for num_tokens in self.prefill]

    def profiled(self) -> list[Case]:
        """Return the steps to take apart."""
        return [Case(num_seqs, 1, context) for context, num_seqs in product(self.context[:1], self.profile)]


class Measured(NamedTuple):
    """The times of a case, before the machine they are compared with is known."""

    case: Case
    times_s: list[float]


class Dissected(NamedTuple):
    """The times of a case by part."""

    case: Case
    times_ns: list[dict[str, int]]
    num_calls: int
    overhead_ns: float


class Subject:
    """An executor, started as `python -m octavo.executor` starts it, for one person's measurements."""

    def __init__(self, config: Config, temperature: float) -> None:
        started_s = time.perf_counter()
        executor = start_executor(config)
        self.start_s = time.perf_counter() - started_s
        self.pss_bytes = read_table(ROOT / "proc/self/smaps_rollup").get("Pss")
        self._config, self._description = config, executor.description
        self._runner: ModelRunner = executor.runner
        assert isinstance(self._runner.model, torch.nn.Module)
        self.model: LoadedModel = executor.runner.model  # type: ignore[assignment]  # the start has loaded it
        self._steps = Steps(self._runner, self.model.vocab_size, temperature)

    def why_not(self, case: Case) -> str | None:
        """Return why this executor would not come to do such a step; None if it could."""
        return why_not(case, self._config, self._description.max_model_len, self._runner.num_blocks)

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of activations, which that of the norms' weights is."""
        return next(parameter.dtype for parameter in self.model.parameters())

    def work(self) -> ModelWork:
        """Return what the floor is made of."""
        return model_work(self.model, self.dtype, self._runner.kv_caches[0][0].dtype)

    def weight_bytes(self) -> dict[str, int]:
        """Return what the weights take, by form."""
        held = Counter({"not packed": sum(parameter.nbytes for parameter in self.model.parameters())})
        for packed in self.model.products:
            held[packed.form] += packed.nbytes
        return dict(held.most_common())

    def measure(self, case: Case, num_repeats: int) -> Measured:
        """Time a case."""
        return Measured(case, self._steps.times_s(case, num_repeats))

    def dissect(self, case: Case, num_repeats: int) -> Dissected:
        """Time a case by part."""
        stopwatch = Stopwatch(self._runner, product_names(self.model))
        with stopwatch.attached():
            steps = self._steps.plan(case)
            stopwatch.times_ns(next(steps))
            times_ns = [stopwatch.times_ns(next(steps)) for _ in range(num_repeats)]
        return Dissected(case, times_ns, stopwatch.num_calls, overhead_ns())


def measure(
    config: Config, name: str, request: Request, find_ceilings: Callable[[], Ceilings] = measure_ceilings
) -> Result:
    """Return the results of `request` for the model directory of `config`, called `name`.

    `find_ceilings` is called before and after. Raises what an executor's start raises for a model or settings that
    cannot be.
    """
    num_threads, _ = choose_num_threads(config.num_threads)
    set_num_threads(num_threads)
    ceilings = find_ceilings()
    subject = Subject(config, request.temperature)
    measured, dissected, left_out = _measure_all(subject, request)
    ceilings, work = better_of(ceilings, find_ceilings()), subject.work()
    timings = [_timing(each, work, ceilings) for each in measured]
    return Result(
        place=this_place(),
        model=name,
        settings=_settings(config),
        num_threads=num_threads,
        dtype=str(subject.dtype).removeprefix("torch."),
        ceilings=ceilings,
        start_s=subject.start_s,
        pss_bytes=subject.pss_bytes,
        weight_bytes=subject.weight_bytes(),
        decode=[timing for timing in timings if timing.new_tokens == 1],
        prefill=[timing for timing in timings if timing.new_tokens > 1],
        left_out=left_out,
        profiles=[_profile(each, work, ceilings) for each in dissected],
    )


def _measure_all(subject: Subject, request: Request) -> tuple[list[Measured], list[Dissected], list[str]]:
    """Return what was measured, and what was left out and why; with a bar if stderr is a terminal."""
    measured, dissected, left_out = [], [], []
    cases, profiled = request.cases(), request.profiled()
    with tqdm(total=len(cases) + len(profiled), unit=" steps", disable=None, leave=False) as bar:
        for case, is_profiled in [*((case, False) for case in cases), *((case, True) for case in profiled)]:
            bar.set_description(f"{case.name}{', by part' if is_profiled else ''}")
            if reason := subject.why_not(case):
                left_out.append(f"{case.name}{', by part' if is_profiled else ''}: {reason}")
            elif is_profiled:
                dissected.append(subject.dissect(case, request.repeats))
            else:
                measured.append(subject.measure(case, request.repeats))
            bar.update()
    return measured, dissected, left_out


def _timing(measured: Measured, work: ModelWork, ceilings: Ceilings) -> Timing:
    return results.timing(measured.case, measured.times_s, work.parts(measured.case.shape), ceilings)


def _profile(dissected: Dissected, work: ModelWork, ceilings: Ceilings) -> Profile:
    case, times_ns, num_calls, clock_ns = dissected
    parts = work.parts(case.shape)
    return results.profile(case, times_ns, parts, ceilings, num_calls=num_calls, overhead_ns=clock_ns)


def _settings(config: Config) -> dict[str, object]:
    """Return the settings that matter here and are not the defaults."""
    values = {name: getattr(config, name) for name in SETTINGS}
    return {name: value for name, value in values.items() if value != FIELDS[name].default}
