"""The pure parts of `octavo bench serve`: lengths, arrivals, streams and figures."""

import random
import statistics
from pathlib import Path

import msgspec
import pytest

from octavo.bench.serve.answer import Answer
from octavo.bench.serve.arrivals import poisson_arrivals
from octavo.bench.serve.dataset import named, read_dataset
from octavo.bench.serve.lengths import parse_lengths
from octavo.bench.serve.plot import tokens_over_time
from octavo.bench.serve.requests import Message, Request, random_requests
from octavo.bench.serve.results import Record, median_figures, summarize
from octavo.bench.serve.work import Work
from octavo.errors import CommandError
from tests.fakes.fake_openai import events


def record(index: int, chunks_s: list[float], latency_s: float, **fields: object) -> Record:
    return Record(index=index, start_s=0.0, latency_s=latency_s, chunks_s=chunks_s, **fields)


@pytest.mark.parametrize(
    ("text", "mean", "deviation"),
    [("7", 7, 0), ("10-30", 20, 6.06), ("normal:200,20", 200, 20), ("lognormal:200,100", 200, 100)],
)
def test_lengths_have_the_mean_and_spread_that_are_asked_for(text: str, mean: float, deviation: float) -> None:
    lengths, rng = parse_lengths(text), random.Random(1)
    drawn = [lengths.draw(rng) for _ in range(20_000)]
    assert min(drawn) >= 1
    assert statistics.mean(drawn) == pytest.approx(mean, rel=0.02)
    assert statistics.pstdev(drawn) == pytest.approx(deviation, rel=0.05)


def test_a_length_is_at_least_one_token() -> None:
    assert min(parse_lengths("normal:1,5").draw(random.Random(seed)) for seed in range(50)) == 1


def test_arrivals_are_those_of_their_seed_and_as_many_a_second_as_asked() -> None:
    arrivals_s = poisson_arrivals(10_000, 50.0, seed=4)
    assert arrivals_s == poisson_arrivals(10_000, 50.0, seed=4) != poisson_arrivals(10_000, 50.0, seed=5)
    assert arrivals_s[0] == 0
    assert arrivals_s == sorted(arrivals_s)
    assert len(arrivals_s) / arrivals_s[-1] == pytest.approx(50, rel=0.05)


def test_random_requests_keep_their_lengths_and_change_their_words() -> None:
    work = Work(num_prompts=20, input_len="3-9", output_len="2-5", prefix_len=4, num_prefixes=2, seed=1)
    first, second = random_requests(work, "0"), random_requests(work, "1")
    assert first == random_requests(work, "0")
    assert [request.max_tokens for request in first] == [request.max_tokens for request in second]
    for one, other in zip(first, second, strict=True):
        assert len(one.messages[0].content.split()) == len(other.messages[0].content.split()) >= 7
    prefixes = [" ".join(request.messages[0].content.split()[:4]) for request in first]
    assert prefixes == prefixes[:2] * 10
    assert prefixes[0] != prefixes[1]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("size", [1, 50, 10_000])
def test_a_stream_is_read_however_it_is_cut(path: str, size: int) -> None:
    sent = b"".join(events(path, {"max_tokens": 5}))
    answer = Answer()
    for start in range(0, len(sent), size):
        answer.feed(sent[start : start + size], float(start))
    assert answer.is_done
    assert answer.error is None
    assert len(answer.chunk_times_s) == 5
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (7, 5)
    if size == 50:
        assert answer.chunk_times_s == sorted(set(answer.chunk_times_s))


def test_a_chunk_may_have_text_and_usage_and_an_event_may_be_no_json() -> None:
    answer = Answer()
    answer.feed(b': ping\r\n\r\ndata: {"choices":[{"text":"a"}],"usage":{"prompt_tokens":3}}\r\n\r\n', 1.0)
    answer.feed(b"data: oops\n\n", 2.0)
    assert answer.chunk_times_s == [1.0]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 3
    assert answer.error == "not a chunk of an answer: oops"


def test_figures_are_those_of_the_requests_that_did_not_fail() -> None:
    records = [
        record(2, [0.3, 0.5, 0.7], 0.8, prompt_tokens=10, output_tokens=5),
        record(0, [0.1, 0.2], 0.2, prompt_tokens=10, output_tokens=2),
        record(1, [0.1], 0.9, failure="timeout"),
        record(3, [0.2], 0.2, prompt_tokens=10, output_tokens=1),
    ]
    run = summarize(records, 2.0, {"ttft": 250, "tpot": 100})
    figures = run.figures
    assert (figures.num_requests, figures.num_failed, run.failures) == (4, 1, {"timeout": 1})
    assert (figures.prompt_tokens, figures.output_tokens) == (30, 8)
    assert (figures.output_tokens_per_s, figures.total_tokens_per_s, figures.requests_per_s) == (4.0, 19.0, 1.5)
    assert figures.ttft_ms is not None
    assert msgspec.structs.astuple(figures.ttft_ms) == pytest.approx((200, 200, 280, 298))
    assert figures.gap_ms is not None
    assert figures.gap_ms.mean == pytest.approx(500 / 3)
    assert figures.tpot_ms is not None
    assert figures.tpot_ms.p50 == pytest.approx(100)  # of 100 (0.4 s for 4 tokens) and 100; one token has none
    assert (figures.goodput_per_s, figures.goodput_share) == (1.0, 0.5)  # the late and the failed one do not count
    assert [each.index for each in run.requests] == [0, 1, 2, 3]


def test_the_median_run_is_one_figure_at_a_time() -> None:
    runs = [
        summarize([record(0, [first_s, 1.0], 1.0, output_tokens=2)], duration_s).figures
        for first_s, duration_s in ((0.1, 4.0), (0.2, 1.0), (0.3, 2.0))
    ]
    median = median_figures(runs)
    assert (median.duration_s, median.output_tokens_per_s, median.num_requests) == (2.0, 1.0, 1)
    assert median.ttft_ms is not None
    assert median.ttft_ms.p50 == pytest.approx(200)


def test_tokens_over_time_add_up_to_all_tokens() -> None:
    records = [record(0, [0.1, 0.9], 1.0, output_tokens=6), record(1, [0.5], 0.5, output_tokens=1)]
    middles, rates = tokens_over_time(records)
    assert list(middles) == pytest.approx([0.25, 0.75])
    assert list(rates) == pytest.approx([6, 8])  # 3 tokens of the first by its first chunk, then 3 and the second's


def test_a_dataset_of_either_form_gives_the_question_before_the_answer(tmp_path: Path) -> None:
    path = tmp_path / "sharegpt.json"
    path.write_text(
        '[{"id": "a", "conversations": [{"from": "system", "value": "Be brief."}, {"from": "human", "value": "Hi"},'
        ' {"from": "gpt", "value": "Hello"}, {"from": "human", "value": "Bye"}]},'
        '{"messages": [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"},'
        ' {"role": "user", "content": "3"}, {"role": "assistant", "content": "4"}]},'
        '{"conversations": [{"from": "gpt", "value": "Hello"}]}, {"conversations": [{"from": "dog", "value": "!"}]}]'
    )
    dataset = read_dataset(path, "chat", 5)
    system, hi = Message("system", "Be brief."), Message("user", "Hi")
    turns = (Message("user", "1"), Message("assistant", "2"), Message("user", "3"))
    assert dataset.requests == [Request((system, hi), 5), Request(turns, 5)]
    assert dataset.problems == [
        f"{path}, entry 3: there is no user's message to answer",
        f"{path}, entry 4: 'dog' is not one of human, user, system, gpt, assistant",
    ]
    with pytest.raises(CommandError, match=r"has no prompt that can be asked.*--endpoint chat"):
        read_dataset(path, "completions", 5)
    with pytest.raises(CommandError, match="cannot be read: No such file"):
        read_dataset(tmp_path / "none", "chat", 5)


def test_of_many_problems_the_first_are_named() -> None:
    assert named([str(number) for number in range(7)]) == "0; 1; 2; 3; 4; and 2 more"
