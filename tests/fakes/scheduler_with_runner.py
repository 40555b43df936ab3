"""The real Scheduler and the real ModelRunner without sockets between them: what they do together, step by step."""

from array import array
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from octavo.executor.models import LoadedModel
from octavo.executor.models.kv_caches import allocate_kv_caches
from octavo.executor.step.device import Device
from octavo.executor.step.grammars import Grammars
from octavo.executor.step.launched import Launched
from octavo.executor.step.runner import ModelRunner
from octavo.kernels import cpu
from octavo.protocol.messages import Logprobs, Step
from octavo.protocol.sampling import Sampling
from octavo.scheduler import scheduler
from octavo.scheduler.interface import PlannedStep
from octavo.scheduler.scheduler import Limits, Scheduler


@dataclass
class Generated:
    """What one request gave."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: Logprobs | None = None
    prompt_logprobs: Logprobs | None = None
    finish_reasons: list[str] = field(default_factory=list)
    num_cached_tokens: int = 0
    error: str | None = None


class SchedulerWithRunner:
    """One model behind one scheduler. `steps_ahead` 1 plans and launches each step before the last one's results."""

    def __init__(
        self,
        decoder: LoadedModel,
        dtype: torch.dtype,
        *,
        num_blocks: int = 512,
        block_size: int = 16,
        max_model_len: int = 256,
        max_num_seqs: int = 64,
        max_num_batched_tokens: int = 512,
        enable_prefix_caching: bool = True,
        steps_ahead: int = 1,
        device: Device | None = None,
        grammars: Grammars | None = None,
    ) -> None:
        limits = Limits(
            num_blocks=num_blocks,
            block_size=block_size,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_num_waiting_seqs=1000,
            enable_prefix_caching=enable_prefix_caching,
        )
        kv_caches = allocate_kv_caches(decoder.kv_shapes, num_blocks, block_size, dtype, torch.device("cpu"))
        self.scheduler = Scheduler(limits)
        sizes = {"block_size": block_size, "num_blocks": num_blocks}
        self.runner = ModelRunner(decoder, kv_caches, cpu, **sizes, device=device, grammars=grammars)
        self.steps_ahead = steps_ahead
        self.planned: list[PlannedStep] = []  # every step so far
        self.max_used_blocks = 0
        self.dies_at: set[int] = set()  # steps before which the runner loses all its state, and the cache
        self.num_deaths = 0
        self._num_requests = 0

    def generate(
        self,
        requests: Sequence[tuple[Sequence[int], Sampling]],
        arrivals: Mapping[int, int] | None = None,
        grammars: Mapping[int, str] | None = None,
    ) -> list[Generated]:
        """Return what each (prompt, sampling) gives; request i arrives before the step number `arrivals[i]` (or 0).

        Request i follows `grammars[i]`, or none.
        """
        results = {self._num_requests + i: Generated() for i in range(len(requests))}
        late = deque(sorted((arrivals or {}).get(i, 0) for i in range(len(requests))))
        order = deque(sorted(range(len(requests)), key=lambda i: (arrivals or {}).get(i, 0)))
        first_id, first_step = self._num_requests, len(self.planned)
        self._num_requests += len(requests)
        to_do: deque[Launched] = deque()
        while order or self.scheduler.has_work:
            while order and (late[0] <= len(self.planned) - first_step or not self.scheduler.has_work):
                late.popleft()
                request = order.popleft()
                self._add(first_id + request, *requests[request], (grammars or {}).get(request, ""))
            if len(self.planned) - first_step in self.dies_at:
                self.dies_at.discard(len(self.planned) - first_step)
                self.num_deaths += 1
                to_do.clear()
                self.runner.reset()
                self.scheduler.reset_executor(self.runner.num_blocks)
            while len(to_do) <= self.steps_ahead and (step := self.scheduler.schedule()):
                to_do.append(self._launch(step))
                self.planned.append(step)
            self.max_used_blocks = max(self.max_used_blocks, self.scheduler.num_used_blocks)
            if to_do:
                self.scheduler.apply(to_do.popleft().wait())
            self.scheduler.check_integrity()
            self._collect(results)
        while to_do:  # planned ahead for sequences that have ended since
            self.scheduler.apply(to_do.popleft().wait())
        self._collect(results)
        self.scheduler.check_integrity()
        return list(results.values())

    def _add(self, seq_id: int, prompt: Sequence[int], sampling: Sampling, grammar: str) -> None:
        sequence = scheduler.Sequence(seq_id, scheduler.Prompt(array("i", prompt)), sampling, grammar=grammar)
        assert self.scheduler.refusal(sequence) is None
        self.scheduler.add(sequence)

    def _launch(self, planned: PlannedStep) -> Launched:
        step = Step("scheduler", "executor", planned.step_id, planned.sequences, planned.forget)
        launched = self.runner.launch(step)
        assert isinstance(launched, Launched), launched
        return launched

    def _collect(self, results: dict[int, Generated]) -> None:
        for update in self.scheduler.take_updates():
            result = results[update.seq_id]
            assert not result.finish_reasons, "an update came after the end"
            result.token_ids += update.token_ids
            result.num_cached_tokens = update.num_cached_tokens or result.num_cached_tokens
            result.prompt_logprobs = update.prompt_logprobs or result.prompt_logprobs
            if update.logprobs is not None:
                result.logprobs = update.logprobs if result.logprobs is None else result.logprobs + update.logprobs
            if update.finish_reason:
                result.finish_reasons.append(update.finish_reason)
                result.error = update.error
