"""What is measured while serving: how long steps take, how fast requests end, and the line that says so. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple

from protocol.messages import SequenceStep, Stats

SMOOTHING = 0.125  # weight of the newest of a running mean
LEAST_MARGIN_S = 0.0015  # a poll wakes up to a millisecond late
LARGEST_MARGIN_FRACTION = 0.25  # of a step
TOLERATED_WAIT_S = 0.0005  # sending a result and taking the next step is not waiting for the scheduler
GOOD_TIME_S = 0.001  # between a step's leaving and the result of the one before: it was there in time
MARGIN_GAIN, MARGIN_DECAY = 0.25, 0.99
SHORTEST_RETRY_S, LONGEST_RETRY_S, UNKNOWN_RETRY_S = 1.0, 60.0, 5.0


@dataclass(frozen=True, slots=True)
class StepSize:
    num_seqs: int
    num_tokens: int
    has_prompt: bool  # whether some sequence computes more than its newest token
    follows_idleness: bool = False  # nothing was to be done before it
    num_prompt_tokens: int = 0  # of sequences that compute several

    @property
    def kind(self) -> tuple[bool, int, int]:
        """Return what steps of about the same duration have in common."""
        return self.has_prompt, self.num_seqs.bit_length(), self.num_tokens.bit_length()

    @property
    def num_generating_seqs(self) -> int:
        """Return how many sequences compute a single token."""
        return self.num_tokens - self.num_prompt_tokens


def step_size(sequences: Sequence[SequenceStep], *, follows_idleness: bool) -> StepSize:
    nums_tokens = [max(1, len(sequence.token_ids) // 4) for sequence in sequences]
    num_prompt_tokens = sum(num_tokens for num_tokens in nums_tokens if num_tokens > 1)
    has_prompt = num_prompt_tokens > 0 or not all(sequence.sample for sequence in sequences)
    return StepSize(len(sequences), sum(nums_tokens), has_prompt, follows_idleness, num_prompt_tokens)


class StepPredictor:
    """When the next plan is due: as late as the executor does not notice.

    Keeps for each kind of step a running mean and mean deviation of the executor's time, and how long planning takes,
    and launching on a device that computes later: it stands still if that begins when it has nothing left to do.
    What that leaves out (messages on their way, a busy machine) is in a margin, which grows whenever the executor had
    to wait for a step that was planned ahead, and shrinks slowly when it had not.
    """

    def __init__(self) -> None:
        self._steps: dict[tuple[bool, int, int], tuple[float, float]] = {}
        self._planning_s = 0.0
        self._launch_s = 0.0
        self._margin_s = LEAST_MARGIN_S

    def observe_step(self, size: StepSize, busy_s: float) -> None:
        mean_s, deviation_s = self._steps.get(size.kind, (busy_s, busy_s / 2))
        deviation_s += SMOOTHING * (abs(busy_s - mean_s) - deviation_s)
        self._steps[size.kind] = (mean_s + SMOOTHING * (busy_s - mean_s), deviation_s)

    def observe_launch(self, seconds: float) -> None:
        self._launch_s += SMOOTHING * (seconds - self._launch_s)

    def observe_planning(self, seconds: float) -> None:
        self._planning_s += SMOOTHING * (seconds - self._planning_s)

    def observe_wait(self, size: StepSize, waited_s: float, lead_s: float) -> None:
        """Take how long the executor had nothing to do before a step that was planned while another ran.

        The step was sent `lead_s` before the other's result came: if in good time, it is not what was waited for.
        """
        mean_s, _ = self._steps.get(size.kind, (0.0, 0.0))
        was_late = waited_s > TOLERATED_WAIT_S and lead_s < GOOD_TIME_S
        margin_s = self._margin_s + MARGIN_GAIN * waited_s if was_late else self._margin_s * MARGIN_DECAY
        self._margin_s = max(LEAST_MARGIN_S, min(margin_s, LARGEST_MARGIN_FRACTION * mean_s))

    def decode_s(self, num_seqs: int) -> float:
        """Return how long a step takes in which about so many sequences generate, and no prompt is; 0 if unknown.

        "About" is the nearest number of sequences that was seen.
        """
        length = num_seqs.bit_length()
        kind = (False, length, length)
        if kind not in self._steps:
            seen = [kind for kind in self._steps if not kind[0]]
            kind = min(seen, key=lambda seen: (abs(seen[1] - length), seen), default=kind)
        mean_s, _ = self._steps.get(kind, (0.0, 0.0))
        return mean_s

    def plan_after_s(self, size: StepSize) -> float:
        """Return how long after the start of a step the next should be planned; 0 if steps like it are unknown."""
        mean_s, deviation_s = self._steps.get(size.kind, (0.0, 0.0))
        return max(0.0, mean_s - 2 * deviation_s - 2 * (self._planning_s + self._launch_s) - self._margin_s)


class StepTimes(NamedTuple):
    """Seconds of the steps of one interval: medians of the steps without and with prompt tokens."""

    decode_step_s: float = 0.0
    prefill_step_s: float = 0.0
    executor_wait_fraction: float = 0.0  # of the time in which the executor was busy or waited for the scheduler


@dataclass(slots=True)
class StepMeter:
    """Times of the steps of one interval."""

    decode_s: list[float] = field(default_factory=list)
    prefill_s: list[float] = field(default_factory=list)
    busy_s: float = 0.0
    waited_s: float = 0.0  # for the scheduler, while there was work

    def add(self, size: StepSize, busy_s: float, waited_s: float) -> None:
        (self.prefill_s if size.has_prompt else self.decode_s).append(busy_s)
        self.busy_s += busy_s
        if not size.follows_idleness:
            self.waited_s += waited_s

    def take(self) -> StepTimes:
        """Return the interval's times and start the next."""
        total_s = self.busy_s + self.waited_s
        times = StepTimes(
            median(self.decode_s) if self.decode_s else 0.0,
            median(self.prefill_s) if self.prefill_s else 0.0,
            self.waited_s / total_s if total_s else 0.0,
        )
        self.decode_s, self.prefill_s, self.busy_s, self.waited_s = [], [], 0.0, 0.0
        return times


class FinishRate:
    """How many requests end a second, lately."""

    def __init__(self) -> None:
        self._per_s = 0.0
        self._num_finished = 0

    def observe(self, num_finished: int, interval_s: float, *, is_busy: bool) -> None:
        """Take the count of all that ever finished, `interval_s` after the last; `is_busy` if some have not."""
        if num_finished == self._num_finished and not is_busy:
            return  # that nobody asked for anything says nothing about how long it takes
        recent_per_s = (num_finished - self._num_finished) / interval_s
        self._num_finished = num_finished
        self._per_s += SMOOTHING * (recent_per_s - self._per_s)

    def retry_after_s(self, num_waiting: int) -> float:
        """Return about how long a request would wait behind `num_waiting` others."""
        if self._per_s <= 0.0:
            return UNKNOWN_RETRY_S
        return min(max(num_waiting / self._per_s, SHORTEST_RETRY_S), LONGEST_RETRY_S)


def describe(before: Stats, now: Stats, times: StepTimes, interval_s: float, num_blocks: int) -> str:
    """Return the operator's line about the interval between two Stats."""
    num_queried = now.num_prefix_queried_tokens - before.num_prefix_queried_tokens
    num_hit = now.num_prefix_hit_tokens - before.num_prefix_hit_tokens
    return (
        f"prompt {(now.num_prompt_tokens - before.num_prompt_tokens) / interval_s:.0f} tokens/s,"
        f" output {(now.num_generated_tokens - before.num_generated_tokens) / interval_s:.0f} tokens/s,"
        f" running {now.num_running_seqs}, waiting {now.num_waiting_seqs},"
        f" KV use {100 * now.num_used_blocks / max(1, num_blocks):.0f}%,"
        f" prefix hits {100 * num_hit / max(1, num_queried):.0f}%,"
        f" preemptions {now.num_preemptions - before.num_preemptions},"
        f" prefill step {1000 * times.prefill_step_s:.1f} ms, decode step {1000 * times.decode_step_s:.1f} ms,"
        f" executor waited {100 * times.executor_wait_fraction:.1f}%"
    )
