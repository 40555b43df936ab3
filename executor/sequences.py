"""Soft state: what the executor remembers of a sequence between steps, always rebuildable from a SequenceInit."""

from array import array
from dataclasses import dataclass

import numpy as np

from protocol.messages import SequenceInit, SequenceStep, unpack_ids
from protocol.sampling import SamplingParams

PENDING = 0  # in the place of a token that only the device knows: an id that every vocabulary has


class TokenCounts:
    """The distinct tokens that penalties apply to, and how often each stands in the output.

    Sparse: a step costs what the sequence has used of the vocabulary, not the vocabulary.
    """

    def __init__(self) -> None:
        self._slots: dict[int, int] = {}
        self._ids = array("i")
        self._counts = array("i")

    def add(self, token_id: int, count: int = 1) -> None:
        """Count `token_id` `count` times more; 0 only makes it known (a prompt's token)."""
        slot = self._slots.setdefault(token_id, len(self._ids))
        if slot == len(self._ids):
            self._ids.append(token_id)
            self._counts.append(0)
        self._counts[slot] += count

    def arrays(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the tokens, int64, and their counts, float32."""
        return np.array(self._ids, dtype=np.int64), np.array(self._counts, dtype=np.float32)


@dataclass(slots=True)
class SequenceState:
    """One sequence: its tokens, and for how many of them the KV cache is computed."""

    sampling: SamplingParams
    num_prompt_tokens: int
    token_ids: "array[int]"  # prompt, then output, as far as the host knows it
    num_computed_tokens: int
    counts: TokenCounts | None  # None: no penalty
    needs_prompt_logprobs: bool
    num_pending_tokens: int = 0  # sampled, and known to the device alone
    pending_row: int | None = None  # of the last one of these, among what its step sampled

    @classmethod
    def from_init(cls, init: SequenceInit, num_computed_tokens: int) -> "SequenceState":
        """Return the state of a sequence whose first `num_computed_tokens` are in the KV cache.

        Raises ValueError for a grammar or an adapter: this executor has neither.
        """
        if init.grammar or init.adapter:
            raise ValueError(f"this executor has no {'grammars' if init.grammar else 'adapters'}")
        prompt, output = unpack_ids(init.prompt_token_ids), unpack_ids(init.output_token_ids)
        return cls(
            sampling=init.sampling,
            num_prompt_tokens=len(prompt),
            token_ids=prompt + output,
            num_computed_tokens=num_computed_tokens,
            counts=_count(init.sampling, prompt, output),
            # They go out with the first output token: a sequence that has one has delivered them.
            needs_prompt_logprobs=init.sampling.num_prompt_logprobs is not None and not output,
        )

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids) + self.num_pending_tokens

    @property
    def num_output_tokens(self) -> int:
        return self.num_tokens - self.num_prompt_tokens

    def needs_pending(self, share: SequenceStep) -> bool:
        """Return whether `share` cannot be computed before the host knows the pending token.

        Penalties count it, and tokens that a scheduler names are compared with it.
        """
        if self.pending_row is None:
            return False
        names_it = share.num_computed_tokens + len(share.token_ids) // 4 > len(self.token_ids)
        return (bool(share.token_ids) and names_it) or (self.counts is not None and share.sample)

    def share_token_ids(self, share: SequenceStep) -> "array[int] | None":
        """Return the tokens that `share` computes, or None if it does not continue this state.

        PENDING stands for the token that only the device knows.
        """
        start, length = self.num_computed_tokens, self.num_tokens
        if share.num_computed_tokens != start:
            return None
        if self.pending_row is not None and not share.token_ids:
            return array("i", [PENDING]) if start + 1 == length else None
        token_ids = unpack_ids(share.token_ids) or self.token_ids[-1:]
        end = start + len(token_ids)
        if (
            not token_ids
            or (end < length and (share.sample or not share.token_ids))
            or token_ids != self.token_ids[start:end]
        ):
            return None
        return token_ids

    def sampled(self, row: int) -> None:
        """Take note that a token was sampled, as row `row` of its step."""
        self.num_pending_tokens += 1
        self.pending_row = row

    def append(self, token_id: int) -> None:
        """Learn the first of the pending tokens."""
        self.num_pending_tokens -= 1
        if not self.num_pending_tokens:
            self.pending_row = None
        self.token_ids.append(token_id)
        if self.counts is not None:
            self.counts.add(token_id)


def _count(sampling: SamplingParams, prompt: "array[int]", output: "array[int]") -> TokenCounts | None:
    repetition = sampling.repetition_penalty != 1.0
    if not (repetition or sampling.presence_penalty or sampling.frequency_penalty):
        return None
    counts = TokenCounts()
    if repetition:
        for token_id in prompt:
            counts.add(token_id, 0)
    for token_id in output:
        counts.add(token_id)
    return counts
