"""How much of prompts a step may compute while some sequences generate, so that their streams do not pause. Pure."""

from collections import deque
from statistics import median_low

from scheduler.predictor import StepPredictor, StepSize

NUM_KEPT_STEPS = 9  # whose median is robust: a first step that compiles, or a machine that is busy for a moment
LEAST_PROMPT_TOKENS = 8  # fewer tell more of chance than of what a token takes


class Pace:
    """Takes a step with prompts to last as long as one without, and so much longer for each of their tokens."""

    def __init__(self, predictor: StepPredictor, target_step_s: float) -> None:
        self._predictor = predictor
        self._target_step_s = target_step_s
        self._token_s: deque[float] = deque(maxlen=NUM_KEPT_STEPS)  # for each token of a prompt, in the last steps

    def observe_step(self, size: StepSize, busy_s: float) -> None:
        if size.num_prompt_tokens < LEAST_PROMPT_TOKENS:
            return
        prompts_s = busy_s - self._predictor.decode_s(size.num_generating_seqs)
        if prompts_s > 0:
            self._token_s.append(prompts_s / size.num_prompt_tokens)

    def max_num_prompt_tokens(self, num_generating_seqs: int, block_size: int) -> int | None:
        """Return how many tokens of prompts a step may have in which about so many sequences generate.

        It is a block at least, whatever that takes, and enough to learn from: with fewer, what a few slow steps taught
        would never be unlearned. None while nothing is known of what prompts take.
        """
        if not self._token_s:
            return None
        decode_s = self._predictor.decode_s(num_generating_seqs)
        prompts_s = max(self._target_step_s - decode_s, decode_s)
        return max(block_size, LEAST_PROMPT_TOKENS, round(prompts_s / median_low(self._token_s)))
