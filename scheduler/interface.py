"""What the Scheduler returns."""

from dataclasses import dataclass, field

import msgspec

from octavo.protocol.messages import Logprobs, SequenceStep


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """The scheduler's part of a Step message."""

    step_id: int
    sequences: list[SequenceStep]
    forget: list[int]  # seq_ids


class Update(msgspec.Struct, frozen=True, gc=False):
    """New tokens of one sequence, and its end if `finish_reason` is set; after that none follows."""

    seq_id: int
    token_ids: list[int] = []
    finish_reason: str | None = None  # stop, length, abort or error
    logprobs: Logprobs | None = None
    num_cached_tokens: int = 0  # of the prompt, found in the prefix cache at first admission
    prompt_logprobs: Logprobs | None = (
        None  # of prompt tokens 1 and on; with the first update that has tokens or an end
    )
    error: str | None = None
    embedding: bytes = b""  # float32; with the end of an "embed" sequence


@dataclass(slots=True)
class Counters:
    """Counts from the start of the Scheduler on, as in messages.Stats."""

    num_prompt_tokens: int = 0
    num_generated_tokens: int = 0
    num_prefix_queried_tokens: int = 0
    num_prefix_hit_tokens: int = 0
    num_preemptions: int = 0
    num_steps: int = 0
    num_scheduled_tokens: int = 0
    finished: dict[str, int] = field(default_factory=dict)  # by finish_reason
