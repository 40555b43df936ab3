"""How the tokens of one sequence are chosen: plain numbers that the gateway has checked."""

from typing import Annotated

import msgspec
from msgspec import Meta

Natural = Annotated[int, Meta(ge=0, le=2**31 - 1)]  # an executor has them in columns of 64 bits


class Sampling(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Sampling of one sequence. Every field is set by the gateway; a default here means "off".

    Stop ids are two lists: `eos_token_ids` is what the model says (empty when the request ignores them),
    `stop_token_ids` is what the user asked for. `min_tokens` masks both.
    """

    max_tokens: Natural
    seed: Annotated[int, Meta(ge=0)]  # 64 bits, unsigned
    temperature: Annotated[float, Meta(ge=0.0, le=2.0)] = 1.0  # 0 is greedy
    top_k: Natural = 0  # 0 is off
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] = 1.0
    min_p: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.0
    presence_penalty: Annotated[float, Meta(ge=-2.0, le=2.0)] = 0.0
    frequency_penalty: Annotated[float, Meta(ge=-2.0, le=2.0)] = 0.0
    repetition_penalty: Annotated[float, Meta(gt=0.0)] = 1.0
    min_tokens: Natural = 0
    eos_token_ids: tuple[int, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    logit_bias: tuple[tuple[int, float], ...] = ()  # token id, added to its logit
    num_logprobs: Natural | None = None  # alternatives a token beside its own; None is none at all
    num_prompt_logprobs: Natural | None = None  # the same for the prompt

    @property
    def has_penalties(self) -> bool:
        """Whether a token's chance depends on the output before it."""
        return bool(self.repetition_penalty != 1.0 or self.presence_penalty or self.frequency_penalty)
