"""What goes into the Scheduler and comes out of it, beside sequences."""

from dataclasses import dataclass, field

from protocol.messages import Logprobs, SequenceStep


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
