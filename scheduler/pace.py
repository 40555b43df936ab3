"""How many tokens of prompts a step may have while some sequences generate, so that streams do not pause. Pure."""

from collections import deque
from statistics import median_low

from octavo.scheduler.predictor import StepPredictor, StepSize

NUM_KEPT_STEPS = 9  # their median is robust against a first step that compiles, or a busy moment
MIN_PROMPT_TOKENS = 8  # with fewer, chance counts more than the time of a token


class Pace:
    """Assumes that a step with prompts lasts as long as one without, plus a constant time for each prompt token."""

    def __init__(self, predictor: StepPredictor, target_step_s: float) -> None:
        self._predictor = predictor
        self._target_step_s = target_step_s
        self._token_s: deque[float] = deque(maxlen=NUM_KEPT_STEPS)  # a prompt token took in the last steps

    def observe_step(self, size: StepSize, busy_s: float) -> None:
        if size.num_prompt_tokens < MIN_PROMPT_TOKENS:
            return
        prompts_s = busy_s - self._predictor.decode_s(size.num_generating_seqs)
        if prompts_s > 0:
            self._token_s.append(prompts_s / size.num_prompt_tokens)

    def max_num_prompt_tokens(self, num_generating_seqs: int, block_size: int) -> int | None:
        """Return how many tokens of prompts a step may have, if about so many sequences generate in it.

        At least one block, however long it takes, and at least enough tokens to learn from: otherwise the limit would
        stay low for ever after a few slow steps. None while no prompt has been measured.
        """
        if not self._token_s:
            return None
        decode_s = self._predictor.decode_s(num_generating_seqs)
        prompts_s = max(self._target_step_s - decode_s, decode_s)
        return max(block_size, MIN_PROMPT_TOKENS, round(prompts_s / median_low(self._token_s)))
