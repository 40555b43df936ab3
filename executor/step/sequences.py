"""Soft state: what the executor remembers of a sequence between steps. A SequenceInit can always rebuild it."""

from array import array
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from octavo.executor.step.grammars import Matcher
from octavo.protocol.messages import SequenceInit, SequenceStep, unpack_ids
from octavo.protocol.sampling import Sampling

SPARE_SLOTS = 64  # of new counts, for tokens to come
PENDING = 0  # stands for a token that only the device knows; every vocabulary has this id


class TokenCounts:
    """The distinct tokens that penalties apply to, and how often each stands in the output.

    The counts are sparse: a step's cost grows with the distinct tokens of the sequence, not with the vocabulary. The
    arrays have spare room, so that a new token costs the same however many there are.
    """

    def __init__(self, prompt_ids: np.ndarray, output_ids: np.ndarray) -> None:
        """Count the output's tokens; the prompt's tokens begin with a count of 0."""
        output_ids, output_counts = np.unique(output_ids, return_counts=True)
        self._first_ids = np.union1d(prompt_ids, output_ids).astype(np.int32)  # ascending, in the slots 0, 1, ...
        self._later_slots: dict[int, int] = {}
        self.size = len(self._first_ids)
        self._last_slot = 0
        self._ids = np.zeros(self.size + SPARE_SLOTS, np.int32)
        self._counts = np.zeros(self.size + SPARE_SLOTS, np.float32)
        self._ids[: self.size] = self._first_ids
        self._counts[self._first_ids.searchsorted(output_ids)] = output_counts

    def add(self, token_id: int) -> None:
        """Count a token of the output."""
        slot = int(self._first_ids.searchsorted(token_id))
        if slot == len(self._first_ids) or self._first_ids[slot] != token_id:
            slot = self._later_slots.setdefault(token_id, self.size)
        if slot == self.size:
            self._append(token_id)
        self._counts[slot] += 1
        self._last_slot = slot

    def arrays(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the tokens, int32, and their counts, float32; spare room follows the last of them.

        The caller reads them before the next token is added.
        """
        return self._ids, self._counts

    def last(self) -> tuple[int, int, float]:
        """Return the slot of the last added token, its id, and its count; slot 0 if none was added."""
        slot = self._last_slot
        return slot, self._ids.item(slot), self._counts.item(slot)

    def _append(self, token_id: int) -> None:
        if self.size == len(self._ids):
            spare = np.zeros(len(self._ids), np.int32)
            self._ids = np.concatenate([self._ids, spare])
            self._counts = np.concatenate([self._counts, spare.astype(np.float32)])
        self._ids[self.size] = token_id
        self.size += 1


@dataclass(slots=True)
class SequenceState:
    """One sequence: the number of its tokens, the tokens of its shares, and how many tokens have KV in the cache."""

    sampling: Sampling
    num_prompt_tokens: int
    num_known_tokens: int  # prompt and output, without pending tokens
    first_token_index: int  # of `token_ids`; earlier tokens were in the cache and have no share
    num_computed_tokens: int
    counts: TokenCounts | None  # None: no penalty
    bias: "tuple[np.ndarray, np.ndarray] | None"  # token ids (int32, distinct) and their biases (float32)
    stop_ids: np.ndarray | None  # int32, distinct: ids that min_tokens forbids; None: no ids, or a grammar does it
    prompt_token_ids: "array[int]"  # empty unless log probabilities of the prompt are wanted
    token_ids: "array[int]" = field(default_factory=lambda: array("i"))
    num_pending_tokens: int = 0  # sampled tokens that only the device knows
    pending_row: int | None = None  # row of the last pending token among its step's samples
    embeds: bool = False
    collected_E: Tensor | None = None  # what the next chunk of a prompt that is embedded is added to
    has_grammar: bool = False
    matcher: Matcher | None = None  # of the grammar, on rank 0
    sat_out: bool = False  # its last share was not computed: one that was planned on top does not fit

    @classmethod
    def from_init(cls, init: SequenceInit, num_computed_tokens: int, matcher: Matcher | None = None) -> "SequenceState":
        """Return the state of a sequence whose first `num_computed_tokens` are in the KV cache."""
        return cls(
            sampling=init.sampling,
            num_prompt_tokens=init.num_prompt_tokens,
            num_known_tokens=init.num_prompt_tokens + init.num_output_tokens,
            first_token_index=num_computed_tokens,
            num_computed_tokens=num_computed_tokens,
            counts=_count(init) if init.sampling.has_penalties else None,
            bias=_bias(init.sampling) if init.sampling.logit_bias else None,
            stop_ids=_stop_ids(init.sampling) if init.sampling.min_tokens and not init.grammar else None,
            prompt_token_ids=unpack_ids(init.prompt_token_ids),
            embeds=init.task == "embed",
            has_grammar=bool(init.grammar),
            matcher=matcher,
        )

    @property
    def num_tokens(self) -> int:
        return self.num_known_tokens + self.num_pending_tokens

    @property
    def num_output_tokens(self) -> int:
        return self.num_tokens - self.num_prompt_tokens

    @property
    def forbids_stop_ids(self) -> bool:
        """Return whether min_tokens forbids stop ids for the next token."""
        return self.stop_ids is not None and self.num_output_tokens < self.sampling.min_tokens

    @property
    def has_edits(self) -> bool:
        """Return whether the next token's logits are changed before it is chosen."""
        return self.counts is not None or self.bias is not None or self.forbids_stop_ids

    def needs_pending(self, share: SequenceStep) -> bool:
        """Return whether the host must know the pending token before it computes `share`.

        Penalties count the token, and tokens that the scheduler names are compared with it.
        """
        if self.pending_row is None:
            return False
        names_it = share.num_computed_tokens + len(share.token_ids) // 4 > self.num_known_tokens
        return (bool(share.token_ids) and names_it) or (self.counts is not None and share.sample)

    def share_token_ids(self, share: SequenceStep) -> "array[int] | None":
        """Return the tokens that `share` computes, and learn them; None if `share` does not continue this state.

        PENDING stands for a token that only the device knows.
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
        """Note that a token was sampled, in row `row` of its step."""
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
        if self.matcher is not None:
            self.matcher.learn(token_id)


def _count(init: SequenceInit) -> TokenCounts:
    return TokenCounts(_int32(init.distinct_prompt_token_ids), _int32(init.output_token_ids))


def _int32(packed: bytes) -> np.ndarray:
    return np.frombuffer(packed, np.int32)


def _bias(sampling: Sampling) -> tuple[np.ndarray, np.ndarray]:
    # A token may be named twice; its last bias holds. Entries must be distinct: they are written in no order.
    added = dict(sampling.logit_bias)
    return np.array(list(added), np.int32), np.array(list(added.values()), np.float32)


def _stop_ids(sampling: Sampling) -> np.ndarray:
    return np.array(sorted({*sampling.eos_token_ids, *sampling.stop_token_ids}), np.int32)
