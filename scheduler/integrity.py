"""Whether the scheduler's accounts agree: checked when it is idle, and by tests after every step."""

from itertools import pairwise

from octavo.scheduler.accounts import Accounts
from octavo.scheduler.sequence import PlannedShare, Sequence


def check(accounts: Accounts) -> None:
    """Raise AssertionError, naming what is wrong, if two records of the same fact differ."""
    shares = [share for step in accounts.steps_in_flight for share in step.shares]
    held = [share.held_blocks for share in shares if share.held_blocks]
    accounts.blocks.check_integrity([sequence.block_table for sequence in accounts.running] + held)
    assert accounts.num_held_blocks == sum(map(len, held)), "the number of blocks that steps in flight hold is wrong"
    assert set(shares).issuperset(accounts.prefixes.computing.values()), "a hash is computed by no step in flight"
    _check_queues(accounts)
    _check_steps(accounts, shares)
    for sequence in accounts.running:
        _check_running(accounts, sequence)
        _check_shared_blocks(accounts, sequence)
    for sequence in accounts.waiting:
        _check_waiting(sequence)


def _check_queues(accounts: Accounts) -> None:
    running, waiting = accounts.running, accounts.waiting
    queued = [sequence.seq_id for sequence in running + waiting]
    assert sorted(queued) == sorted(accounts.sequences), "some sequence is not in exactly one queue"
    keys = [sequence.queue_key for sequence in waiting]
    assert all(a < b for a, b in pairwise(keys)), "the waiting sequences are out of order"
    assert all(a.priority <= b.priority for a, b in pairwise(running)), "the running sequences are out of order"
    assert len(running) <= accounts.limits.max_num_seqs, "too many sequences run"
    assert accounts.tenants.num_seqs == len(queued), "the number of the tenants' sequences is wrong"


def _check_steps(accounts: Accounts, shares: list[PlannedShare]) -> None:
    limits = accounts.limits
    for step in accounts.steps_in_flight:
        num_tokens = sum([share.end - share.start for share in step.shares])
        assert num_tokens <= limits.max_num_batched_tokens, f"step {step.step_id} has {num_tokens} tokens"
        assert len(step.shares) <= limits.max_num_seqs, f"step {step.step_id} has too many sequences"
    by_sequence: dict[int, list[PlannedShare]] = {}
    for share in shares:
        by_sequence.setdefault(share.sequence.seq_id, []).append(share)
    for seq_id, sequence in accounts.sequences.items():
        assert sequence.in_flight == by_sequence.get(seq_id, []), f"sequence {seq_id} is in other steps"


def _check_running(accounts: Accounts, sequence: Sequence) -> None:
    seq_id, valid = sequence.seq_id, [share for share in sequence.in_flight if not share.is_void]
    num_computed, num_planned = sequence.num_computed_tokens, sequence.num_planned_tokens
    num_ahead = max(0, sum([share.num_samples for share in valid]) - 1)  # tokens planned before they are known
    assert sequence.is_running, f"sequence {seq_id} runs and is not marked as running"
    assert sequence.finish_reason is None, f"sequence {seq_id} runs and has ended"
    assert num_computed <= num_planned <= sequence.num_tokens + num_ahead, f"sequence {seq_id} is planned too far"
    assert num_planned == (valid[-1].end if valid else num_computed), f"the plan of sequence {seq_id} has a gap"
    num_slots = len(sequence.block_table) * accounts.limits.block_size
    assert num_planned <= sequence.num_slots == num_slots, f"sequence {seq_id} lacks blocks"
    assert sequence.packed_block_table == sequence.block_table.tobytes(), f"sequence {seq_id} has an old packed table"
    assert sequence.in_flight or sequence.num_remaining_tokens > 0, f"sequence {seq_id} has nothing to do"
    assert accounts.must_drain or not (sequence.needs_init and valid), f"sequence {seq_id} is planned without state"


def _check_shared_blocks(accounts: Accounts, sequence: Sequence) -> None:
    num_full_blocks = sequence.num_computed_tokens // accounts.limits.block_size
    for index, block in enumerate(sequence.block_table):
        if known := accounts.blocks.registered_hash(block):
            assert index < num_full_blocks, f"sequence {sequence.seq_id} shares a block before it is computed"
            assert known == sequence.block_hashes[index], f"sequence {sequence.seq_id} has a block of another prefix"


def _check_waiting(sequence: Sequence) -> None:
    seq_id = sequence.seq_id
    assert not sequence.is_running, f"sequence {seq_id} waits and is marked as running"
    assert sequence.finish_reason is None, f"sequence {seq_id} waits and has ended"
    assert not sequence.block_table, f"sequence {seq_id} waits and has blocks"
    assert not sequence.num_slots, f"sequence {seq_id} waits and has room for tokens"
    assert sequence.num_computed_tokens == sequence.num_planned_tokens == 0, f"sequence {seq_id} waits and is computed"
    assert sequence.needs_init, f"sequence {seq_id} waits and would get no init again"
