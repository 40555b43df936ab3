"""What the result of a step means for its sequences: new tokens, ends, shareable blocks. Pure."""

from octavo.protocol.messages import SequenceResult, StepResult
from octavo.scheduler.accounts import Accounts
from octavo.scheduler.sequence import PlannedShare, Sequence
from octavo.scheduler.stopping import append_tokens


def apply_result(accounts: Accounts, result: StepResult) -> None:
    """Take the result of the oldest step in flight; the result of any other step is ignored."""
    steps = accounts.steps_in_flight
    if not steps or steps[0].step_id != result.step_id:
        return
    shares = steps.popleft().shares
    assert len(shares) == len(result.sequences), f"step {result.step_id} has {len(shares)} sequences"
    not_ready = set(result.not_ready)
    for share, given in zip(shares, result.sequences, strict=True):
        sequence = share.sequence
        del sequence.in_flight[0]
        if share.hashes:
            accounts.prefixes.leave(share)
        if sequence.finish_reason is None and not share.is_void:
            if sequence.seq_id in not_ready:
                _sit_out(share)
            else:
                _advance(accounts, share, given)
        if share.held_blocks:
            accounts.release_held(share)


def _sit_out(share: PlannedShare) -> None:
    """No token of the share was computed, so the shares planned on top of it mean nothing either."""
    share.roll_back()
    for later in share.sequence.in_flight:
        later.is_void, later.num_samples = True, 0
        share.sequence.needs_init = True  # whatever the executor made of the later share


def _advance(accounts: Accounts, share: PlannedShare, given: SequenceResult) -> None:
    sequence = share.sequence
    if given.error:
        accounts.finish(sequence, "error", error=given.error)
        return
    if share.keeps_kv:
        sequence.num_computed_tokens = share.end
        if share.end >= (sequence.num_registered_blocks + 1) * accounts.limits.block_size:
            accounts.prefixes.register(sequence)
    if given.prompt_logprobs is not None:
        sequence.collect_prompt_logprobs(share.start + 1, given.prompt_logprobs)
    if share.num_samples:
        _take_tokens(accounts, sequence, given)
    elif share.end == sequence.num_tokens:  # the whole prompt is computed, and no token is wanted
        _end_prompt(accounts, sequence, given)


def _end_prompt(accounts: Accounts, sequence: Sequence, given: SequenceResult) -> None:
    if len(given.embedding) == sequence.embedding_bytes:
        accounts.finish(sequence, "length", embedding=given.embedding)
    else:
        accounts.finish(sequence, "error", error="the executor gave no vector of the right size")


def _take_tokens(accounts: Accounts, sequence: Sequence, given: SequenceResult) -> None:
    token_ids, reason = append_tokens(sequence, given.token_ids)
    if not token_ids:
        accounts.finish(sequence, "error", error="the executor gave no token")
        return
    num_tokens = len(token_ids)
    accounts.tenants.serve(sequence.tenant, num_tokens)
    accounts.counters.num_generated_tokens += num_tokens
    if sequence.num_deaths:
        accounts.suspects.clear(sequence)
    logprobs = given.logprobs
    if logprobs is not None and num_tokens < len(given.token_ids):
        logprobs = logprobs.part(0, num_tokens)
    if reason:
        accounts.finish(sequence, reason, token_ids, logprobs)
    else:
        accounts.update(sequence, token_ids, None, logprobs)
