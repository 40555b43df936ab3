"""Continuous batching: which tokens of which sequences each step computes. No socket, no clock, no randomness."""

from dataclasses import dataclass, field

from protocol.messages import Logprobs, SequenceStep, StepResult
from scheduler.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Limits:
    num_blocks: int  # 0 while no executor has said: then nothing is planned and nothing refused for its size
    block_size: int  # tokens
    max_model_len: int  # tokens, prompt and output together
    max_num_seqs: int  # in one step
    max_num_batched_tokens: int  # in one step
    max_num_waiting_seqs: int
    enable_prefix_caching: bool = True


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a sequence is not taken; `temporary` if it would be taken later."""

    reason: str
    temporary: bool


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """The scheduler's part of a Step message."""

    step_id: int
    sequences: list[SequenceStep]
    forget: list[int]  # seq_ids


@dataclass(frozen=True, slots=True)
class Update:
    """New tokens of one sequence, and its end if `finish_reason` is set; after that none follows."""

    seq_id: int
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None  # stop, length, abort or error
    logprobs: Logprobs | None = None
    num_cached_tokens: int = 0  # of the prompt, found in the prefix cache at first admission
    prompt_logprobs: Logprobs | None = (
        None  # of prompt tokens 1 and on; with the first update that has tokens or an end
    )
    error: str | None = None


@dataclass(slots=True)
class Counters:
    """Counts from the start on, as in messages.Stats."""

    num_prompt_tokens: int = 0
    num_generated_tokens: int = 0
    num_prefix_queried_tokens: int = 0
    num_prefix_hit_tokens: int = 0
    num_preemptions: int = 0
    num_steps: int = 0
    num_scheduled_tokens: int = 0
    finished: dict[str, int] = field(default_factory=dict)  # by finish_reason


class Scheduler:
    """Plans steps and applies their results; at most two steps are in flight."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.counters = Counters()

    @property
    def num_in_flight(self) -> int:
        """Steps planned whose result has not come."""
        raise NotImplementedError

    @property
    def has_work(self) -> bool:
        """Whether any sequence has not ended."""
        raise NotImplementedError

    @property
    def next_step_id(self) -> int:
        """The id of the next step to be planned; ids count from 1 and are never used twice."""
        raise NotImplementedError

    @property
    def num_running(self) -> int:
        raise NotImplementedError

    @property
    def num_waiting(self) -> int:
        raise NotImplementedError

    @property
    def num_used_blocks(self) -> int:
        """Blocks that a sequence or a step in flight refers to."""
        raise NotImplementedError

    @property
    def num_cached_blocks(self) -> int:
        """Blocks that nobody refers to, kept for their prefix."""
        raise NotImplementedError

    @property
    def num_free_blocks(self) -> int:
        """Blocks that hold nothing."""
        raise NotImplementedError

    @property
    def num_evicted_blocks(self) -> int:
        """Cached blocks that were taken for something else, from the start on."""
        raise NotImplementedError

    def refusal(self, sequence: Sequence) -> Refusal | None:
        """Return why `add` would be wrong now, or None."""
        raise NotImplementedError

    def add(self, sequence: Sequence) -> None:
        """Take a sequence for which `refusal` gave None."""
        raise NotImplementedError

    def abort(self, seq_id: int) -> None:
        """End a sequence with "abort"; one that has ended or never was is ignored."""
        raise NotImplementedError

    def fail(self, seq_id: int, error: str) -> None:
        """End a sequence with "error"; one that has ended or never was is ignored."""
        raise NotImplementedError

    def schedule(self) -> PlannedStep | None:
        """Return the next step, or None if there is nothing to do now. One earlier step may be in flight."""
        raise NotImplementedError

    def apply(self, result: StepResult) -> None:
        """Take the result of the oldest step in flight; that of any other step is ignored."""
        raise NotImplementedError

    def need_init(self, step_id: int, seq_ids: list[int]) -> None:
        """The executor did not do `step_id`, nor any later step: it has no state for `seq_ids`."""
        raise NotImplementedError

    def reset_executor(self, num_blocks: int) -> None:
        """The executor and all KV are gone; the next one has `num_blocks`. What can no longer fit ends with "error"."""
        raise NotImplementedError

    def take_updates(self) -> list[Update]:
        """Return what happened since the last call, in order."""
        raise NotImplementedError

    def check_integrity(self) -> None:
        """Raise AssertionError, naming what is wrong, if the accounts do not agree."""
        raise NotImplementedError
