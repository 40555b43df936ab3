"""Soft state: what the executor remembers of a sequence between steps, always rebuildable from a SequenceInit."""

from array import array
from dataclasses import dataclass, field

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
    """One sequence: how many tokens it has, those that came with its shares, and how many have KV in the cache."""

    sampling: SamplingParams
    num_prompt_tokens: int
    num_known_tokens: int  # prompt and output, less what is pending
    first_token_index: int  # of `token_ids`: what was in the cache before has no share
    num_computed_tokens: int
    counts: TokenCounts | None  # None: no penalty
    prompt_token_ids: "array[int]"  # empty unless log probabilities of the prompt are wanted
    token_ids: "array[int]" = field(default_factory=lambda: array("i"))
    num_pending_tokens: int = 0  # sampled, and known to the device alone
    pending_row: int | None = None  # of the last one of these, among what its step sampled

    @classmethod
    def from_init(cls, init: SequenceInit, num_computed_tokens: int) -> "SequenceState":
        """Return the state of a sequence whose first `num_computed_tokens` are in the KV cache.

        Raises ValueError for a grammar or an adapter: this executor has neither.
        """
        if init.grammar or init.adapter:
            raise ValueError(f"this executor has no {'grammars' if init.grammar else 'adapters'}")
        return cls(
            sampling=init.sampling,
            num_prompt_tokens=init.num_prompt_tokens,
            num_known_tokens=init.num_prompt_tokens + init.num_output_tokens,
            first_token_index=num_computed_tokens,
            num_computed_tokens=num_computed_tokens,
            counts=_count(init) if init.sampling.has_penalties else None,
            prompt_token_ids=unpack_ids(init.prompt_token_ids),
        )

    @property
    def num_tokens(self) -> int:
        return self.num_known_tokens + self.num_pending_tokens

    @property
    def num_output_tokens(self) -> int:
        return self.num_tokens - self.num_prompt_tokens

    def needs_pending(self, share: SequenceStep) -> bool:
        """Return whether `share` cannot be computed before the host knows the pending token.

        Penalties count it, and tokens that a scheduler names are compared with it.
        """
        if self.pending_row is None:
            return False
        names_it = share.num_computed_tokens + len(share.token_ids) // 4 > self.num_known_tokens
        return (bool(share.token_ids) and names_it) or (self.counts is not None and share.sample)

    def share_token_ids(self, share: SequenceStep) -> "array[int] | None":
        """Return the tokens that `share` computes, and learn them; None if it does not continue this state.

        PENDING stands for the token that only the device knows.
        """
        start, length = self.num_computed_tokens, self.num_tokens
        if share.num_computed_tokens != start:
            return None
        if self.pending_row is not None and not share.token_ids:
            return array("i", [PENDING]) if start + 1 == length else None
        token_ids = unpack_ids(share.token_ids) or self.token_ids[-1:]
        end = start + len(token_ids)
        if not token_ids or end > self.num_known_tokens or (end < length and (share.sample or not share.token_ids)):
            return None
        first = start - self.first_token_index
        known = self.token_ids[first : first + len(token_ids)]
        if known != token_ids[: len(known)]:
            return None
        self.token_ids += token_ids[len(known) :]
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
        self.num_known_tokens += 1
        self.token_ids.append(token_id)
        if self.counts is not None:
            self.counts.add(token_id)


def _count(init: SequenceInit) -> TokenCounts:
    counts = TokenCounts()
    for token_id in unpack_ids(init.distinct_prompt_token_ids):
        counts.add(token_id, 0)
    for token_id in unpack_ids(init.output_token_ids):
        counts.add(token_id)
    return counts
