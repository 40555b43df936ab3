"""Steps written by hand: one sequence is driven through a runner as a scheduler would."""

from collections.abc import Sequence

from octavo.executor.step.launched import Launched
from octavo.executor.step.runner import ModelRunner
from octavo.protocol.messages import SequenceInit, SequenceResult, SequenceStep, Step, pack_ids
from octavo.protocol.sampling import Sampling

SCHEDULER, EXECUTOR = "scheduler-1", "executor-1"


def sampling(**fields: object) -> Sampling:
    return Sampling(**{"max_tokens": 1000, "seed": 1, "temperature": 0.0} | fields)


def init(prompt: Sequence[int], output: Sequence[int] = (), **fields: object) -> SequenceInit:
    """Return what a scheduler sends of a sequence beside its shares."""
    params = sampling(**fields)
    return SequenceInit(
        params,
        len(prompt),
        len(output),
        pack_ids(prompt) if params.num_prompt_logprobs is not None and not output else b"",
        pack_ids(sorted(set(prompt))) if params.repetition_penalty != 1.0 else b"",
        pack_ids(output) if params.has_penalties else b"",
    )


def share(
    seq_id: int,
    num_computed_tokens: int,
    token_ids: Sequence[int],
    blocks: Sequence[int],
    *,
    sample: bool = True,
    init: SequenceInit | None = None,
) -> SequenceStep:
    return SequenceStep(seq_id, num_computed_tokens, pack_ids(token_ids), pack_ids(blocks), sample, init)


def step(
    step_id: int,
    *sequences: SequenceStep,
    forget: Sequence[int] = (),
    scheduler: str = SCHEDULER,
    executor: str = EXECUTOR,
) -> Step:
    return Step(scheduler, executor, step_id, list(sequences), list(forget))


class RunnerDriver:
    """Plans for one runner: contiguous or scattered blocks, chunks, several sequences a step."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        self._num_steps = 0
        self._free = list(range(runner.num_blocks))[::-1]
        self.tables: dict[int, list[int]] = {}
        self._num_computed: dict[int, int] = {}
        self.outputs: dict[int, list[SequenceResult]] = {}

    def do(self, *shares: SequenceStep, forget: Sequence[int] = ()) -> list[SequenceResult]:
        """Run one step of shares and return their results."""
        return self.launch(*shares, forget=forget).wait().sequences

    def launch(self, *shares: SequenceStep, forget: Sequence[int] = ()) -> Launched:
        """Launch one step of shares, whether or not the last one was waited for."""
        self._num_steps += 1
        launched = self.runner.launch(step(self._num_steps, *shares, forget=forget))
        assert isinstance(launched, Launched), launched
        return launched

    def share(
        self, seq_id: int, token_ids: Sequence[int], *, sample: bool = True, init: SequenceInit | None = None
    ) -> SequenceStep:
        """Return the sequence's next share: `token_ids`, or for none the token it sampled last."""
        start = self._num_computed.get(seq_id, 0)
        end = start + (len(token_ids) or 1)
        table = self.tables.setdefault(seq_id, [])
        while len(table) * self.runner.block_size < end:
            table.append(self._free.pop())
        self._num_computed[seq_id] = end
        return share(seq_id, start, token_ids, table, sample=sample, init=init)

    def preempt(self, seq_id: int) -> None:
        """Take a sequence's blocks away; its next share needs an init and starts at 0."""
        self._free = self.tables.pop(seq_id) + self._free
        self._num_computed.pop(seq_id)
