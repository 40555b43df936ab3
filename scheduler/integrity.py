"""Whether a scheduler's accounts agree: for idle moments, and for tests after every step."""

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from scheduler.sequence import Sequence, Share

if TYPE_CHECKING:
    from scheduler.scheduler import Scheduler


def check(scheduler: "Scheduler") -> None:
    """Raise AssertionError, naming what is wrong, if two accounts of the same thing differ."""
    shares = [share for step in scheduler.steps_in_flight for share in step.shares]
    held = [share.held_blocks for share in shares if share.held_blocks]
    tables = [sequence.block_table for sequence in scheduler.running]
    scheduler.blocks.check_integrity(Counter(block for table in tables + held for block in table))
    assert scheduler.num_held_blocks == sum(map(len, held)), "the blocks held by steps in flight are miscounted"
    assert all(any(share is other for other in shares) for share in scheduler.computing.values()), (
        "a hash is thought to be computed by a step that is not in flight"
    )
    _check_queues(scheduler)
    _check_steps(scheduler)
    for sequence in scheduler.running:
        _check_running(scheduler, sequence)
    for sequence in scheduler.waiting:
        _check_waiting(sequence)


def _check_queues(scheduler: "Scheduler") -> None:
    running, waiting = scheduler.running, scheduler.waiting
    queued = sorted(sequence.seq_id for sequence in running + waiting)
    assert queued == sorted(scheduler.sequences), "running and waiting are not all sequences, each once"
    keys = [sequence.queue_key for sequence in waiting]
    assert keys == sorted(keys), "the waiting sequences are out of order"
    priorities = [sequence.priority for sequence in running]
    assert priorities == sorted(priorities), "the running sequences are out of order"
    assert len(running) <= scheduler.limits.max_num_seqs, "too many sequences run"
    tenants = Counter(sequence.tenant for sequence in scheduler.sequences.values())
    assert scheduler.tenants.num_seqs() == tenants, "the tenants' sequences are miscounted"


def _check_steps(scheduler: "Scheduler") -> None:
    step_ids = [step.step_id for step in scheduler.steps_in_flight]
    assert step_ids == sorted(set(step_ids)), "the steps in flight are out of order"
    for step in scheduler.steps_in_flight:
        num_tokens = sum(share.end - share.start for share in step.shares)
        assert num_tokens <= scheduler.limits.max_num_batched_tokens, f"step {step.step_id} has {num_tokens} tokens"
        assert len(step.shares) <= scheduler.limits.max_num_seqs, f"step {step.step_id} has too many sequences"
    for sequence, shares in _shares_by_sequence(scheduler):
        assert sequence.in_flight == shares, f"sequence {sequence.seq_id} is not what the steps in flight say"


def _shares_by_sequence(scheduler: "Scheduler") -> Iterator[tuple[Sequence, list[Share]]]:
    shares: dict[int, list[Share]] = {seq_id: [] for seq_id in scheduler.sequences}
    for step in scheduler.steps_in_flight:
        for share in step.shares:
            shares.setdefault(share.sequence.seq_id, []).append(share)
    for seq_id, sequence in scheduler.sequences.items():
        yield sequence, shares[seq_id]


def _check_running(scheduler: "Scheduler", sequence: Sequence) -> None:
    name, block_size = f"sequence {sequence.seq_id}", scheduler.limits.block_size
    num_sampled_tokens = sum(share.samples and not share.is_void for share in sequence.in_flight)
    assert sequence.is_running, f"{name} runs without being marked so"
    assert sequence.finish_reason is None, f"{name} runs and has ended"
    max_num_planned_tokens = sequence.num_tokens + max(0, num_sampled_tokens - 1)
    assert sequence.num_computed_tokens <= sequence.num_planned_tokens <= max_num_planned_tokens, (
        f"{name} is planned beyond its tokens"
    )
    assert sequence.num_planned_tokens <= len(sequence.block_table) * block_size, f"{name} has too few blocks"
    assert sequence.in_flight or sequence.num_remaining_tokens > 0, f"{name} runs and has nothing to do"
    assert sequence.in_flight or sequence.num_planned_tokens == sequence.num_computed_tokens, (
        f"{name} waits for a step that is not in flight"
    )
    is_planned = any(not share.is_void for share in sequence.in_flight)
    assert scheduler.must_drain or not (sequence.needs_init and is_planned), (
        f"{name} is planned on state that the executor lacks"
    )
    num_full_blocks = sequence.num_computed_tokens // block_size
    for index, block in enumerate(sequence.block_table):
        known = scheduler.blocks.registered_hash(block)
        if known is not None:
            assert index < num_full_blocks, f"{name} shares block {block} before it is computed"
            assert known == sequence.block_hashes[index], f"{name} has block {block} of another prefix"


def _check_waiting(sequence: Sequence) -> None:
    name = f"sequence {sequence.seq_id}"
    assert not sequence.is_running, f"{name} waits and is marked as running"
    assert sequence.finish_reason is None, f"{name} waits and has ended"
    assert not sequence.block_table, f"{name} waits and has blocks"
    assert sequence.num_computed_tokens == sequence.num_planned_tokens == 0, f"{name} waits and is computed"
    assert sequence.needs_init, f"{name} waits and would not be introduced again"
