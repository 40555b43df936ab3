"""Who waits, who runs, which blocks each sequence has, and the moves between these states."""

from array import array
from bisect import bisect_left, insort
from collections import deque
from dataclasses import dataclass
from operator import attrgetter

from octavo.protocol.messages import Logprobs
from octavo.scheduler.blocks import BlockManager
from octavo.scheduler.interface import Counters, Update
from octavo.scheduler.limits import Limits
from octavo.scheduler.prefix import PrefixCache
from octavo.scheduler.sequence import PlannedShare, Sequence
from octavo.scheduler.sizes import share_bytes
from octavo.scheduler.suspects import Suspects
from octavo.scheduler.tenants import TenantUsage
from octavo.scheduler.turns import Turns

PRIORITY = attrgetter("priority")
QUEUE_KEY = attrgetter("queue_key")


@dataclass(frozen=True, slots=True)
class StepInFlight:
    step_id: int
    shares: list[PlannedShare]
    forget: list[int]


class Accounts:
    """All sequences that have not ended, and all blocks. Planning, results and recovery work on one of these."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.counters = Counters()
        self.blocks = BlockManager(limits.num_blocks)
        self.prefixes = PrefixCache(self.blocks, limits.block_size, limits.shares_prefixes)
        self.tenants = TenantUsage()
        self.turns = Turns()
        self.suspects = Suspects()
        self.sequences: dict[int, Sequence] = {}  # that have not ended
        self.running: list[Sequence] = []  # by priority, then in order of admission
        self.waiting: list[Sequence] = []  # in the order of their `queue_key`
        self.steps_in_flight: deque[StepInFlight] = deque()
        self.num_held_blocks = 0  # their sequences let go of them, but a step in flight names them
        self.forget: dict[int, None] = {}  # seq_ids for the next step, in order
        self.updates: list[Update] = []  # what happened since the server last asked
        self.num_planned_steps = 0
        self.num_arrivals = 0
        self.must_drain = False  # plan no step until those in flight are done

    @property
    def num_in_flight(self) -> int:
        """Steps planned whose result has not come."""
        return len(self.steps_in_flight)

    @property
    def has_work(self) -> bool:
        """Whether any sequence has not ended."""
        return bool(self.sequences)

    @property
    def next_step_id(self) -> int:
        """The id of the next step to be planned; ids count from 1 and are never used twice."""
        return self.num_planned_steps + 1

    @property
    def num_running(self) -> int:
        return len(self.running)

    @property
    def num_waiting(self) -> int:
        return len(self.waiting)

    @property
    def num_used_blocks(self) -> int:
        """Blocks that a sequence or a step in flight refers to."""
        return self.blocks.num_used

    @property
    def num_cached_blocks(self) -> int:
        """Blocks that nobody refers to, kept for their prefix."""
        return self.blocks.num_cached

    @property
    def num_free_blocks(self) -> int:
        """Blocks that hold nothing."""
        return self.blocks.num_free

    @property
    def num_evicted_blocks(self) -> int:
        """Cached blocks that were taken for something else, from the start on."""
        return self.blocks.num_evicted

    def set_blocks(self, sequence: Sequence, block_table: "array[int]") -> None:
        """Give a sequence another block table. Every change of a table goes through here: the table is packed once for
        many steps."""
        sequence.block_table = block_table
        sequence.packed_block_table = block_table.tobytes()
        sequence.share_bytes = share_bytes(sequence)
        sequence.num_slots = len(block_table) * self.limits.block_size

    def let_go(self, sequence: Sequence) -> None:
        """Release the blocks of a sequence once the last step in flight that names them is done."""
        block_table = sequence.block_table
        self.set_blocks(sequence, array("i"))
        for share in sequence.in_flight:
            share.keeps_kv = False
        if not sequence.in_flight:
            self.blocks.release(block_table)
        elif block_table:
            sequence.in_flight[-1].held_blocks = block_table
            self.num_held_blocks += len(block_table)

    def release_held(self, share: PlannedShare) -> None:
        """Release the blocks that a share held until its step was done."""
        assert share.held_blocks is not None
        self.num_held_blocks -= len(share.held_blocks)
        self.blocks.release(share.held_blocks)

    def start_running(self, sequence: Sequence) -> None:
        """Move a waiting sequence to the running ones."""
        self._leave_waiting(sequence)
        sequence.was_admitted = sequence.is_running = True
        insort(self.running, sequence, key=PRIORITY)

    def preempt(self, sequence: Sequence) -> None:
        """Take the blocks of a running sequence: it will be computed again."""
        self.running.remove(sequence)
        self.let_go(sequence)
        self.wait_again(sequence)
        self.counters.num_preemptions += 1

    def wait_again(self, sequence: Sequence) -> None:
        """Put a sequence that no longer holds blocks back among the waiting ones; it keeps its tokens."""
        sequence.is_running = False
        sequence.num_computed_tokens = sequence.num_planned_tokens = sequence.num_registered_blocks = 0
        sequence.needs_init = True
        self._forget_on_executor(sequence)
        insort(self.waiting, sequence, key=QUEUE_KEY)

    def finish(
        self,
        sequence: Sequence,
        reason: str,
        token_ids: list[int] | None = None,
        logprobs: Logprobs | None = None,
        error: str | None = None,
        embedding: bytes = b"",
    ) -> None:
        """End a running or waiting sequence; results that are still in flight for it will be ignored."""
        if sequence.is_running:
            self.running.remove(sequence)
            sequence.is_running = False
        else:
            self._leave_waiting(sequence)
        sequence.finish_reason = reason
        self.let_go(sequence)
        self._forget_on_executor(sequence)
        self.tenants.leave(sequence.tenant)
        self.turns.leave(sequence.body_id)
        self.suspects.clear(sequence)
        del self.sequences[sequence.seq_id]
        self.counters.finished[reason] = self.counters.finished.get(reason, 0) + 1
        self.update(sequence, token_ids or [], reason, logprobs, error, embedding)

    def update(
        self,
        sequence: Sequence,
        token_ids: list[int],
        reason: str | None,
        logprobs: Logprobs | None,
        error: str | None = None,
        embedding: bytes = b"",
    ) -> None:
        """Tell the server what a sequence got."""
        prompt_logprobs = None
        if sequence.prompt_logprobs is not None and (token_ids or reason == "length"):
            prompt_logprobs, sequence.prompt_logprobs = sequence.prompt_logprobs, None
        self.updates.append(
            Update(
                seq_id=sequence.seq_id,
                token_ids=token_ids,
                finish_reason=reason,
                logprobs=logprobs,
                num_cached_tokens=sequence.num_cached_tokens,
                prompt_logprobs=prompt_logprobs,
                error=error,
                embedding=embedding,
            )
        )

    def _leave_waiting(self, sequence: Sequence) -> None:
        index = bisect_left(self.waiting, sequence.queue_key, key=QUEUE_KEY)
        assert self.waiting[index] is sequence
        del self.waiting[index]

    def _forget_on_executor(self, sequence: Sequence) -> None:
        if sequence.is_on_executor:
            sequence.is_on_executor = False
            self.forget[sequence.seq_id] = None
