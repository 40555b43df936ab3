"""How the executor chooses the tokens of one sequence: plain numbers, checked by the gateway."""

from typing import Annotated

import msgspec
from msgspec import Meta

Natural = Annotated[int, Meta(ge=0, le=2**31 - 1)]  # fits the executor's columns of 64 bits


class Sampling(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Sampling of one sequence. The gateway sets every field; a default here means "off".

    There are two lists of stop ids: `eos_token_ids` are the model's (empty if the request ignores them),
    `stop_token_ids` the user's. `min_tokens` masks both.
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
    logit_bias: tuple[tuple[int, float], ...] = ()  # token id, number that is added to its logit
    num_logprobs: Natural | None = None  # alternatives beside each token; None: no log probabilities
    num_prompt_logprobs: Natural | None = None  # the same for prompt tokens
    ends_late: bool = False  # with a grammar: an eos only where it allows nothing else

    @property
    def has_penalties(self) -> bool:
        """Whether the probability of a token depends on the tokens before it beyond the model."""
        return bool(self.repetition_penalty != 1.0 or self.presence_penalty or self.frequency_penalty)
