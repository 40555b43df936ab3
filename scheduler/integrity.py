"""Whether a scheduler's accounts agree: for idle moments, and for tests after every step."""

from itertools import pairwise
from typing import TYPE_CHECKING

from scheduler.sequence import Sequence, Share

if TYPE_CHECKING:
    from scheduler.scheduler import Scheduler


def check(scheduler: "Scheduler") -> None:
    """Raise AssertionError, naming what is wrong, if two accounts of the same thing differ."""
    shares = [share for step in scheduler.steps_in_flight for share in step.shares]
    held = [share.held_blocks for share in shares if share.held_blocks]
    scheduler.blocks.check_integrity([sequence.block_table for sequence in scheduler.running] + held)
    assert scheduler.num_held_blocks == sum(map(len, held)), "the blocks held by steps in flight are miscounted"
    assert set(shares).issuperset(scheduler.prefixes.computing.values()), "a hash is computed by no step in flight"
    _check_queues(scheduler)
    _check_steps(scheduler, shares)
    for sequence in scheduler.running:
        _check_running(scheduler, sequence)
        _check_shared_blocks(scheduler, sequence)
    for sequence in scheduler.waiting:
        _check_waiting(sequence)


def _check_queues(scheduler: "Scheduler") -> None:
    running, waiting = scheduler.running, scheduler.waiting
    queued = [sequence.seq_id for sequence in running + waiting]
    assert sorted(queued) == sorted(scheduler.sequences), "running and waiting are not all sequences, each once"
    keys = [sequence.queue_key for sequence in waiting]
    assert all(a < b for a, b in pairwise(keys)), "the waiting sequences are out of order"
    assert all(a.priority <= b.priority for a, b in pairwise(running)), "the running sequences are out of order"
    assert len(running) <= scheduler.limits.max_num_seqs, "too many sequences run"
    assert scheduler.tenants.num_seqs == len(queued), "the tenants' sequences are miscounted"


def _check_steps(scheduler: "Scheduler", shares: list[Share]) -> None:
    limits = scheduler.limits
    for step in scheduler.steps_in_flight:
        num_tokens = sum([share.end - share.start for share in step.shares])
        assert num_tokens <= limits.max_num_batched_tokens, f"step {step.step_id} has {num_tokens} tokens"
        assert len(step.shares) <= limits.max_num_seqs, f"step {step.step_id} has too many sequences"
    by_sequence: dict[int, list[Share]] = {}
    for share in shares:
        by_sequence.setdefault(share.sequence.seq_id, []).append(share)
    for seq_id, sequence in scheduler.sequences.items():
        assert sequence.in_flight == by_sequence.get(seq_id, []), f"sequence {seq_id} is not what the steps say"


def _check_running(scheduler: "Scheduler", sequence: Sequence) -> None:
    seq_id, valid = sequence.seq_id, [share for share in sequence.in_flight if not share.is_void]
    num_computed, num_planned = sequence.num_computed_tokens, sequence.num_planned_tokens
    num_ahead = max(0, sum([share.samples for share in valid]) - 1)  # tokens planned before they are known
    assert sequence.is_running, f"sequence {seq_id} runs without being marked so"
    assert sequence.finish_reason is None, f"sequence {seq_id} runs and has ended"
    assert num_computed <= num_planned <= sequence.num_tokens + num_ahead, f"sequence {seq_id} is planned too far"
    assert num_planned == (valid[-1].end if valid else num_computed), f"sequence {seq_id} is planned by no step"
    num_slots = len(sequence.block_table) * scheduler.limits.block_size
    assert num_planned <= sequence.num_slots == num_slots, f"sequence {seq_id} lacks blocks"
    assert sequence.packed_block_table == sequence.block_table.tobytes(), f"sequence {seq_id} is sent with other blocks"
    assert sequence.in_flight or sequence.num_remaining_tokens > 0, f"sequence {seq_id} has nothing to do"
    assert scheduler.must_drain or not (sequence.needs_init and valid), f"sequence {seq_id} is planned without state"


def _check_shared_blocks(scheduler: "Scheduler", sequence: Sequence) -> None:
    num_full_blocks = sequence.num_computed_tokens // scheduler.limits.block_size
    for index, block in enumerate(sequence.block_table):
        if known := scheduler.blocks.registered_hash(block):
            assert index < num_full_blocks, f"sequence {sequence.seq_id} shares a block before it is computed"
            assert known == sequence.block_hashes[index], f"sequence {sequence.seq_id} has a block of another prefix"


def _check_waiting(sequence: Sequence) -> None:
    seq_id = sequence.seq_id
    assert not sequence.is_running, f"sequence {seq_id} waits and is marked as running"
    assert sequence.finish_reason is None, f"sequence {seq_id} waits and has ended"
    assert not sequence.block_table, f"sequence {seq_id} waits and has blocks"
    assert not sequence.num_slots, f"sequence {seq_id} waits and has room for tokens"
    assert sequence.num_computed_tokens == sequence.num_planned_tokens == 0, f"sequence {seq_id} waits and is computed"
    assert sequence.needs_init, f"sequence {seq_id} waits and would not be introduced again"
