"""How long a step will take, learned from the steps before, and when the next one is to be planned. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from octavo.protocol.messages import SequenceStep

SMOOTHING = 0.125  # weight of the newest value in a running mean
MIN_MARGIN_S = 0.0015  # a poll wakes up to a millisecond late
MAX_MARGIN_FRACTION = 0.25  # of a step
TOLERATED_WAIT_S = 0.0005  # it takes the executor so long to send a result and to take the next step
MIN_LEAD_S = 0.001  # a step that was sent this long before the last result came was there in time
MARGIN_GAIN, MARGIN_DECAY = 0.25, 0.99


@dataclass(frozen=True, slots=True)
class StepSize:
    num_seqs: int
    num_tokens: int
    num_prompt_seqs: int = 0  # that compute more tokens than they sample
    num_prompt_tokens: int = 0  # of these sequences
    follows_idleness: bool = False  # there was nothing to do before it

    @property
    def kind(self) -> tuple[bool, int, int]:
        """Steps of one kind take about the same time."""
        return self.has_prompt, self.num_seqs.bit_length(), self.num_tokens.bit_length()

    @property
    def has_prompt(self) -> bool:
        return self.num_prompt_seqs > 0

    @property
    def num_generating_seqs(self) -> int:
        """How many sequences sample after each token that they compute."""
        return self.num_seqs - self.num_prompt_seqs


def step_size(sequences: Sequence[SequenceStep], *, follows_idleness: bool) -> StepSize:
    nums_tokens = [max(1, len(sequence.token_ids) // 4) for sequence in sequences]
    of_prompts = [n for n, sequence in zip(nums_tokens, sequences, strict=True) if n > int(sequence.sample)]
    return StepSize(
        num_seqs=len(sequences),
        num_tokens=sum(nums_tokens),
        num_prompt_seqs=len(of_prompts),
        num_prompt_tokens=sum(of_prompts),
        follows_idleness=follows_idleness,
    )


class StepPredictor:
    """When to plan the next step: as late as possible without making the executor wait.

    Keeps a running mean and mean deviation of the executor's time for each kind of step, and how long planning takes,
    and launching on a device that computes later: the launch must be over before the device runs out of work. A margin
    covers everything else (messages on their way, a busy machine). It grows whenever the executor had to wait for a
    step that was planned ahead, and shrinks slowly when the executor did not wait.
    """

    def __init__(self) -> None:
        self._steps: dict[tuple[bool, int, int], tuple[float, float]] = {}
        self._planning_s = 0.0
        self._launch_s = 0.0
        self._margin_s = MIN_MARGIN_S

    def observe_step(self, size: StepSize, busy_s: float) -> None:
        mean_s, deviation_s = self._steps.get(size.kind, (busy_s, busy_s / 2))
        deviation_s += SMOOTHING * (abs(busy_s - mean_s) - deviation_s)
        self._steps[size.kind] = (mean_s + SMOOTHING * (busy_s - mean_s), deviation_s)

    def observe_launch(self, seconds: float) -> None:
        self._launch_s += SMOOTHING * (seconds - self._launch_s)

    def observe_planning(self, seconds: float) -> None:
        self._planning_s += SMOOTHING * (seconds - self._planning_s)

    def observe_wait(self, size: StepSize, waited_s: float, lead_s: float) -> None:
        """Take how long the executor had nothing to do before a step that was planned while another step ran.

        The step was sent `lead_s` before the other step's result came. If that was early enough, the executor did not
        wait for the step.
        """
        mean_s, _ = self._steps.get(size.kind, (0.0, 0.0))
        was_late = waited_s > TOLERATED_WAIT_S and lead_s < MIN_LEAD_S
        margin_s = self._margin_s + MARGIN_GAIN * waited_s if was_late else self._margin_s * MARGIN_DECAY
        self._margin_s = max(MIN_MARGIN_S, min(margin_s, MAX_MARGIN_FRACTION * mean_s))

    def decode_s(self, num_seqs: int) -> float:
        """Return how long a step takes without prompts, if about `num_seqs` sequences generate in it; 0 if unknown.

        It is the time for the nearest number of sequences that was seen.
        """
        length = num_seqs.bit_length()
        kind = (False, length, length)
        if kind not in self._steps:
            seen = [kind for kind in self._steps if not kind[0]]
            kind = min(seen, key=lambda seen: (abs(seen[1] - length), seen), default=kind)
        mean_s, _ = self._steps.get(kind, (0.0, 0.0))
        return mean_s

    def plan_after_s(self, size: StepSize) -> float:
        """Return how long after the start of a step to plan the next step; 0 if this kind of step is unknown."""
        mean_s, deviation_s = self._steps.get(size.kind, (0.0, 0.0))
        return max(0.0, mean_s - 2 * deviation_s - 2 * (self._planning_s + self._launch_s) - self._margin_s)
