"""A model's step taken apart: the kernels that it calls, and what lies between their calls.

The functions of `TimedBackend` are those of a Backend, each with a clock around it. `Stopwatch` gives them to a runner
in place of its own, without the model's knowing, and takes them back. Layers that are compiled into one call are run as
ever; they have clocks of their own, and `TimedLayers` reads them.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeAlias, cast

from torch import Tensor, nn

from octavo.bench.step.floor import ATTENTION, KV_STORE, NORMS
from octavo.executor.models import Decoder, Model
from octavo.executor.models.decoder import CompiledLayers
from octavo.executor.models.inputs import StepInputs
from octavo.executor.models.kv_caches import KVCaches
from octavo.executor.step.runner import ModelRunner
from octavo.kernels.backend import Backend
from octavo.protocol.messages import Step

PACKING, BETWEEN, SAMPLING = "packing", "between kernels", "sampling"
# What the functions of a Backend are shown as; others as themselves, `linear` by its layer's name.
PART_OF = {
    "paged_attention": ATTENTION,
    "store_kv": KV_STORE,
    "rotate_and_store_kv": KV_STORE,
    "rms_norm": NORMS,
    "add_rms_norm": NORMS,
    "silu_and_mul": "activation",
}
Call: TypeAlias = Mapping[str, int]  # nanoseconds of each part that a call does: one, unless layers are compiled
clock_ns = time.perf_counter_ns


class TimedBackend:
    """A Backend that returns what another one returns, and notes how long each call takes."""

    def __init__(self, backend: Backend, product_names: Mapping[int, str]) -> None:
        """`product_names` are what packed layers are called, by their identities."""
        self.calls: list[Call] = []
        for name in vars(Backend):
            if not name.startswith("_"):
                setattr(self, name, timed_call(getattr(backend, name), PART_OF.get(name, name), self.calls))
        self.linear = timed_product(backend.linear, product_names, self.calls)


def timed_call(function: Callable[..., Any], part: str, calls: list[Call]) -> Callable[..., Any]:
    """Return `function` with a clock, which adds to `calls`."""

    def timed(*args: Any, **kwargs: Any) -> Any:
        start_ns = clock_ns()
        result = function(*args, **kwargs)
        calls.append({part: clock_ns() - start_ns})
        return result

    return timed


def timed_product(function: Callable[..., Any], names: Mapping[int, str], calls: list[Call]) -> Callable[..., Any]:
    """Return `function`, a product with its second argument, with a clock; the part is the layer's name."""

    def timed(x: Any, layer: object, *args: Any, **kwargs: Any) -> Any:
        start_ns = clock_ns()
        result = function(x, layer, *args, **kwargs)
        calls.append({names[id(layer)]: clock_ns() - start_ns})
        return result

    return timed


class TimedLayers:
    """Compiled layers that note what each part of them takes."""

    def __init__(self, layers: CompiledLayers, calls: list[Call]) -> None:
        self._layers = layers
        self._calls = calls

    def forward(self, inputs: StepInputs, kv_caches: KVCaches) -> Tensor:
        hidden_TE, times_ns = self._layers.profile(inputs, kv_caches)
        self._calls.append(times_ns)
        return hidden_TE


class Span(NamedTuple):
    """A call of the model."""

    start_ns: int
    end_ns: int


class TimedModel:
    """A Model that notes when its calls begin and end, and which calls of the backend they make."""

    def __init__(self, model: Model, backend: TimedBackend) -> None:
        self._model = model
        self._backend = backend
        self.spans: list[Span] = []
        self.calls: list[Call] = []  # of the backend, by the model

    def forward(self, inputs: StepInputs, kv_caches: KVCaches) -> Tensor:
        with self._watched():
            return self._model.forward(inputs, kv_caches)

    def compute_logits(self, hidden_SE: Tensor) -> Tensor:
        with self._watched():
            return self._model.compute_logits(hidden_SE)

    @contextmanager
    def _watched(self) -> Iterator[None]:
        self._backend.calls.clear()
        start_ns = clock_ns()
        yield
        self.spans.append(Span(start_ns, clock_ns()))
        self.calls += self._backend.calls


class Stopwatch:
    """Times a runner's steps by part, while it is `attached`."""

    def __init__(self, runner: ModelRunner, product_names: Mapping[int, str]) -> None:
        self._runner = runner
        self._backend = TimedBackend(runner.backend, product_names)
        self._model = TimedModel(runner.model, self._backend)

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Let the runner and all layers of its model call timed functions."""
        runner, model, plain = self._runner, self._runner.model, self._runner.backend
        timed = cast(Backend, self._backend)
        try:
            _hand(cast(nn.Module, model), timed)
            runner.model, runner.backend = self._model, timed
            with _timed_layers(model, self._backend.calls):
                yield
        finally:
            _hand(cast(nn.Module, model), plain)
            runner.model, runner.backend = model, plain

    def times_ns(self, step: Step) -> dict[str, int]:
        """Do a step that samples and return what each part took; the parts add up to the step.

        PACKING is all before the model is called, SAMPLING all that is neither that nor the model; BETWEEN is what the
        model does beside calling kernels: Python, torch, and what it takes to call layers that are compiled.
        """
        self._model.spans.clear()
        self._model.calls.clear()
        start_ns = clock_ns()
        self._runner.run(step)
        end_ns = clock_ns()
        parts = Counter({PACKING: self._model.spans[0].start_ns - start_ns})
        for call in self._model.calls:
            parts.update(call)
        in_model_ns = sum(span.end_ns - span.start_ns for span in self._model.spans)
        parts[BETWEEN] = in_model_ns - sum(sum(call.values()) for call in self._model.calls)
        parts[SAMPLING] = end_ns - start_ns - in_model_ns - parts[PACKING]
        return parts

    @property
    def num_calls(self) -> int:
        """Return how many calls of the backend the model made in the last step; of compiled layers, one for all."""
        return len(self._model.calls)


def overhead_ns(num_calls: int = 10_000) -> float:
    """Return what a clock around a call costs, measured with a function that does nothing."""

    def nothing(x: object, layer: object) -> None:
        pass

    timed = timed_product(nothing, {id(None): ""}, [])
    return _mean_ns(timed, num_calls) - _mean_ns(nothing, num_calls)


def _mean_ns(function: Callable[[None, None], object], num_calls: int) -> float:
    start_ns = clock_ns()
    for _ in range(num_calls):
        function(None, None)
    return (clock_ns() - start_ns) / num_calls


@contextmanager
def _timed_layers(model: Model, calls: list[Call]) -> Iterator[None]:
    """Let a model whose layers are compiled add their times to `calls`."""
    if not isinstance(model, Decoder) or model.compiled is None:
        yield
        return
    layers = model.compiled
    try:
        model.compiled = cast(CompiledLayers, TimedLayers(layers, calls))
        yield
    finally:
        model.compiled = layers


def _hand(model: nn.Module, backend: Backend) -> None:
    """Let all layers of a model, of either tier, call the functions of `backend`."""
    for module in model.modules():
        if hasattr(module, "backend"):
            module.backend = cast(Any, backend)
    current = getattr(model, "current", None)  # of the second tier: what its attention calls
    if current is not None:
        current.backend = backend
