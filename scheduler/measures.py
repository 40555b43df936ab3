"""How long requests wait, compute their prompt and generate, and how large and long steps are. Pure: no clock.

A request counts once in each life of the scheduler, also if it is preempted and recomputed. If it is resubmitted to a
new life, it counts there from its arrival.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from octavo.protocol.measures import REQUEST_BOUNDS_S, STEP_BOUNDS_S, STEP_BOUNDS_SEQS, STEP_BOUNDS_TOKENS, Histogram
from octavo.protocol.messages import EngineHistograms, SequenceStep
from octavo.scheduler.interface import Update
from octavo.scheduler.predictor import StepSize


@dataclass(slots=True)
class Milestones:
    """When one request reached each stage, in seconds of the caller's clock."""

    arrived_s: float
    planned_s: float | None = None
    first_token_s: float | None = None


class Measures:
    """The histograms of messages.EngineHistograms."""

    def __init__(self) -> None:
        self._queue_s, self._prefill_s = Histogram(REQUEST_BOUNDS_S), Histogram(REQUEST_BOUNDS_S)
        self._decode_s, self._inference_s = Histogram(REQUEST_BOUNDS_S), Histogram(REQUEST_BOUNDS_S)
        self._step_s = Histogram(STEP_BOUNDS_S)
        self._step_seqs, self._step_tokens = Histogram(STEP_BOUNDS_SEQS), Histogram(STEP_BOUNDS_TOKENS)
        self._milestones: dict[int, Milestones] = {}  # by seq_id, of those that have not ended

    def arrive(self, seq_id: int, now_s: float) -> None:
        self._milestones[seq_id] = Milestones(now_s)

    def plan(self, sequences: Iterable[SequenceStep], now_s: float) -> None:
        """Take the sequences of a planned step. A new sequence comes with its `init`."""
        for sequence in sequences:
            if sequence.init is None:
                continue
            milestones = self._milestones.get(sequence.seq_id)
            if milestones is not None and milestones.planned_s is None:
                milestones.planned_s = now_s
                self._queue_s.observe(now_s - milestones.arrived_s)

    def complete(self, size: StepSize, busy_s: float) -> None:
        """Take a step that was done."""
        self._step_s.observe(busy_s)
        self._step_seqs.observe(size.num_seqs)
        self._step_tokens.observe(size.num_tokens)

    def progress(self, updates: Iterable[Update], now_s: float) -> None:
        """Take first tokens and ends of sequences."""
        for update in updates:
            milestones = self._milestones.get(update.seq_id)
            if milestones is None:
                continue
            if milestones.first_token_s is None and update.token_ids and milestones.planned_s is not None:
                milestones.first_token_s = now_s
                self._prefill_s.observe(now_s - milestones.planned_s)
            if update.finish_reason is not None:
                del self._milestones[update.seq_id]
                if update.finish_reason in ("stop", "length"):
                    self._end(milestones, now_s)

    def _end(self, milestones: Milestones, now_s: float) -> None:
        if milestones.planned_s is not None and milestones.first_token_s is not None:
            self._decode_s.observe(now_s - milestones.first_token_s)
            self._inference_s.observe(now_s - milestones.planned_s)

    def read(self) -> EngineHistograms:
        return EngineHistograms(
            queue_s=self._queue_s.read(),
            prefill_s=self._prefill_s.read(),
            decode_s=self._decode_s.read(),
            inference_s=self._inference_s.read(),
            step_s=self._step_s.read(),
            step_seqs=self._step_seqs.read(),
            step_tokens=self._step_tokens.read(),
        )
