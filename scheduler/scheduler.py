"""Continuous batching: which tokens of which sequences each step computes. No socket, no clock, no randomness.

Every sequence that was taken ends, whatever the order of events, as long as steps are done:

1. Among running sequences, let B be the one that would be preempted last (`_victim_key` is a total order: priority,
   tokens served to the tenant, arrival). Until some sequence gets a new token or ends, that order stands still,
   because recomputed tokens are not served again; a sequence that joins can only replace B by a better B.
2. B has its blocks or gets them: while others run they are preempted before B, what steps in flight hold comes free
   when these are done, and alone it fits, or it would have been refused. Those planned before B are as good in
   priority and were there before B; if preempted they come back behind it. So B advances to its next token.
3. If nothing runs, nothing but steps in flight holds blocks, so the first in waiting is admitted once these are done;
   it waits for the prefix that another computes only while that is in flight.
4. The messages of a step have a limit in bytes. The first share of a step is planned in any case, and running sequences
   are gone through in one order, so what sits out behind others is planned once these have ended.
5. A limit on the tokens of prompts holds in a step only if some sequence generates in it, and is one token or more. So
   prompts advance in any case, each after those before it, which have fewer to compute with every step.

So new tokens or ends always come, and there are finitely many of them.
"""

from array import array
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice
from operator import attrgetter

from protocol.messages import Logprobs, SequenceResult, SequenceStep, StepResult
from scheduler.blocks import BlockManager
from scheduler.integrity import check
from scheduler.interface import Counters, PlannedStep, Update
from scheduler.limits import Limits, Refusal, misfit, refusal
from scheduler.prefix import PrefixCache
from scheduler.sequence import Prompt, Sequence, Share
from scheduler.sizes import init_bytes, share_bytes, token_bytes
from scheduler.stopping import append_tokens, finish_reason, head
from scheduler.suspects import Suspects
from scheduler.tenants import TenantUsage
from scheduler.turns import Turns

__all__ = ["Limits", "PlannedStep", "Prompt", "Refusal", "Scheduler", "Sequence", "Update"]

MAX_STEPS_IN_FLIGHT = 2
LEAST_STEPS_FOR_PROMPTS = 24  # in which those that could be computed at once are, where that would keep others waiting
PRIORITY = attrgetter("priority")
QUEUE_KEY = attrgetter("queue_key")


@dataclass(slots=True)
class Plan:
    """A step that is being planned."""

    budget: int  # tokens
    prompt_budget: int  # of these, for sequences that have more than one to compute
    num_bytes: int  # that its messages still have room for
    shares: list[Share] = field(default_factory=list)

    def remove(self, share: Share) -> None:
        """Take a share out again. What it had of the budget for prompts is spent all the same."""
        self.shares.remove(share)
        self.budget += share.end - share.start


@dataclass(frozen=True, slots=True)
class StepInFlight:
    step_id: int
    shares: list[Share]
    forget: list[int]


class Scheduler:
    """Plans steps and applies their results; one step may be planned while another is in flight."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.counters = Counters()
        self.blocks = BlockManager(limits.num_blocks)
        self.prefixes = PrefixCache(self.blocks, limits.block_size, limits.enable_prefix_caching)
        self.tenants = TenantUsage()
        self.turns = Turns()
        self.suspects = Suspects()
        self.sequences: dict[int, Sequence] = {}  # that have not ended
        self.running: list[Sequence] = []  # by priority, then in order of admission
        self.waiting: list[Sequence] = []  # in the order of their `queue_key`
        self.steps_in_flight: deque[StepInFlight] = deque()
        self.num_held_blocks = 0  # let go of by their sequences, but named by a step in flight
        self.forget: dict[int, None] = {}  # seq_ids for the next step, in order
        self._updates: list[Update] = []
        self._num_planned_steps = 0
        self._num_arrivals = 0
        self.must_drain = False

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
        return self._num_planned_steps + 1

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

    def refusal(self, sequence: Sequence) -> Refusal | None:
        """Return why `add` would be wrong now, or None."""
        return refusal(sequence, self.limits, self.blocks.num_blocks, len(self.waiting))

    def add(self, sequence: Sequence) -> None:
        """Take a sequence for which `refusal` gave None. A resubmission that was complete ends at once."""
        sampling = sequence.sampling
        sequence.arrival = self._num_arrivals
        self._num_arrivals += 1
        sequence.token_bytes = token_bytes(sampling)
        sequence.share_bytes = share_bytes(sequence)
        sequence.max_num_tokens = self.limits.max_num_tokens(sequence)
        sequence.stop_token_ids = frozenset(sampling.eos_token_ids + sampling.stop_token_ids)
        if sampling.num_prompt_logprobs is not None and not sequence.output_token_ids:
            sequence.prompt_logprobs = Logprobs(sampling.num_prompt_logprobs)
        self.sequences[sequence.seq_id] = sequence
        self.tenants.join(sequence.tenant)
        sequence.turn = self.turns.join(sequence.body_id)
        sequence.num_missing_tokens = sequence.num_tokens - self.prefixes.num_known_tokens(sequence)
        insort(self.waiting, sequence, key=QUEUE_KEY)
        if sequence.output_token_ids and (reason := finish_reason(sequence)):
            self._finish(sequence, reason)

    def abort(self, seq_id: int, reason: str = "abort") -> None:
        """End a sequence of which nothing more is wanted; one that has ended or never was is ignored."""
        if sequence := self.sequences.get(seq_id):
            self._finish(sequence, reason)

    def fail(self, seq_id: int, error: str) -> None:
        """End a sequence with "error"; one that has ended or never was is ignored."""
        if sequence := self.sequences.get(seq_id):
            self._finish(sequence, "error", error=error)

    def take_updates(self) -> list[Update]:
        """Return what happened since the last call, in order."""
        updates, self._updates = self._updates, []
        return updates

    def schedule(self, max_num_prompt_tokens: int | None = None) -> PlannedStep | None:
        """Return the next step, or None if there is nothing to do now. One earlier step may be in flight.

        A sequence with one token to compute generates; one with more is a prompt, or is computed again. If some
        generate, all others together have at most `max_num_prompt_tokens` (1 at least), and leave those their token;
        where much waits, a 24th of what of it was not cached when it came, since to keep it waiting would cost more
        than it spares others.
        """
        if len(self.steps_in_flight) >= (1 if self.must_drain else MAX_STEPS_IN_FLIGHT):
            return None
        self.must_drain = False
        prompt_budget = self._prompt_budget(max_num_prompt_tokens)
        plan = Plan(self.limits.max_num_batched_tokens, prompt_budget, self.limits.max_step_bytes)
        num_preemptions = self.counters.num_preemptions
        self._plan_running(plan)
        if self.counters.num_preemptions == num_preemptions:
            self._admit_waiting(plan)
        return self._send(plan) if plan.shares else None

    def _prompt_budget(self, max_num_prompt_tokens: int | None) -> int:
        """Return how many tokens the next step may have of sequences that have more than one to compute."""
        budget = self.limits.max_num_batched_tokens
        if max_num_prompt_tokens is None:
            return budget
        nums_tokens = [sequence.num_remaining_tokens for sequence in self.running]
        num_generating = nums_tokens.count(1)
        if num_generating == 0:
            return budget
        waiting = islice(self.waiting, self.limits.max_num_seqs - len(self.running))
        num_prompt_tokens = sum(nums_tokens) - num_generating + sum(sequence.num_missing_tokens for sequence in waiting)
        most = max(max_num_prompt_tokens, num_prompt_tokens // LEAST_STEPS_FOR_PROMPTS)
        return max(1, min(most, budget + 1 - len(self.running)))

    def _plan_running(self, plan: Plan) -> None:
        for sequence in self.running.copy():
            if not plan.budget:
                return
            num_tokens = sequence.num_remaining_tokens
            if num_tokens > 1:
                num_tokens = min(num_tokens, plan.prompt_budget, plan.budget)
            if not (num_tokens and sequence.is_running):
                continue
            if num_tokens > 1 or sequence.share_bytes > plan.num_bytes or sequence.needs_init:
                num_tokens = self._num_fitting_tokens(sequence, num_tokens, plan)
                if not num_tokens:
                    continue
            has_room = sequence.num_planned_tokens + num_tokens <= sequence.num_slots
            if has_room or self._grow(sequence, num_tokens, plan):
                self._add_share(sequence, num_tokens, plan)

    def _admit_waiting(self, plan: Plan) -> None:
        """Admit in order; one that waits for its own late result or for a prefix in flight may be overtaken."""
        num_places = self.limits.max_num_seqs - len(self.running)
        for sequence in self.suspects.admissible(self.waiting, self.running)[:num_places]:
            if not (plan.budget and plan.prompt_budget):
                return
            if sequence.in_flight:
                continue
            cached_blocks = self.prefixes.find(sequence)
            if cached_blocks is None:
                continue
            num_tokens = sequence.num_tokens - len(cached_blocks) * self.limits.block_size
            num_tokens = min(num_tokens, plan.prompt_budget, plan.budget)
            num_tokens = self._num_fitting_tokens(sequence, num_tokens, plan)
            if not (num_tokens and self._admit(sequence, cached_blocks)):
                return
            self._add_share(sequence, num_tokens, plan)

    def _num_fitting_tokens(self, sequence: Sequence, num_tokens: int, plan: Plan) -> int:
        """Return how many of its next `num_tokens` tokens the step's messages have room for."""
        num_bytes = plan.num_bytes - sequence.share_bytes
        if not sequence.is_running:
            num_bytes -= 4 * self.limits.num_blocks_for(sequence.num_tokens)
        if sequence.needs_init:
            num_bytes -= init_bytes(sequence)
        return min(num_tokens, max(1 + num_bytes // sequence.token_bytes, 0 if plan.shares else 1))

    def _admit(self, sequence: Sequence, cached_blocks: list[int]) -> bool:
        """Give a waiting sequence the blocks for all its known tokens; return False if there are too few.

        One block must be left for each running sequence to grow into, or it would be preempted again at once.
        """
        num_new_blocks = self.limits.num_blocks_for(sequence.num_tokens) - len(cached_blocks)
        num_available = self.blocks.num_available - self.blocks.count_cached(cached_blocks)
        if num_new_blocks + len(self.running) > num_available:
            return False
        self._leave_waiting(sequence)
        self.blocks.acquire(cached_blocks)
        self._set_blocks(sequence, array("i", cached_blocks + self.blocks.allocate(num_new_blocks)))
        sequence.num_registered_blocks = len(cached_blocks)
        sequence.num_computed_tokens = len(cached_blocks) * self.limits.block_size
        sequence.num_planned_tokens = sequence.num_computed_tokens
        if not sequence.was_admitted:
            self._count_admission(sequence)
            self.turns.begin(sequence.turn)
        sequence.was_admitted = sequence.is_running = True
        insort(self.running, sequence, key=PRIORITY)
        return True

    def _count_admission(self, sequence: Sequence) -> None:
        num_prompt_tokens = len(sequence.prompt_token_ids)
        sequence.num_cached_tokens = min(sequence.num_computed_tokens, num_prompt_tokens)
        self.tenants.serve(sequence.tenant, num_prompt_tokens - sequence.num_cached_tokens)
        self.counters.num_prompt_tokens += num_prompt_tokens
        self.counters.num_prefix_queried_tokens += num_prompt_tokens
        self.counters.num_prefix_hit_tokens += sequence.num_cached_tokens

    def _grow(self, sequence: Sequence, num_tokens: int, plan: Plan) -> bool:
        """Give a running sequence the blocks that it lacks for its next tokens; return False if it must sit out."""
        num_blocks = self.limits.num_blocks_for(sequence.num_planned_tokens + num_tokens - sequence.num_slots)
        while num_blocks > self.blocks.num_available:
            if self.num_held_blocks:  # some come free when the step in flight is done
                return False
            victim = max(self.running, key=self._victim_key)
            self._preempt(victim, plan)
            if victim is sequence:
                return False
        self._set_blocks(sequence, sequence.block_table + array("i", self.blocks.allocate(num_blocks)))
        return True

    def _set_blocks(self, sequence: Sequence, block_table: "array[int]") -> None:
        """Give a sequence another block table. Nothing else does: it is packed here, once for many steps."""
        sequence.block_table = block_table
        sequence.packed_block_table = block_table.tobytes()
        sequence.share_bytes = share_bytes(sequence)
        sequence.num_slots = len(block_table) * self.limits.block_size

    def _victim_key(self, sequence: Sequence) -> tuple[int, int, int]:
        return sequence.priority, self.tenants.num_served_tokens(sequence.tenant), sequence.arrival

    def _preempt(self, sequence: Sequence, plan: Plan) -> None:
        if sequence.in_flight and (share := sequence.in_flight[-1]) in plan.shares:
            plan.remove(share)
            sequence.in_flight.remove(share)
            self.prefixes.leave(share)
        self.running.remove(sequence)
        self._let_go(sequence)
        self._wait_again(sequence)
        self.counters.num_preemptions += 1

    def _add_share(self, sequence: Sequence, num_tokens: int, plan: Plan) -> None:
        """Plan the next `num_tokens` tokens of a running sequence."""
        start = sequence.num_planned_tokens
        end = start + num_tokens
        num_known_tokens = sequence.num_tokens
        samples = num_known_tokens <= end and num_known_tokens < sequence.max_num_tokens
        share = Share(sequence, start, end, samples, sequence.needs_init)
        plan.num_bytes -= sequence.share_bytes
        if num_tokens > 1:
            plan.num_bytes -= (num_tokens - 1) * sequence.token_bytes
        if sequence.needs_init:
            plan.num_bytes -= init_bytes(sequence)
        sequence.num_planned_tokens = end
        sequence.needs_init = False
        sequence.in_flight.append(share)
        plan.shares.append(share)
        plan.budget -= num_tokens
        if end <= num_known_tokens:
            if num_tokens > 1 or end < num_known_tokens:
                plan.prompt_budget -= num_tokens
            self.prefixes.enter(share)

    def _send(self, plan: Plan) -> PlannedStep:
        self._num_planned_steps += 1
        forget, self.forget = list(self.forget), {}
        step = StepInFlight(self._num_planned_steps, plan.shares, forget)
        self.steps_in_flight.append(step)
        self.counters.num_steps += 1
        self.counters.num_scheduled_tokens += self.limits.max_num_batched_tokens - plan.budget
        return PlannedStep(step.step_id, [self._sequence_step(share) for share in plan.shares], forget)

    def _sequence_step(self, share: Share) -> SequenceStep:
        sequence = share.sequence
        sequence.is_on_executor = True
        block_table = sequence.packed_block_table
        if share.end <= sequence.num_slots - self.limits.block_size:
            block_table = block_table[: 4 * self.limits.num_blocks_for(share.end)]
        token_ids = sequence.pack(share.start, share.end) if share.start < sequence.num_tokens else b""
        init = sequence.make_init() if share.has_init else None
        return SequenceStep(sequence.seq_id, share.start, token_ids, block_table, share.samples, init)

    def apply(self, result: StepResult) -> None:
        """Take the result of the oldest step in flight; that of any other step is ignored."""
        if not self.steps_in_flight or self.steps_in_flight[0].step_id != result.step_id:
            return
        shares = self.steps_in_flight.popleft().shares
        assert len(shares) == len(result.sequences), f"step {result.step_id} has {len(shares)} sequences"
        not_ready = set(result.not_ready)
        for share, given in zip(shares, result.sequences, strict=True):
            sequence = share.sequence
            del sequence.in_flight[0]
            if share.hashes:
                self.prefixes.leave(share)
            if sequence.finish_reason is None and not share.is_void:
                if sequence.seq_id in not_ready:
                    self._sit_out(share)
                else:
                    self._advance(share, given)
            if share.held_blocks:
                self._release_held(share)

    def _advance(self, share: Share, given: SequenceResult) -> None:
        sequence = share.sequence
        if share.keeps_kv:
            sequence.num_computed_tokens = share.end
            if share.end >= (sequence.num_registered_blocks + 1) * self.limits.block_size:
                self.prefixes.register(sequence)
        if given.prompt_logprobs is not None:
            sequence.collect_prompt_logprobs(share.start + 1, given.prompt_logprobs)
        if share.samples:
            self._take_tokens(sequence, given)
        elif share.end == sequence.num_tokens:  # no chunk: there is no token to sample
            self._finish(sequence, "length")

    def _take_tokens(self, sequence: Sequence, given: SequenceResult) -> None:
        token_ids, reason = append_tokens(sequence, given.token_ids)
        if not token_ids:
            self._finish(sequence, "error", error="the executor gave no token")
            return
        num_tokens = len(token_ids)
        self.tenants.serve(sequence.tenant, num_tokens)
        self.counters.num_generated_tokens += num_tokens
        if sequence.num_deaths:
            self.suspects.clear(sequence)
        logprobs = given.logprobs
        if logprobs is not None and num_tokens < len(given.token_ids):
            logprobs = head(logprobs, num_tokens)
        if reason:
            self._finish(sequence, reason, token_ids, logprobs)
        else:
            self._update(sequence, token_ids, None, logprobs)

    def _sit_out(self, share: Share) -> None:
        """Nothing of a share was computed, so what was planned on top of it says nothing either."""
        self._roll_back(share)
        for later in share.sequence.in_flight:
            later.is_void, later.samples = True, False
            share.sequence.needs_init = True  # whatever the executor made of it

    def _roll_back(self, share: Share) -> None:
        """Plan the tokens of a share again."""
        if share.keeps_kv:
            share.sequence.num_planned_tokens = share.start
        if share.has_init:
            share.sequence.needs_init = True

    def need_init(self, step_id: int, seq_ids: Iterable[int]) -> None:
        """The executor did not do `step_id`, nor any later step: it has no state for `seq_ids`.

        Nothing is planned until the steps before are done. A step that is not in flight is ignored.
        """
        if all(step.step_id != step_id for step in self.steps_in_flight):
            return
        while self.steps_in_flight and self.steps_in_flight[-1].step_id >= step_id:
            self._cancel(self.steps_in_flight.pop())
        self.must_drain = True
        for seq_id in seq_ids:
            if sequence := self.sequences.get(seq_id):
                sequence.needs_init = True

    def _cancel(self, step: StepInFlight) -> None:
        for share in step.shares:
            sequence = share.sequence
            sequence.in_flight.remove(share)
            self.prefixes.leave(share)
            if not share.is_void:
                self._roll_back(share)
            if share.held_blocks and sequence.in_flight:
                sequence.in_flight[-1].held_blocks = share.held_blocks
            elif share.held_blocks:
                self._release_held(share)
        self.forget = dict.fromkeys(step.forget) | self.forget

    def reset_executor(self, num_blocks: int) -> None:
        """The executor and all KV are gone; the next has `num_blocks`.

        What can no longer fit ends with "error", and so does a sequence that was in flight alone, not the first time.
        """
        culprit = self.suspects.accuse({share.sequence for step in self.steps_in_flight for share in step.shares})
        self.steps_in_flight.clear()
        self.prefixes.clear()
        self.forget.clear()
        self.num_held_blocks = 0
        self.must_drain = False
        self.blocks.reset(num_blocks)
        running, self.running = self.running, []
        for sequence in self.sequences.values():
            sequence.in_flight.clear()
            self._set_blocks(sequence, array("i"))
            sequence.is_on_executor = False
            sequence.num_missing_tokens = sequence.num_tokens
        for sequence in running:
            self._wait_again(sequence)
        if culprit:
            self.fail(culprit.seq_id, "the executor died with this request alone, and not for the first time")
        for sequence in list(self.sequences.values()):
            if reason := misfit(sequence, self.limits, num_blocks):
                self._finish(sequence, "error", error=reason)

    def give_up(self) -> None:
        """The executor does not do the steps in flight: go on as if it had died, but have it forget what it knows."""
        known = [seq_id for step in self.steps_in_flight for seq_id in step.forget] + list(self.forget)
        known += [sequence.seq_id for sequence in self.sequences.values() if sequence.is_on_executor]
        self.reset_executor(self.blocks.num_blocks)
        self.forget = dict.fromkeys(known)

    def check_integrity(self) -> None:
        """Raise AssertionError, naming what is wrong, if the accounts do not agree."""
        check(self)

    def _finish(
        self,
        sequence: Sequence,
        reason: str,
        token_ids: list[int] | None = None,
        logprobs: Logprobs | None = None,
        error: str | None = None,
    ) -> None:
        """End a sequence, running or waiting; what is still in flight for it will be ignored."""
        if sequence.is_running:
            self.running.remove(sequence)
            sequence.is_running = False
        else:
            self._leave_waiting(sequence)
        sequence.finish_reason = reason
        self._let_go(sequence)
        self._forget_on_executor(sequence)
        self.tenants.leave(sequence.tenant)
        self.turns.leave(sequence.body_id)
        self.suspects.clear(sequence)
        del self.sequences[sequence.seq_id]
        self.counters.finished[reason] = self.counters.finished.get(reason, 0) + 1
        self._update(sequence, token_ids or [], reason, logprobs, error)

    def _update(
        self,
        sequence: Sequence,
        token_ids: list[int],
        reason: str | None,
        logprobs: Logprobs | None,
        error: str | None = None,
    ) -> None:
        prompt_logprobs = None
        if sequence.prompt_logprobs is not None and (token_ids or reason == "length"):
            prompt_logprobs, sequence.prompt_logprobs = sequence.prompt_logprobs, None
        num_cached_tokens = sequence.num_cached_tokens
        self._updates.append(
            Update(sequence.seq_id, token_ids, reason, logprobs, num_cached_tokens, prompt_logprobs, error)
        )

    def _let_go(self, sequence: Sequence) -> None:
        """Release the blocks of a sequence, once the last step in flight that names them is done."""
        block_table = sequence.block_table
        self._set_blocks(sequence, array("i"))
        for share in sequence.in_flight:
            share.keeps_kv = False
        if not sequence.in_flight:
            self.blocks.release(block_table)
        elif block_table:
            sequence.in_flight[-1].held_blocks = block_table
            self.num_held_blocks += len(block_table)

    def _release_held(self, share: Share) -> None:
        assert share.held_blocks is not None
        self.num_held_blocks -= len(share.held_blocks)
        self.blocks.release(share.held_blocks)

    def _wait_again(self, sequence: Sequence) -> None:
        """Put a sequence that holds no block any more back among the waiting, with the tokens that it has."""
        sequence.is_running = False
        sequence.num_computed_tokens = sequence.num_planned_tokens = sequence.num_registered_blocks = 0
        sequence.needs_init = True
        self._forget_on_executor(sequence)
        insort(self.waiting, sequence, key=QUEUE_KEY)

    def _leave_waiting(self, sequence: Sequence) -> None:
        index = bisect_left(self.waiting, sequence.queue_key, key=QUEUE_KEY)
        assert self.waiting[index] is sequence
        del self.waiting[index]

    def _forget_on_executor(self, sequence: Sequence) -> None:
        if sequence.is_on_executor:
            sequence.is_on_executor = False
            self.forget[sequence.seq_id] = None
