"""How long requests wait and run, by a clock that the test sets."""

from octavo.protocol.messages import HistogramCounts, SequenceInit, SequenceStep
from octavo.protocol.sampling import Sampling
from octavo.scheduler.interface import Update
from octavo.scheduler.measures import Measures
from octavo.scheduler.predictor import StepSize

INIT = SequenceInit(Sampling(max_tokens=4, seed=1), 1)


def newcomer(seq_id: int) -> SequenceStep:
    return SequenceStep(seq_id, 0, b"", b"", True, INIT)


def counted(histogram: HistogramCounts) -> tuple[int, float]:
    return sum(histogram.counts), histogram.sum


def test_a_request_is_timed_from_stage_to_stage():
    measures = Measures()
    measures.arrive(1, 10.0)
    measures.plan([newcomer(1)], 12.0)
    measures.progress([Update(1, [7])], 15.0)
    measures.progress([Update(1, [8])], 16.0)
    measures.progress([Update(1, [9], "length")], 22.0)
    read = measures.read()
    times = [counted(read.queue_s), counted(read.prefill_s), counted(read.decode_s), counted(read.inference_s)]
    assert times == [(1, 2.0), (1, 3.0), (1, 7.0), (1, 10.0)]


def test_a_preempted_request_counts_from_its_first_step():
    measures = Measures()
    measures.arrive(1, 0.0)
    for planned_s in (1.0, 5.0):  # it comes with an init again
        measures.plan([newcomer(1)], planned_s)
    measures.progress([Update(1, [7])], 6.0)
    measures.plan([newcomer(1)], 9.0)
    measures.progress([Update(1, [8], "stop")], 10.0)
    read = measures.read()
    assert (counted(read.queue_s), counted(read.prefill_s)) == ((1, 1.0), (1, 5.0))
    assert (counted(read.decode_s), counted(read.inference_s)) == ((1, 4.0), (1, 9.0))


def test_a_request_that_is_cut_off_counts_up_to_its_last_stage():
    measures = Measures()
    for seq_id in (1, 2, 3):
        measures.arrive(seq_id, 0.0)
    measures.plan([newcomer(1), newcomer(2)], 1.0)
    measures.progress([Update(1, [7])], 2.0)
    measures.progress([Update(1, [], "abort"), Update(2, [], "error"), Update(3, [], "abort")], 3.0)
    read = measures.read()
    assert (counted(read.queue_s), counted(read.prefill_s)) == ((2, 2.0), (1, 1.0))
    assert (counted(read.decode_s), counted(read.inference_s)) == ((0, 0.0), (0, 0.0))
    measures.plan([newcomer(1)], 9.0)  # its step in flight no longer counts
    assert measures.read() == read


def test_steps_are_counted_by_size():
    measures = Measures()
    measures.complete(StepSize(3, 50, num_prompt_seqs=1), 0.2)
    measures.complete(StepSize(2, 2), 0.1)
    read = measures.read()
    assert (counted(read.step_seqs), counted(read.step_tokens)) == ((2, 5), (2, 52))
    assert sum(read.step_s.counts) == 2
