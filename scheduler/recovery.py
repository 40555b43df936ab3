"""How to go on when the executor lacks state, is gone, or does not do its steps. Pure."""

from array import array
from collections.abc import Iterable

from octavo.scheduler.accounts import Accounts, StepInFlight
from octavo.scheduler.limits import misfit


def cancel_steps(accounts: Accounts, step_id: int, seq_ids: Iterable[int]) -> None:
    """Cancel the steps from `step_id` on: the executor did not do them, because it has no state for `seq_ids`.

    No step is planned until the earlier ones are done. A `step_id` that is not in flight is ignored.
    """
    steps = accounts.steps_in_flight
    if all(step.step_id != step_id for step in steps):
        return
    while steps and steps[-1].step_id >= step_id:
        _cancel(accounts, steps.pop())
    accounts.must_drain = True
    for seq_id in seq_ids:
        if sequence := accounts.sequences.get(seq_id):
            sequence.needs_init = True
            if sequence.embeds_all_tokens and sequence.is_running:  # its sum over the tokens is lost
                accounts.preempt(sequence)


def _cancel(accounts: Accounts, step: StepInFlight) -> None:
    for share in step.shares:
        sequence = share.sequence
        sequence.in_flight.remove(share)
        accounts.prefixes.leave(share)
        if not share.is_void:
            share.roll_back()
        if share.held_blocks and sequence.in_flight:
            sequence.in_flight[-1].held_blocks = share.held_blocks
        elif share.held_blocks:
            accounts.release_held(share)
    accounts.forget = dict.fromkeys(step.forget) | accounts.forget


def replace_executor(accounts: Accounts, num_blocks: int) -> None:
    """Start again with an executor that has no state and `num_blocks` empty blocks.

    A sequence that does not fit into the new pool ends with "error". So does a sequence that was in flight alone when
    an executor died, and not for the first time.
    """
    in_flight = {share.sequence for step in accounts.steps_in_flight for share in step.shares}
    culprit = accounts.suspects.accuse(in_flight)
    accounts.steps_in_flight.clear()
    accounts.prefixes.clear()
    accounts.forget.clear()
    accounts.num_held_blocks = 0
    accounts.must_drain = False
    accounts.blocks.reset(num_blocks)
    running, accounts.running = accounts.running, []
    for sequence in accounts.sequences.values():
        sequence.in_flight.clear()
        accounts.set_blocks(sequence, array("i"))
        sequence.is_on_executor = False
        sequence.num_missing_tokens = sequence.num_tokens
    for sequence in running:
        accounts.wait_again(sequence)
    if culprit and culprit.finish_reason is None:
        error = "the executor died with this request alone, and not for the first time"
        accounts.finish(culprit, "error", error=error)
    for sequence in list(accounts.sequences.values()):
        if reason := misfit(sequence, accounts.limits, num_blocks):
            accounts.finish(sequence, "error", error=reason)


def give_up_steps(accounts: Accounts) -> None:
    """Drop the steps in flight, which the executor does not do: go on as if the executor had died, but have it forget
    the sequences that it knows."""
    known = [seq_id for step in accounts.steps_in_flight for seq_id in step.forget] + list(accounts.forget)
    known += [sequence.seq_id for sequence in accounts.sequences.values() if sequence.is_on_executor]
    replace_executor(accounts, accounts.blocks.num_blocks)
    accounts.forget = dict.fromkeys(known)
