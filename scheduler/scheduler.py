"""Continuous batching: which tokens of which sequences each step computes. No socket, no clock, no randomness.

`accounts.py` has the state; `planning.py` decides what the next step computes, `results.py` what a result means, and
`recovery.py` how to go on after trouble.

Every sequence that was taken ends, in any order of events, as long as steps are done:

1. Let B be the running sequence that would be preempted last. `_victim_key` is a total order: priority, tokens served
   to the tenant, arrival. The order stays the same until some sequence gets a new token or ends, because recomputed
   tokens are not served again. A sequence that joins can replace B only as a better B.
2. B has its blocks or gets them. While other sequences run, they are preempted before B. Blocks that steps in flight
   hold come free when these steps are done. Alone, B fits, or it would have been refused. The sequences planned before
   B have at least its priority and ran before B; a preempted one comes back behind B. So B advances to its next token.
3. If no sequence runs, only steps in flight hold blocks. So the first waiting sequence is admitted once these steps are
   done. It waits for a prefix that another sequence computes only while that computation is in flight.
4. The messages of a step have a limit in bytes. The first share of a step is planned in any case. Running sequences are
   planned in a fixed order, so a sequence that found no room is planned once the sequences before it have ended.
5. A step limits the tokens of prompts only if some sequence generates in it, and the limit is at least one token. So
   prompts advance in any case, in order: the prompts before a given one have fewer tokens left with every step.

So new tokens or ends always come, and there are finitely many of them.
"""

from bisect import insort
from collections.abc import Iterable

from octavo.protocol.messages import Logprobs, StepResult
from octavo.scheduler.accounts import QUEUE_KEY, Accounts
from octavo.scheduler.integrity import check
from octavo.scheduler.interface import PlannedStep, Update
from octavo.scheduler.limits import Limits, Refusal, refusal
from octavo.scheduler.planning import plan_step
from octavo.scheduler.recovery import cancel_steps, give_up_steps, replace_executor
from octavo.scheduler.results import apply_result
from octavo.scheduler.sequence import Prompt, Sequence
from octavo.scheduler.sizes import share_bytes, token_bytes
from octavo.scheduler.stopping import finish_reason

__all__ = ["Limits", "PlannedStep", "Prompt", "Refusal", "Scheduler", "Sequence", "Update"]


class Scheduler(Accounts):
    """Plans steps and applies their results; one step may be planned while another is in flight."""

    def refusal(self, sequence: Sequence) -> Refusal | None:
        """Return why `add` would be wrong now, or None."""
        return refusal(sequence, self.limits, self.blocks.num_blocks, len(self.waiting))

    def add(self, sequence: Sequence) -> None:
        """Take a sequence for which `refusal` gave None. A resubmission that was complete ends at once."""
        sampling = sequence.sampling
        sequence.arrival = self.num_arrivals
        self.num_arrivals += 1
        sequence.token_bytes = token_bytes(sampling)
        if sequence.task == "embed":
            sequence.embedding_bytes = 4 * self.limits.embedding_size
            sequence.embeds_all_tokens = self.limits.embeds_all_tokens
        sequence.share_bytes = share_bytes(sequence)
        sequence.max_num_tokens = self.limits.max_num_tokens(sequence)
        sequence.num_samples_a_step = 1 if sequence.num_tokens < sequence.max_num_tokens else 0
        sequence.stop_token_ids = frozenset(sampling.eos_token_ids + sampling.stop_token_ids)
        if sampling.num_prompt_logprobs is not None and not sequence.output_token_ids:
            sequence.prompt_logprobs = Logprobs(sampling.num_prompt_logprobs)
        self.sequences[sequence.seq_id] = sequence
        self.tenants.join(sequence.tenant)
        sequence.turn = self.turns.join(sequence.body_id)
        sequence.num_missing_tokens = sequence.num_tokens - self.prefixes.num_known_tokens(sequence)
        insort(self.waiting, sequence, key=QUEUE_KEY)
        if sequence.output_token_ids and (reason := finish_reason(sequence)):
            self.finish(sequence, reason)

    def abort(self, seq_id: int, reason: str = "abort") -> None:
        """End a sequence that nobody wants any more; an unknown one, or one that has ended, is ignored."""
        if sequence := self.sequences.get(seq_id):
            self.finish(sequence, reason)

    def fail(self, seq_id: int, error: str) -> None:
        """End a sequence with "error"; an unknown one, or one that has ended, is ignored."""
        if sequence := self.sequences.get(seq_id):
            self.finish(sequence, "error", error=error)

    def take_updates(self) -> list[Update]:
        """Return what happened since the last call, in order."""
        updates, self.updates = self.updates, []
        return updates

    def schedule(self, max_num_prompt_tokens: int | None = None) -> PlannedStep | None:
        """Return the next step, or None if there is nothing to do now. One earlier step may be in flight.

        If some sequences generate, all prompts together get at most `max_num_prompt_tokens` tokens, but at least one,
        and leave each generating sequence its token. With many prompts waiting they may get more: see `planning.py`.
        """
        return plan_step(self, max_num_prompt_tokens)

    def apply(self, result: StepResult) -> None:
        """Take the result of the oldest step in flight; the result of any other step is ignored."""
        apply_result(self, result)

    def need_init(self, step_id: int, seq_ids: Iterable[int]) -> None:
        """The executor did not do `step_id`, nor any later step: it has no state for `seq_ids`."""
        cancel_steps(self, step_id, seq_ids)

    def reset_executor(self, num_blocks: int) -> None:
        """The executor and all KV are gone; the next executor has `num_blocks`."""
        replace_executor(self, num_blocks)

    def give_up(self) -> None:
        """The executor lives and does not do the steps in flight: plan their sequences anew."""
        give_up_steps(self)

    def check_integrity(self) -> None:
        """Raise AssertionError, naming what is wrong, if the accounts do not agree."""
        check(self)
