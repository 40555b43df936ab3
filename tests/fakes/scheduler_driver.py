"""An executor that is a pure function of tokens, and a driver that runs a Scheduler against it.

A KV slot holds a number made of its token and of the slot before it; the next token is made of every slot that the
block table names. So a block that is shared wrongly, overwritten or given away too early changes tokens, and any
schedule that is right gives the tokens of `reference`.
"""

from array import array
from collections import deque
from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any

from octavo.protocol.messages import Logprobs, SequenceResult, SequenceStep, StepResult, Task, pack_ids, unpack_ids
from octavo.protocol.sampling import Sampling
from octavo.scheduler.scheduler import Limits, PlannedStep, Prompt, Scheduler, Sequence, Update
from octavo.scheduler.sizes import MAX_STEP_BYTES

VOCAB_SIZE = 7
MODULUS = 1_000_003
BLOCK_SIZE = 4


def slot_value(previous: int, token_id: int) -> int:
    return (previous * 31 + token_id + 1) % MODULUS


def next_token(slot_total: int) -> int:
    return slot_total % VOCAB_SIZE


def prompt_logprob(previous_slot: int, token_id: int) -> Logprobs:
    """The log probability of a prompt token, given the slot before it: any pure function will do."""
    return Logprobs(0, pack_ids([previous_slot]), pack_ids([token_id]))


def reference(prompt: Iterable[int], sampling: Sampling, max_model_len: int = 1 << 20) -> tuple[list[int], str]:
    """Return the output tokens and the finish reason of a sequence that runs alone and undisturbed."""
    tokens, total, slot, num_outputs = list(prompt), 0, 0, 0
    for token_id in tokens:
        slot = slot_value(slot, token_id)
        total += slot
    stops = sampling.eos_token_ids + sampling.stop_token_ids
    outputs: list[int] = []
    while len(tokens) < max_model_len and num_outputs < sampling.max_tokens:
        token_id = next_token(total)
        outputs.append(token_id)
        tokens.append(token_id)
        num_outputs += 1
        if token_id in stops and num_outputs >= sampling.min_tokens:
            return outputs, "stop"
        slot = slot_value(slot, token_id)
        total += slot
    return outputs, "length"


class State:
    """What an executor keeps of a sequence: its last token and how far it is."""

    def __init__(self, step: SequenceStep) -> None:
        assert step.init is not None
        assert step.token_ids, "an init comes with the tokens of its share"
        self.prompt = unpack_ids(step.init.prompt_token_ids)  # empty: no log probabilities of it are wanted
        self.last_token = unpack_ids(step.token_ids)[-1]
        self.num_computed_tokens = step.num_computed_tokens
        self.embeds = step.init.task == "embed"
        self.num_prompt_tokens = step.init.num_prompt_tokens
        self.total = 0  # of the slots that were computed since this init: what a vector is made of


class SlotExecutor:
    """Does steps strictly in order, as planned; asserts what a real one would answer with NeedInit."""

    def __init__(self, num_blocks: int, block_size: int = BLOCK_SIZE) -> None:
        self.block_size = block_size
        self.kv = [[0] * block_size for _ in range(num_blocks)]
        self.states: dict[int, State] = {}
        self.forgotten: set[int] = set()
        self.lost: set[int] = set()  # whose state a test took away
        self.sat_out: set[int] = set()  # in the last step

    def lose(self, seq_ids: Iterable[int]) -> None:
        """Drop the state of some sequences."""
        for seq_id in seq_ids:
            if self.states.pop(seq_id, None):
                self.lost.add(seq_id)

    def lacking(self, step: PlannedStep) -> list[int]:
        """Return the sequences for which this executor says NeedInit: only those whose state was taken away."""
        return [share.seq_id for share in step.sequences if share.init is None and share.seq_id in self.lost]

    def execute(self, step: PlannedStep, not_ready: Iterable[int] = (), *, computes_void: bool = False) -> StepResult:
        """Do a step. A sequence that sat out the step before and is planned on top of it sits out too, or, with
        `computes_void`, computes nonsense."""
        for seq_id in step.forget:
            assert seq_id not in self.forgotten, f"{seq_id} is forgotten twice"
            self.forgotten.add(seq_id)
            self.states.pop(seq_id, None)
        sits_out, results = set(not_ready), []
        for share in step.sequences:
            void = share.seq_id in self.sat_out and share.init is None and not self.fits(share)
            if void and computes_void:
                if state := self.states.get(share.seq_id):
                    state.num_computed_tokens = share.num_computed_tokens + 1
                results.append(SequenceResult([VOCAB_SIZE + 1]))
                continue
            if void:
                sits_out.add(share.seq_id)
            if share.init is not None:
                self.forgotten.discard(share.seq_id)
                self.lost.discard(share.seq_id)
                if share.seq_id not in sits_out:
                    self.states[share.seq_id] = State(share)
            results.append(SequenceResult([]) if share.seq_id in sits_out else self.compute(share))
        self.sat_out = sits_out
        return StepResult("", "", step.step_id, results, not_ready=sorted(sits_out))

    def fits(self, share: SequenceStep) -> bool:
        state = self.states.get(share.seq_id)
        return state is not None and share.num_computed_tokens == state.num_computed_tokens

    def compute(self, share: SequenceStep) -> SequenceResult:
        state = self.states[share.seq_id]
        assert self.fits(share), f"{share.seq_id} is at {state.num_computed_tokens}"
        table, kv, size = unpack_ids(share.block_table), self.kv, self.block_size
        token_ids = unpack_ids(share.token_ids) if share.token_ids else [state.last_token]
        start = share.num_computed_tokens
        end = start + len(token_ids)
        assert len(table) == -(-end // size)
        slot = kv[table[(start - 1) // size]][(start - 1) % size] if start else 0
        prompt_logprobs = None
        for position, token_id in enumerate(token_ids, start):
            slot = kv[table[position // size]][position % size] = slot_value(slot, token_id)
            state.total += slot
            if position + 1 < len(state.prompt):
                new = prompt_logprob(slot, state.prompt[position + 1])
                prompt_logprobs = prompt_logprobs + new if prompt_logprobs else new
        state.num_computed_tokens = end
        if not share.sample:
            embedding = pack_ids([state.total]) if state.embeds and end == state.num_prompt_tokens else b""
            return SequenceResult([], prompt_logprobs=prompt_logprobs, embedding=embedding)
        full, rest = divmod(end, size)
        total = sum([sum(kv[block]) for block in table[:full]]) + (sum(kv[table[full]][:rest]) if rest else 0)
        state.last_token = next_token(total)
        return SequenceResult([state.last_token], prompt_logprobs=prompt_logprobs)


class SchedulerDriver:
    """A Scheduler, its executor and what a server would have passed on.

    Integrity is checked after every step, and after every other move too unless `checks_moves` is off.
    """

    def __init__(
        self,
        num_blocks: int = 32,
        *,
        block_size: int = BLOCK_SIZE,
        max_model_len: int = 1 << 20,
        max_num_seqs: int = 8,
        max_num_batched_tokens: int = 64,
        max_num_waiting_seqs: int = 100,
        enable_prefix_caching: bool = True,
        max_step_bytes: int = MAX_STEP_BYTES,
        max_num_prompt_tokens: int | None = None,
        checks_moves: bool = True,
        embeds_all_tokens: bool = False,
        whole_prompts: bool = False,
    ) -> None:
        self.checks_moves = checks_moves
        self.max_num_prompt_tokens = max_num_prompt_tokens  # while some generate
        self.limits = Limits(
            num_blocks=num_blocks,
            block_size=block_size,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_num_waiting_seqs=max_num_waiting_seqs,
            enable_prefix_caching=enable_prefix_caching,
            max_step_bytes=max_step_bytes,
            tasks=("generate", "embed"),
            embedding_size=1,
            embeds_all_tokens=embeds_all_tokens,
            whole_prompts=whole_prompts,
        )
        self.scheduler = Scheduler(self.limits)
        self.executor = SlotExecutor(num_blocks, block_size)
        self.sent: deque[PlannedStep] = deque()
        self.steps: list[PlannedStep] = []
        self.sequences: dict[int, Sequence] = {}
        self.prompts: dict[int, list[int]] = {}
        self.outputs: dict[int, list[int]] = {}
        self.resubmitted: set[int] = set()
        self.may_fail = False  # whether a sequence may end with "error"
        self.finished: dict[int, Update] = {}
        self.prompt_logprobs: dict[int, list[Logprobs]] = {}
        self.num_cached_tokens: dict[int, int] = {}

    def make(
        self,
        seq_id: int,
        prompt: Iterable[int],
        outputs: Iterable[int] = (),
        *,
        tenant: str = "",
        priority: int = 0,
        cache_salt: str = "",
        body_id: str = "",
        max_tokens: int = 8,
        task: Task = "generate",
        grammar: str = "",
        **sampling: Any,
    ) -> Sequence:
        return Sequence(
            seq_id,
            Prompt(array("i", prompt)),
            Sampling(max_tokens=max_tokens, seed=0, **sampling),
            array("i", outputs),
            tenant=tenant,
            priority=priority,
            cache_salt=cache_salt,
            body_id=body_id,
            task=task,
            grammar=grammar,
        )

    def add(self, sequence: Sequence) -> None:
        self.sequences[sequence.seq_id] = sequence
        self.prompts[sequence.seq_id] = list(sequence.prompt_token_ids)
        self.outputs[sequence.seq_id] = list(sequence.output_token_ids)
        self.prompt_logprobs[sequence.seq_id] = []
        if sequence.output_token_ids:
            self.resubmitted.add(sequence.seq_id)
        self.scheduler.add(sequence)
        self.settle()

    def start(self, seq_id: int, prompt: Iterable[int], outputs: Iterable[int] = (), **fields: Any) -> Sequence:
        """Make and add a sequence."""
        sequence = self.make(seq_id, prompt, outputs, **fields)
        self.add(sequence)
        return sequence

    def send(self) -> PlannedStep | None:
        """Plan a step."""
        remaining = [sequence.num_remaining_tokens for sequence in self.scheduler.sequences.values()]
        some_generate = any(sequence.generates for sequence in self.scheduler.running)
        step = self.scheduler.schedule(self.max_num_prompt_tokens)
        if step is not None:
            if self.max_num_prompt_tokens is not None and some_generate:
                nums_tokens = [len(share.token_ids) // 4 for share in step.sequences]
                most = max(self.max_num_prompt_tokens, sum(remaining) // 24)  # of all that there is to compute
                assert sum(n for n in nums_tokens if n > 1) <= most, nums_tokens
            self.sent.append(step)
            self.steps.append(step)
        self.settle()
        return step

    def receive(self, not_ready: Iterable[int] = (), *, computes_void: bool = False) -> None:
        """Have the oldest step done and apply its result; or cancel what is in flight, if a state is lacking."""
        step = self.sent[0]
        if lacking := self.executor.lacking(step):
            self.need_init(lacking)
            return
        self.sent.popleft()
        self.scheduler.apply(self.executor.execute(step, not_ready, computes_void=computes_void))
        self.settle()
        if not self.checks_moves:
            self.scheduler.check_integrity()

    def need_init(self, seq_ids: list[int]) -> None:
        """The executor refuses the oldest step, and so all later ones."""
        self.executor.sat_out = set()
        self.scheduler.need_init(self.sent[0].step_id, seq_ids)
        for step in self.sent:  # the scheduler cannot know whether they had been introduced before
            self.executor.forgotten.difference_update(share.seq_id for share in step.sequences if share.init)
        self.sent.clear()
        self.settle()

    def reset(self, num_blocks: int) -> None:
        """Another executor takes the place of the one before."""
        self.executor = SlotExecutor(num_blocks, self.limits.block_size)
        self.may_fail = True
        self.sent.clear()
        self.scheduler.reset_executor(num_blocks)
        self.settle()

    def run_until(self, reached: Callable[[], bool]) -> None:
        while not reached():
            self.step()

    def step(self, *, ahead: bool = False) -> None:
        """One step at depth 0, or one planned ahead of the result of another."""
        planned = self.send()
        if self.sent and not (ahead and len(self.sent) == 1 and planned):
            self.receive()

    def run(self, *, ahead: bool = False) -> None:
        """Go on until every sequence has ended and every result has come."""
        for _ in range(10_000):
            if not self.scheduler.has_work and not self.sent:
                return
            self.step(ahead=ahead)
        raise AssertionError("the scheduler does not come to an end")

    def settle(self) -> None:
        for update in self.scheduler.take_updates():
            seq_id = update.seq_id
            assert seq_id not in self.finished, f"{seq_id} goes on after its end"
            if update.prompt_logprobs is not None:
                self.prompt_logprobs[seq_id].append(update.prompt_logprobs)
            self.outputs[seq_id] += update.token_ids
            self.num_cached_tokens[seq_id] = update.num_cached_tokens
            if update.finish_reason:
                self.finished[seq_id] = update
        if self.checks_moves:
            self.scheduler.check_integrity()

    @staticmethod
    def expect(prompt: Iterable[int], **sampling: Any) -> tuple[list[int], str]:
        """Return what a sequence gives that runs alone: its tokens and finish reason."""
        return reference(prompt, Sampling(seed=0, **sampling))

    def assert_prompt_logprobs(self, seq_id: int) -> None:
        """They came once, for every prompt token but the first, each with the right value."""
        prompt, slot, expected = self.prompts[seq_id], 0, Logprobs(0)
        for token_id, following in pairwise(prompt):
            slot = slot_value(slot, token_id)
            expected += prompt_logprob(slot, following)
        assert self.prompt_logprobs[seq_id] == [expected]

    def reasons(self) -> dict[int, str | None]:
        return {seq_id: update.finish_reason for seq_id, update in self.finished.items()}

    def assert_complete(self) -> None:
        """Every sequence has the tokens it would have alone, and every block is back."""
        assert set(self.finished) == set(self.sequences)
        for seq_id, update in self.finished.items():
            sampling = self.sequences[seq_id].sampling
            tokens, reason = reference(self.prompts[seq_id], sampling, self.limits.max_model_len)
            ran = self.outputs[seq_id] or update.finish_reason == "length"
            if sampling.num_prompt_logprobs is not None and ran and seq_id not in self.resubmitted:
                self.assert_prompt_logprobs(seq_id)
            else:
                assert self.prompt_logprobs[seq_id] == []
            assert self.may_fail or update.finish_reason != "error", seq_id
            if update.finish_reason in ("abort", "error"):
                assert self.outputs[seq_id] == tokens[: len(self.outputs[seq_id])], seq_id
            else:
                assert (self.outputs[seq_id], update.finish_reason) == (tokens, reason), seq_id
        assert self.scheduler.num_used_blocks == 0
        assert self.scheduler.num_free_blocks + self.scheduler.num_cached_blocks == len(self.executor.kv)
