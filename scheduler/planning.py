"""What the next step computes: running sequences first, then waiting ones, within the limits of a step. Pure."""

from array import array
from dataclasses import dataclass, field
from itertools import islice

from octavo.protocol.messages import SequenceStep
from octavo.scheduler.accounts import Accounts, StepInFlight
from octavo.scheduler.interface import PlannedStep
from octavo.scheduler.sequence import PlannedShare, Sequence
from octavo.scheduler.sizes import init_bytes

MAX_STEPS_IN_FLIGHT = 2
MAX_STEPS_TO_DRAIN_PROMPTS = 24


@dataclass(slots=True)
class Plan:
    """A step that is being planned, and what is left of its limits."""

    budget: int  # tokens
    prompt_budget: int  # tokens of the budget that prompts may have
    num_bytes: int  # of the step's messages
    shares: list[PlannedShare] = field(default_factory=list)

    def remove(self, share: PlannedShare) -> None:
        """Take a share out again. Its part of the budget for prompts stays spent."""
        self.shares.remove(share)
        self.budget += share.end - share.start


def plan_step(accounts: Accounts, max_num_prompt_tokens: int | None) -> PlannedStep | None:
    """Return the next step, or None if there is nothing to do now."""
    if accounts.num_in_flight >= (1 if accounts.must_drain else MAX_STEPS_IN_FLIGHT):
        return None
    accounts.must_drain = False
    limits = accounts.limits
    plan = Plan(
        budget=limits.max_num_batched_tokens,
        prompt_budget=_prompt_budget(accounts, max_num_prompt_tokens),
        num_bytes=limits.max_step_bytes,
    )
    num_preemptions = accounts.counters.num_preemptions
    _plan_running(accounts, plan)
    if accounts.counters.num_preemptions == num_preemptions:
        _admit_waiting(accounts, plan)
    return _put_in_flight(accounts, plan) if plan.shares else None


def _prompt_budget(accounts: Accounts, max_num_prompt_tokens: int | None) -> int:
    """Return how many tokens of prompts the next step may have.

    With many prompts waiting, at least 1/24 of their uncached tokens are computed per step; holding them back longer
    would cost more than it saves.
    """
    budget = accounts.limits.max_num_batched_tokens
    if max_num_prompt_tokens is None:
        return budget
    num_generating = num_prompt_tokens = 0
    for sequence in accounts.running:
        num_tokens = sequence.num_remaining_tokens
        if num_tokens > sequence.num_samples_a_step:
            num_prompt_tokens += num_tokens
        elif num_tokens:
            num_generating += 1
    if num_generating == 0:
        return budget
    waiting = islice(accounts.waiting, accounts.limits.max_num_seqs - len(accounts.running))
    num_prompt_tokens += sum(sequence.num_missing_tokens for sequence in waiting)
    most = max(max_num_prompt_tokens, num_prompt_tokens // MAX_STEPS_TO_DRAIN_PROMPTS)
    return max(1, min(most, budget + 1 - len(accounts.running)))


def _plan_running(accounts: Accounts, plan: Plan) -> None:
    for sequence in accounts.running.copy():
        if not plan.budget:
            return
        num_tokens = sequence.num_remaining_tokens
        if num_tokens > sequence.num_samples_a_step:
            num_tokens = min(num_tokens, plan.prompt_budget, plan.budget)
        if not (num_tokens and sequence.is_running):
            continue
        if num_tokens > 1 or sequence.share_bytes > plan.num_bytes or sequence.needs_init:
            num_tokens = _num_fitting_tokens(accounts, plan, sequence, num_tokens)
            if not num_tokens:
                continue
        has_room = sequence.num_planned_tokens + num_tokens <= sequence.num_slots
        if has_room or _grow(accounts, plan, sequence, num_tokens):
            _add_share(accounts, plan, sequence, num_tokens)


def _admit_waiting(accounts: Accounts, plan: Plan) -> None:
    """Admit in order. A sequence that waits for its own late result, or for a prefix in flight, may be overtaken."""
    num_places = accounts.limits.max_num_seqs - len(accounts.running)
    for sequence in accounts.suspects.admissible(accounts.waiting, accounts.running)[:num_places]:
        if not (plan.budget and plan.prompt_budget):
            return
        if sequence.in_flight:
            continue
        cached_blocks = accounts.prefixes.find(sequence)
        if cached_blocks is None:
            continue
        num_tokens = sequence.num_tokens - len(cached_blocks) * accounts.limits.block_size
        num_tokens = min(num_tokens, plan.prompt_budget, plan.budget)
        num_tokens = _num_fitting_tokens(accounts, plan, sequence, num_tokens)
        if accounts.limits.whole_prompts and num_tokens < sequence.num_tokens:
            return
        if not (num_tokens and _admit(accounts, sequence, cached_blocks)):
            return
        _add_share(accounts, plan, sequence, num_tokens)


def _num_fitting_tokens(accounts: Accounts, plan: Plan, sequence: Sequence, num_tokens: int) -> int:
    """Return how many of a sequence's next `num_tokens` tokens the step's messages have room for."""
    num_bytes = plan.num_bytes - sequence.share_bytes
    if not sequence.is_running:
        num_bytes -= 4 * accounts.limits.num_blocks_for(sequence.num_tokens)
    if sequence.needs_init:
        num_bytes -= init_bytes(sequence)
    return min(num_tokens, max(1 + num_bytes // sequence.token_bytes, 0 if plan.shares else 1))


def _admit(accounts: Accounts, sequence: Sequence, cached_blocks: list[int]) -> bool:
    """Give a waiting sequence the blocks for all its known tokens; return False if there are too few.

    Each running sequence must be left one block to grow into, or the new one would be preempted again at once.
    """
    limits, blocks = accounts.limits, accounts.blocks
    num_new_blocks = limits.num_blocks_for(sequence.num_tokens) - len(cached_blocks)
    if num_new_blocks + len(accounts.running) > blocks.num_available - blocks.count_cached(cached_blocks):
        return False
    is_first_time = not sequence.was_admitted
    accounts.start_running(sequence)
    blocks.acquire(cached_blocks)
    accounts.set_blocks(sequence, array("i", cached_blocks + blocks.allocate(num_new_blocks)))
    sequence.num_registered_blocks = len(cached_blocks)
    sequence.num_computed_tokens = sequence.num_planned_tokens = len(cached_blocks) * limits.block_size
    if is_first_time:
        _count_admission(accounts, sequence)
        accounts.turns.begin(sequence.turn)
    return True


def _count_admission(accounts: Accounts, sequence: Sequence) -> None:
    counters, num_prompt_tokens = accounts.counters, len(sequence.prompt_token_ids)
    sequence.num_cached_tokens = min(sequence.num_computed_tokens, num_prompt_tokens)
    accounts.tenants.serve(sequence.tenant, num_prompt_tokens - sequence.num_cached_tokens)
    counters.num_prompt_tokens += num_prompt_tokens
    counters.num_prefix_queried_tokens += num_prompt_tokens
    counters.num_prefix_hit_tokens += sequence.num_cached_tokens


def _grow(accounts: Accounts, plan: Plan, sequence: Sequence, num_tokens: int) -> bool:
    """Give a running sequence the blocks that it lacks for its next tokens; return False if it must sit out."""
    blocks = accounts.blocks
    num_blocks = accounts.limits.num_blocks_for(sequence.num_planned_tokens + num_tokens - sequence.num_slots)
    while num_blocks > blocks.num_available:
        if accounts.num_held_blocks:  # some come free when the step in flight is done
            return False
        victim = max(accounts.running, key=lambda each: _victim_key(accounts, each))
        _preempt(accounts, plan, victim)
        if victim is sequence:
            return False
    accounts.set_blocks(sequence, sequence.block_table + array("i", blocks.allocate(num_blocks)))
    return True


def _victim_key(accounts: Accounts, sequence: Sequence) -> tuple[int, int, int]:
    return sequence.priority, accounts.tenants.num_served_tokens(sequence.tenant), sequence.arrival


def _preempt(accounts: Accounts, plan: Plan, sequence: Sequence) -> None:
    if sequence.in_flight and (share := sequence.in_flight[-1]) in plan.shares:
        plan.remove(share)
        sequence.in_flight.remove(share)
        accounts.prefixes.leave(share)
    accounts.preempt(sequence)


def _add_share(accounts: Accounts, plan: Plan, sequence: Sequence, num_tokens: int) -> None:
    """Plan the next `num_tokens` tokens of a running sequence."""
    start = sequence.num_planned_tokens
    end = start + num_tokens
    num_known_tokens = sequence.num_tokens
    num_samples = sequence.num_samples_a_step if end >= num_known_tokens else 0
    share = PlannedShare(sequence, start, end, num_samples, sequence.needs_init)
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
        if num_tokens > num_samples:
            plan.prompt_budget -= num_tokens
        accounts.prefixes.enter(share)


def _put_in_flight(accounts: Accounts, plan: Plan) -> PlannedStep:
    accounts.num_planned_steps += 1
    forget, accounts.forget = list(accounts.forget), {}
    step = StepInFlight(accounts.num_planned_steps, plan.shares, forget)
    accounts.steps_in_flight.append(step)
    accounts.counters.num_steps += 1
    accounts.counters.num_scheduled_tokens += accounts.limits.max_num_batched_tokens - plan.budget
    block_size = accounts.limits.block_size
    return PlannedStep(step.step_id, [_sequence_step(share, block_size) for share in plan.shares], forget)


def _sequence_step(share: PlannedShare, block_size: int) -> SequenceStep:
    sequence = share.sequence
    sequence.is_on_executor = True
    block_table = sequence.packed_block_table
    if share.end <= sequence.num_slots - block_size:
        block_table = block_table[: 4 * -(-share.end // block_size)]
    token_ids = sequence.pack(share.start, share.end) if share.start < sequence.num_tokens else b""
    init = sequence.make_init() if share.has_init else None
    return SequenceStep(sequence.seq_id, share.start, token_ids, block_table, share.num_samples > 0, init)
