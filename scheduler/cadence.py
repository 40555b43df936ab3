"""When the next step is planned, and how many tokens of prompts it may have. Pure: no clock."""

from octavo.protocol.messages import StepResult
from octavo.scheduler.executor_link import SentStep
from octavo.scheduler.pace import Pace
from octavo.scheduler.predictor import StepPredictor


class Cadence:
    """Learns from the steps that are done. Times are seconds of the caller's clock."""

    def __init__(self, target_step_s: float) -> None:
        self._predictor = StepPredictor()
        self._pace = Pace(self._predictor, target_step_s)
        self._oldest_started_s = 0.0  # when the executor began the oldest step in flight
        self.follows_idleness = True  # there was nothing to do at some time since the last step was sent

    def plan_at_s(self, oldest: SentStep | None) -> float:
        """Return when to plan the next step, while `oldest` is the oldest step in flight."""
        return 0.0 if oldest is None else self._oldest_started_s + self._predictor.plan_after_s(oldest.size)

    def max_num_prompt_tokens(self, num_generating_seqs: int, block_size: int) -> int | None:
        """Return how many tokens of prompts a step may have in which about so many sequences generate."""
        return self._pace.max_num_prompt_tokens(num_generating_seqs, block_size)

    def send(self, step: SentStep, started_s: float, now_s: float) -> None:
        """Take a step that was planned from `started_s` on and has been sent."""
        if not step.is_ahead:
            self._oldest_started_s = started_s
        self.follows_idleness = False
        self._predictor.observe_planning(now_s - started_s)

    def complete(self, step: SentStep, result: StepResult, now_s: float) -> None:
        """Take the oldest step, which is done: the executor begins the one after it."""
        lead_s, self._oldest_started_s = self._oldest_started_s - step.sent_s, now_s
        self._predictor.observe_step(step.size, result.busy_s)
        self._predictor.observe_launch(result.launch_s)
        self._pace.observe_step(step.size, result.busy_s)
        if step.is_ahead:
            self._predictor.observe_wait(step.size, result.waited_s, lead_s)
