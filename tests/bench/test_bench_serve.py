"""`octavo bench serve` against a server whose every answer is known."""

import json
import signal
from pathlib import Path

import msgspec
import pytest

from octavo.bench.serve.results import read_result
from octavo.bench.serve.work import Work
from octavo.cli import main
from tests.fakes.commands import start
from tests.fakes.fake_openai import KEY, MODEL, fake_openai
from tests.fakes.waiting import wait_until

PNG = b"\x89PNG\r\n\x1a\n"


def bench_serve(*arguments: object) -> int:
    return main(["bench", "serve", *map(str, arguments)])


def lines_of(shown: str) -> dict[str, str]:
    """Return the lines of a table by their first words."""
    parts = [line.strip().split("  ", 1) for line in shown.splitlines()]
    return {part[0]: part[1].strip() for part in parts if len(part) == 2}


def test_without_a_name_the_four_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench"]) == 0
    listed = capsys.readouterr().out.split()
    assert {"serve", "step", "gateway", "scheduler"} <= set(listed)


def test_a_closed_loop_counts_what_the_server_gave(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    written, drawn = tmp_path / "result.json", tmp_path / "result.png"
    lengths = ("--input-len", 5, "--output-len", "3-6", "--prefix-len", 4)
    outputs = ("--json", written, "--plot", drawn, "--label", "ours", "--goodput", "e2el:60000")
    with fake_openai(dict.fromkeys(range(1, 19), "meet"), meeting_size=3) as server:
        load = ("--base-url", f"{server.url}/v1/", "--num-prompts", 9, "--max-concurrency", 3, "--repeat", 2)
        assert bench_serve(*load, *lengths, *outputs) == 0
    warm_up, bodies = server.bodies[0], server.bodies[1:]
    assert len(bodies) == 18
    assert len(server.connections) == 19
    assert server.most_under_way == 3
    assert warm_up["prompt"] not in [body["prompt"] for body in bodies]
    assert {len(body["prompt"].split()) for body in bodies} == {9}
    assert len({body["prompt"] for body in bodies}) == 18
    assert len({" ".join(body["prompt"].split()[:4]) for body in bodies}) == 2  # a shared prefix a run
    asked = sum(body["max_tokens"] for body in bodies) // 2

    shown = capsys.readouterr().out
    table = lines_of(shown)
    assert shown.startswith("ours: 9/3/4 shared+5/3-6, median of 2 runs\n")
    assert table["requests"] == "9 done, 0 failed"
    assert table["tokens"] == f"63 in, {asked} out"
    assert table["goodput"].endswith("requests/s, 100% (e2el within 60000 ms)")
    assert len(table["first token (ttft)"].split()) == 4

    assert drawn.read_bytes().startswith(PNG)
    result = read_result(written)
    assert result.work == Work(num_prompts=9, max_concurrency=3, input_len="5", output_len="3-6", prefix_len=4)
    assert result.server["model"] == MODEL
    assert {"CPU", "CPUs"} <= result.place.cpu.keys()
    for run in result.runs:
        assert run.notes == []
        assert [record.index for record in run.requests] == list(range(9))
        assert [len(record.chunks_s) for record in run.requests] == [record.output_tokens for record in run.requests]
        assert run.figures.output_tokens_per_s == pytest.approx(asked / run.figures.duration_s)


@pytest.mark.parametrize("rate", [500, "inf"])
def test_arrivals_wait_for_nobody(rate: object, capsys: pytest.CaptureFixture[str]) -> None:
    with fake_openai(dict.fromkeys(range(20), "meet"), meeting_size=20) as server:
        load = ("--base-url", server.url, "--num-prompts", 20, "--request-rate", rate, "--num-warmups", 0)
        assert bench_serve(*load) == 0
    assert server.most_under_way == 20
    assert "20 done, 0 failed" in capsys.readouterr().out


def test_what_is_sent() -> None:
    with fake_openai(needs_key=True) as server:
        assert bench_serve("--base-url", server.url, "--num-prompts", 2, "--api-key", KEY, "--num-warmups", 0) == 0
        flags = ("--endpoint", "chat", "--temperature", 0.5, "--no-ignore-eos", "--seed", 3, "--model", "another")
        assert bench_serve("--base-url", server.url, "--num-prompts", 1, "--num-warmups", 0, *flags) == 0
    plain, chat = server.bodies[0], server.bodies[2]
    assert plain | {"prompt": ""} == {
        "model": MODEL,
        "prompt": "",
        "max_tokens": 64,
        "temperature": 0.0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    assert [message["role"] for message in chat["messages"]] == ["user"]
    assert (chat["model"], chat["temperature"], chat["seed"], "ignore_eos" in chat) == ("another", 0.5, 3, False)


def test_failures_are_counted_by_reason_and_make_the_status_1(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    ways = {1: "refuse", 2: "error", 3: "cut", 4: "refuse", 5: "plain", 6: "short"}
    written = tmp_path / "result.json"
    with fake_openai(ways) as server:
        load = ("--base-url", server.url, "--num-prompts", 8, "--max-concurrency", 1, "--random-output-len", 4)
        assert bench_serve(*load, "--json", written) == 1
    shown = capsys.readouterr().out
    assert lines_of(shown)["requests"] == "4 done, 4 failed"
    assert lines_of(shown)["tokens"] == "21 in, 15 out"  # the server told nothing of a prompt
    assert "2 failed: status 429: full\n" in shown
    assert "1 failed: error in the stream: out of blocks\n" in shown
    [run] = read_result(written).runs
    assert sum(run.failures.values()) == 4
    assert len(run.failures) == 3
    assert "note: answers whose tokens the server did not count: 1; chunks are counted, prompts are not\n" in shown
    assert "note: answers not as long as asked: 1;" in shown


def test_an_answer_that_takes_too_long_is_a_failure(capsys: pytest.CaptureFixture[str]) -> None:
    with fake_openai({0: "hold"}) as server:
        load = ("--base-url", server.url, "--num-prompts", 1, "--num-warmups", 0, "--timeout-s", 0.2)
        assert bench_serve(*load) == 1
    assert "1 failed: timeout\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("ways", "needs_key", "said"),
    [
        ({0: "refuse"}, False, "a warm-up request to {url}/v1/completions failed: status 429: full"),
        ({}, True, "{url}/v1/models answers with status 401: no such key; --model and --api-key help"),
    ],
)
def test_what_cannot_begin_is_one_sentence(
    ways: dict[int, str], needs_key: bool, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with fake_openai(ways, needs_key=needs_key) as server:
        assert bench_serve("--base-url", server.url) == 1
    assert capsys.readouterr().err == f"octavo: {said.format(url=server.url)}\n"


def test_interrupted_it_shows_what_there_is(tmp_path: Path) -> None:
    written = tmp_path / "result.json"
    flags = ("--num-prompts", "6", "--max-concurrency", "1", "--num-warmups", "0", "--json", str(written))
    with fake_openai({3: "hold"}) as server:
        process = start("octavo", "bench", "serve", "--base-url", server.url, *flags)
        wait_until(lambda: len(server.bodies) == 4, 20)
        process.send_signal(signal.SIGINT)
        shown, said = process.communicate(timeout=20)
    assert (process.returncode, said) == (130, "")
    assert lines_of(shown)["requests"] == "3 done, 1 failed"
    assert "1 failed: interrupted\n" in shown
    assert [record.failure for record in read_result(written).runs[0].requests] == [None] * 3 + ["interrupted"]


def test_a_dataset_is_asked_in_its_order_and_what_is_wrong_in_it_is_named(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    dataset = tmp_path / "prompts.jsonl"
    turns = [{"from": "human", "value": "first"}, {"from": "gpt", "value": "yes"}]
    entries = [{"conversations": turns}, {"prompt": "second", "max_tokens": 2}, {"prompt": 3}, {"other": 1}]
    dataset.write_text("".join(f"{json.dumps(entry)}\n" for entry in entries) + "{broken\n")
    with fake_openai() as server:
        load = ("--base-url", server.url, "--dataset-path", dataset, "--num-warmups", 0, "--max-concurrency", 1)
        assert bench_serve(*load, "--sharegpt-output-len", 3) == 0
    assert [(body["prompt"], body["max_tokens"]) for body in server.bodies] == [("first", 3), ("second", 2)]
    assert not any("ignore_eos" in body for body in server.bodies)
    said = capsys.readouterr().err
    assert said.startswith(f"3 entries are left out: {dataset}:3: Expected `str | null`, got `int`")
    assert f"{dataset}:4: it needs one of conversations, messages and prompt; {dataset}:5: " in said


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--max-concurrency", 2, "--request-rate", 2), "two ways to send requests"),
        (("--num-prefixes", 2), "--num-prefixes needs --random-prefix-len"),
        (("--random-input-len", "0"), "of 1 or more"),
        (("--random-output-len", "many"), "not one of 128, 64-256"),
        (("--goodput", "first:3"), "'first:3' is not one of ttft, tpot, e2el"),
        (("--dataset-path", "x", "--random-input-len", 3), "--random-input-len is for random prompts"),
        (("--dataset", "x", "--prefix-len", 3), "--random-prefix-len is for random prompts"),
        (("--sharegpt-output-len", 3), "--sharegpt-output-len needs --dataset-path"),
        (("--request-rate", "0"), "above 0"),
        (("--base-url", "localhost:8000"), "has to begin with http://"),
        (("--compare", "a.json", "--seed", 3), "--seed is nothing that --compare does"),
    ],
)
def test_flags_that_make_no_sense_are_refused(
    flags: tuple[object, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exited:
        bench_serve(*flags)
    assert exited.value.code == 2
    assert said in capsys.readouterr().err


def test_results_are_compared_by_work_and_label(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    original, drawn = tmp_path / "result.json", tmp_path / "compared.png"
    with fake_openai() as server:
        load = ("--base-url", server.url, "--num-prompts", 2, "--max-concurrency", 2, "--random-output-len", 3)
        assert bench_serve(*load, "--json", original) == 0
    result, files = read_result(original), []
    for label, rates in {"ours": (10.0, 40.0, 30.0), "theirs": (20.0,)}.items():
        for number, rate in enumerate(rates):
            figures = msgspec.structs.replace(result.runs[0].figures, output_tokens_per_s=rate, gap_ms=None)
            run = msgspec.structs.replace(result.runs[0], figures=figures)
            files.append(tmp_path / f"{label}-{number}.json")
            files[-1].write_bytes(msgspec.json.encode(msgspec.structs.replace(result, label=label, runs=[run])))
    capsys.readouterr()
    assert bench_serve("--compare", *files, "--plot", drawn) == 0
    table = capsys.readouterr().out.splitlines()
    assert table[0] == "| requests/concurrency/prompt/output |  | ours | theirs | ours ÷ theirs |"
    assert table[2] == "| 2/2/128/3 | output tokens/s | 30.0 | 20.0 | 1.50 |"
    assert table[4] == "|  | gap, p99 (ms) | - | - | - |"
    assert drawn.read_bytes().startswith(PNG)

    files[0].write_text("{}")
    assert bench_serve("--compare", files[0]) == 1
    assert f"{files[0]} is no result of `octavo bench serve`" in capsys.readouterr().err
