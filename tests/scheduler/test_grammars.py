"""A grammar goes with its sequence, and a sequence that an executor cannot go on with ends alone."""

import msgspec

from octavo.protocol.messages import SequenceResult, unpack_ids
from octavo.scheduler.sizes import init_bytes
from tests.fakes.scheduler_driver import SchedulerDriver

GRAMMAR = '{"grammars":[{"json_schema":{"type":"string","pattern":"é"}}]}'


def inits_of(driver: SchedulerDriver, seq_id: int) -> list[tuple[str, list[int]]]:
    """Return the grammars of all inits of a sequence, and the output that came with each."""
    shares = (share for step in driver.steps for share in step.sequences if share.seq_id == seq_id)
    return [(s.init.grammar, unpack_ids(s.init.output_token_ids).tolist()) for s in shares if s.init is not None]


def test_each_init_has_the_grammar_and_all_of_the_output() -> None:
    driver = SchedulerDriver()
    driver.start(0, range(5), grammar=GRAMMAR)
    driver.run_until(lambda: len(driver.outputs[0]) == 3)
    driver.reset(num_blocks=32)
    driver.step()
    assert inits_of(driver, 0) == [(GRAMMAR, []), (GRAMMAR, driver.outputs[0][:3])]
    driver.run(ahead=True)
    assert driver.finished[0].finish_reason == "length"


def test_a_preempted_sequence_comes_back_with_its_grammar() -> None:
    driver = SchedulerDriver(num_blocks=10)
    driver.start(0, range(9), max_tokens=20, grammar=GRAMMAR)
    driver.step()
    driver.start(1, range(20, 29), max_tokens=20, priority=-1)
    driver.run(ahead=True)
    assert driver.scheduler.counters.num_preemptions
    inits = inits_of(driver, 0)
    assert len(inits) > 1
    assert all(grammar == GRAMMAR and output == driver.outputs[0][: len(output)] for grammar, output in inits)


def test_a_sequence_that_the_executor_cannot_go_on_with_ends_alone() -> None:
    driver = SchedulerDriver()
    driver.may_fail = True
    driver.start(0, range(5), grammar=GRAMMAR)
    driver.start(1, range(5))
    step = driver.send()
    assert step is not None
    driver.send()  # planned on top of what fails
    driver.sent.popleft()
    result = driver.executor.execute(step, not_ready=[0])
    sequences = [
        SequenceResult([], error="no such grammar") if share.seq_id == 0 else given
        for share, given in zip(step.sequences, result.sequences, strict=True)
    ]
    driver.scheduler.apply(msgspec.structs.replace(result, sequences=sequences, not_ready=[]))
    driver.settle()
    assert (driver.finished[0].finish_reason, driver.finished[0].error) == ("error", "no such grammar")
    driver.run()
    assert driver.finished[1].finish_reason == "length"


def test_a_grammar_counts_in_the_size_of_a_step() -> None:
    driver = SchedulerDriver()
    plain, given = (driver.make(0, range(5), range(7), grammar=grammar) for grammar in ("", GRAMMAR))
    assert init_bytes(given) - init_bytes(plain) == len(GRAMMAR.encode()) + 5 * 7
