"""One running generation, and its shares of the steps in flight."""

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

from octavo.protocol.messages import Logprobs, SequenceInit, Task
from octavo.protocol.sampling import Sampling


def no_ids() -> "array[int]":
    return array("i")


@dataclass(slots=True, eq=False, weakref_slot=True)
class Prompt:
    """What the sequences of one prompt have in common: its tokens, and what was computed from them."""

    token_ids: "array[int]"  # int32
    # Of its full blocks, as many as were needed so far. All sequences of a prompt have its tenant and cache salt.
    block_hashes: list[bytes] = field(init=False, default_factory=list)
    _distinct_token_ids: bytes = field(init=False, default=b"")

    def distinct_token_ids(self) -> bytes:
        """Return the tokens of the prompt, each once, as int32 bytes."""
        if not self._distinct_token_ids:
            self._distinct_token_ids = array("i", sorted(set(self.token_ids))).tobytes()
        return self._distinct_token_ids


@dataclass(slots=True, eq=False)
class Sequence:
    """What a Submit asks for (the first fields), and how far it is (the others, which only the scheduler changes).

    Progress is numbers: `num_computed_tokens` <= `num_planned_tokens` <= `num_tokens`. `num_planned_tokens` may be one
    more while a token that is still being sampled is planned on. Prefill, chunk, decode and resumption differ only in
    the distance between the numbers.
    """

    seq_id: int
    prompt: Prompt
    sampling: Sampling
    output_token_ids: "array[int]" = field(
        default_factory=no_ids
    )  # int32; grows; not empty at the start of a resubmission
    tenant: str = ""
    priority: int = 0  # lower goes first
    cache_salt: str = ""
    body_id: str = ""
    task: Task = "generate"
    grammar: str = ""  # handed on, never read

    num_tokens: int = field(init=False)  # of prompt and output so far
    arrival: int = field(init=False, default=0)
    turn: int = field(init=False, default=0)  # of its body, among the waiting
    share_bytes: int = field(init=False, default=0)  # that a share of one token takes in messages
    token_bytes: int = field(init=False, default=0)  # that each further token takes
    max_num_tokens: int = field(init=False, default=0)  # prompt and output; here it ends with "length"
    num_samples_a_step: int = field(init=False, default=1)  # tokens that a step can sample for it; 0: it wants no token
    stop_token_ids: frozenset[int] = field(init=False, default=frozenset())
    num_computed_tokens: int = field(init=False, default=0)  # whose KV exists
    num_planned_tokens: int = field(init=False, default=0)  # whose KV exists once the steps in flight are done
    num_cached_tokens: int = field(init=False, default=0)  # of the prompt, found at first admission
    # Tokens that the prefix cache lacked when the sequence came; all its tokens, once the executor was lost.
    num_missing_tokens: int = field(init=False, default=0)
    block_table: "array[int]" = field(init=False, default_factory=no_ids)
    packed_block_table: bytes = field(init=False, default=b"")  # the same, as int32
    num_slots: int = field(init=False, default=0)  # tokens that its blocks have room for
    block_hashes: list[bytes] = field(init=False, default_factory=list)  # as many as were needed so far
    num_registered_blocks: int = field(init=False, default=0)  # of the table; other sequences can find them
    in_flight: "list[PlannedShare]" = field(init=False, default_factory=list)  # oldest first
    is_running: bool = field(init=False, default=False)
    was_admitted: bool = field(init=False, default=False)
    needs_init: bool = field(init=False, default=True)
    is_on_executor: bool = field(init=False, default=False)  # the executor may keep state for it
    finish_reason: str | None = field(init=False, default=None)
    prompt_logprobs: Logprobs | None = field(init=False, default=None)  # collected so far; None: not wanted, or sent
    num_deaths: int = field(init=False, default=0)  # of executors while it was in flight, since its last token
    embedding_bytes: int = field(init=False, default=0)  # of its vector; 0: it generates
    embeds_all_tokens: bool = field(init=False, default=False)  # its vector needs all tokens computed in one life

    def __post_init__(self) -> None:
        self.num_tokens = len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def prompt_token_ids(self) -> "array[int]":
        return self.prompt.token_ids

    @property
    def num_remaining_tokens(self) -> int:
        """Tokens that can be planned now, including a token that is being sampled."""
        in_flight = self.in_flight
        if not in_flight or not (num_samples := in_flight[-1].num_samples):
            return self.num_tokens - self.num_planned_tokens
        # Unless the token in flight is the last one, it can be planned on.
        return 1 if self.num_tokens + num_samples < self.max_num_tokens else 0

    @property
    def generates(self) -> bool:
        """Whether its next share can sample after each of its tokens: no other token is left to compute."""
        return 0 < self.num_remaining_tokens <= self.num_samples_a_step

    @property
    def init_has_output(self) -> bool:
        """Whether an executor must know all of its output to go on."""
        return self.sampling.has_penalties or bool(self.grammar)

    @property
    def queue_key(self) -> tuple[int, bool, int, int]:
        """Order of waiting: priority; sequences that ran before come first, newcomers take turns; arrival."""
        return self.priority, not self.was_admitted, 0 if self.was_admitted else self.turn, self.arrival

    @property
    def max_num_cached_tokens(self) -> int:
        """Tokens that may come from the prefix cache: not the last one, and no token whose logprobs are missing.

        A vector that is made of all tokens leaves none.
        """
        if self.embeds_all_tokens:
            return 0
        if self.prompt_logprobs is None or self.prompt_logprobs.num_tokens >= len(self.prompt_token_ids) - 1:
            return self.num_tokens - 1
        return self.prompt_logprobs.num_tokens

    def pack(self, start: int, end: int) -> bytes:
        """Return the known token ids from `start` to `end` as int32 bytes."""
        num_prompt_tokens = len(self.prompt_token_ids)
        if start >= num_prompt_tokens:
            return self.output_token_ids[start - num_prompt_tokens : end - num_prompt_tokens].tobytes()
        packed = self.prompt_token_ids[start:end].tobytes()
        if end > num_prompt_tokens:
            packed += self.output_token_ids[: end - num_prompt_tokens].tobytes()
        return packed

    def make_init(self) -> SequenceInit:
        """Return all that an executor must know to go on from the tokens that are known now."""
        sampling = self.sampling
        return SequenceInit(
            sampling=sampling,
            num_prompt_tokens=len(self.prompt_token_ids),
            num_output_tokens=len(self.output_token_ids),
            prompt_token_ids=self.prompt_token_ids.tobytes() if self.prompt_logprobs is not None else b"",
            distinct_prompt_token_ids=self.prompt.distinct_token_ids() if sampling.repetition_penalty != 1.0 else b"",
            output_token_ids=self.output_token_ids.tobytes() if self.init_has_output else b"",
            task=self.task,
            grammar=self.grammar,
        )

    def collect_prompt_logprobs(self, first_token_index: int, given: Logprobs) -> None:
        """Add the new ones of the given log probabilities, which begin at prompt token `first_token_index`."""
        if self.prompt_logprobs is None:
            return
        num_known = self.prompt_logprobs.num_tokens  # of tokens 1 and on
        new = given.tail(num_known + 1 - first_token_index)
        self.prompt_logprobs = self.prompt_logprobs + new if num_known else new


class PlannedShare(msgspec.Struct, eq=False):
    """One sequence's part of a step in flight: positions `start` to `end`."""

    sequence: Sequence
    start: int
    end: int
    num_samples: int  # tokens that it samples; 0 for a chunk, which ends before the sequence's last token
    has_init: bool
    hashes: Iterable[bytes] = ()  # of the blocks that it fills, as far as they are known
    keeps_kv: bool = True  # False once the sequence let go of its blocks: its token counts, its KV is gone
    is_void: bool = False  # its result means nothing: the share before it was not computed
    held_blocks: "array[int] | None" = None  # released when this step is done; the sequence let go of them before

    def roll_back(self) -> None:
        """Have the tokens of this share planned again."""
        if self.keeps_kv:
            self.sequence.num_planned_tokens = self.start
        if self.has_init:
            self.sequence.needs_init = True
