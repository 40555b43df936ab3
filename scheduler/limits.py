"""What one step, one sequence and the queue may be, and which sequences are refused for it."""

from dataclasses import dataclass

from protocol.messages import excess_of_prompt_logprobs
from scheduler.sequence import Sequence
from scheduler.sizes import MAX_STEP_BYTES


@dataclass(frozen=True, slots=True)
class Limits:
    num_blocks: int  # 0 while no executor has said: then nothing is planned, and nothing refused for its size
    block_size: int  # tokens
    max_model_len: int  # tokens, prompt and output together
    max_num_seqs: int  # in one step
    max_num_batched_tokens: int  # in one step
    max_num_waiting_seqs: int
    enable_prefix_caching: bool = True
    max_step_bytes: int = MAX_STEP_BYTES  # of a step's messages, there and back

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def max_num_tokens(self, sequence: Sequence) -> int:
        """Return how many tokens, prompt and output together, a sequence has when it ends with "length"."""
        return min(len(sequence.prompt_token_ids) + sequence.sampling.max_tokens, self.max_model_len)


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a sequence is not taken; `temporary` if it may be taken later."""

    reason: str
    temporary: bool


def refusal(sequence: Sequence, limits: Limits, num_blocks: int, num_waiting_seqs: int) -> Refusal | None:
    """Return why a sequence cannot be taken now, or None. One that has output was taken before, and is not put off."""
    if reason := _unsupported(sequence, limits) or misfit(sequence, limits, num_blocks):
        return Refusal(reason, temporary=False)
    if num_waiting_seqs >= limits.max_num_waiting_seqs and not sequence.output_token_ids:
        return Refusal(f"{num_waiting_seqs} requests are waiting already", temporary=True)
    return None


def misfit(sequence: Sequence, limits: Limits, num_blocks: int) -> str | None:
    """Return why a sequence cannot run in a pool of `num_blocks`, even alone, or None.

    The token that is sampled last is never computed. A pool of no blocks is one that is not known yet.
    """
    num_tokens = max(len(sequence.prompt_token_ids), limits.max_num_tokens(sequence) - 1)
    num_needed_blocks = limits.num_blocks_for(num_tokens)
    if not num_blocks or num_needed_blocks <= num_blocks:
        return None
    return f"{num_tokens} tokens need {num_needed_blocks} KV blocks; the pool has {num_blocks}"


def _unsupported(sequence: Sequence, limits: Limits) -> str | None:
    num_prompt_tokens = len(sequence.prompt_token_ids)
    if not num_prompt_tokens:
        return "the prompt is empty"
    if num_prompt_tokens > limits.max_model_len:
        return f"the prompt has {num_prompt_tokens} tokens; the model takes {limits.max_model_len}"
    if excess := excess_of_prompt_logprobs(num_prompt_tokens, sequence.sampling.num_prompt_logprobs):
        return excess
    return None
