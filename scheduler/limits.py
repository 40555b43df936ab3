"""Limits of one step, one sequence and the queue, and which sequences are refused because of them."""

from dataclasses import dataclass

from octavo.protocol.messages import Task, excess_of_prompt_logprobs
from octavo.scheduler.sequence import Sequence
from octavo.scheduler.sizes import MAX_STEP_BYTES


@dataclass(frozen=True, slots=True)
class Limits:
    num_blocks: int  # 0: not known yet; no step is planned, and no sequence is refused for its size
    block_size: int  # tokens
    max_model_len: int  # tokens, prompt and output together
    max_num_seqs: int  # in one step
    max_num_batched_tokens: int  # in one step
    max_num_waiting_seqs: int
    enable_prefix_caching: bool = True
    max_step_bytes: int = MAX_STEP_BYTES  # of a step's messages, Step and StepResult together
    tasks: tuple[Task, ...] = ("generate",)  # of the model
    embedding_size: int = 0  # numbers of a vector
    embeds_all_tokens: bool = False  # no token of a prompt that is embedded may come from the prefix cache
    whole_prompts: bool = False  # a prompt is computed in one share, and shares no prefix

    @property
    def shares_prefixes(self) -> bool:
        return self.enable_prefix_caching and not self.whole_prompts

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def max_num_tokens(self, sequence: Sequence) -> int:
        """Return at how many tokens, prompt and output together, a sequence ends with "length"."""
        return min(len(sequence.prompt_token_ids) + sequence.sampling.max_tokens, self.max_model_len)


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a sequence is not taken; `temporary` if it may be taken later."""

    reason: str
    temporary: bool


def refusal(sequence: Sequence, limits: Limits, num_blocks: int, num_waiting_seqs: int) -> Refusal | None:
    """Return why a sequence cannot be taken now, or None. A full queue does not stop one that was taken before."""
    if reason := _unsupported(sequence, limits) or misfit(sequence, limits, num_blocks):
        return Refusal(reason, temporary=False)
    if num_waiting_seqs >= limits.max_num_waiting_seqs and not sequence.output_token_ids:
        return Refusal(f"{num_waiting_seqs} requests are waiting already", temporary=True)
    return None


def misfit(sequence: Sequence, limits: Limits, num_blocks: int) -> str | None:
    """Return why a sequence cannot run in a pool of `num_blocks`, even alone, or None.

    The token that is sampled last is never computed. The size of a pool of 0 blocks is not known yet.
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
    if limits.whole_prompts and num_prompt_tokens > limits.max_num_batched_tokens:
        return (
            f"the prompt has {num_prompt_tokens} tokens; one step computes it, and a step has"
            f" {limits.max_num_batched_tokens} (--max-num-batched-tokens)"
        )
    if sequence.task not in limits.tasks:
        return f"this model cannot {sequence.task}"
    if excess := excess_of_prompt_logprobs(num_prompt_tokens, sequence.sampling.num_prompt_logprobs):
        return excess
    return None
