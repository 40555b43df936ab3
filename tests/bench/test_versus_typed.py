"""`python -m octavo.bench.versus` with servers and work that are typed."""

import json
import shlex
import sys
from pathlib import Path

import msgspec
import pytest

from octavo.bench.serve.requests import random_requests
from octavo.bench.versus.__main__ import main
from octavo.bench.versus.plan import ROWS, typed_plan, typed_work
from octavo.bench.versus.report import Report, report_markdown
from octavo.errors import CommandError

PNG = b"\x89PNG\r\n\x1a\n"
FAKE = f"{shlex.quote(sys.executable)} -m tests.fakes.fake_openai --port {{port}}"


def test_typed_servers_take_turns_under_typed_work(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    servers = ("--server", f"ours={FAKE}", "--server", f"theirs={FAKE}")
    work = ("--work", "4/2/3/5", "--work", "2/1/6 shared+2/3")
    assert main([*servers, *work, "--repeats", "2", "--output-dir", str(tmp_path)]) == 0
    shown = capsys.readouterr()
    assert [line for line in shown.err.splitlines() if line.startswith("round")] == [
        "round 1 of 2: ours",
        "round 1 of 2: theirs",
        "round 2 of 2: ours",
        "round 2 of 2: theirs",
    ]
    report = json.loads((tmp_path / "versus.json").read_text())
    assert [(life["label"], life["round"]) for life in report["lives"]] == [
        ("ours", 1),
        ("theirs", 1),
        ("ours", 2),
        ("theirs", 2),
    ]
    assert all(life["pss_bytes"] > 1 << 20 and life["first_token_s"] > 0 for life in report["lives"])
    assert [result["name"] for result in report["results"]] == ["4/2/3/5", "2/1/6 shared+2/3"] * 4
    assert [result["median"]["output_tokens"] for result in report["results"]] == [20, 6] * 4
    assert "| requests/concurrency/prompt/output |  | ours | theirs | ours ÷ theirs |" in shown.out
    assert (tmp_path / "versus.md").read_text() == shown.out
    assert (tmp_path / "versus.png").read_bytes().startswith(PNG)


def test_the_tables_say_what_failed_and_what_was_other_work(tmp_path: Path) -> None:
    assert main(["--server", f"it={FAKE}", "--work", "1/1/3/2", "--repeats", "1", "--output-dir", str(tmp_path)]) == 0
    report = msgspec.json.decode((tmp_path / "versus.json").read_bytes(), type=Report)
    [run] = report.results[0].runs
    run = msgspec.structs.replace(run, failures={"timeout": 2}, notes=["answers without text: 1"])
    results = [msgspec.structs.replace(report.results[0], runs=[run])]
    assert report_markdown(msgspec.structs.replace(report, results=results)).split("\n\n")[-2:] == [
        "* it, 1/1/3/2: 2 failed: timeout",
        "* it, 1/1/3/2: answers without text: 1",
    ]


def test_no_row_finds_its_prompts_in_the_cache_of_another() -> None:
    begins = [
        {request.messages[0].content[:40] for request in random_requests(work)}
        for works in ROWS.values()
        for work in works
    ]
    assert sum(map(len, begins)) == len(set().union(*begins))


@pytest.mark.parametrize(
    ("servers", "said"),
    [
        (["ours"], "the command of server 'ours' has no {port}"),
        (["=run {port}"], "'' is no name for a server"),
        (["../up=run {port}"], "'../up' is no name for a server"),
        (["a=run {port}", "a=run {port}"], "two servers are called 'a'"),
        (["a=run '{port}"], "the command of server 'a' cannot be read: No closing quotation"),
    ],
)
def test_what_is_no_server_is_refused(servers: list[str], said: str) -> None:
    with pytest.raises(CommandError) as refused:
        typed_plan(servers, [])
    assert said in str(refused.value)


@pytest.mark.parametrize("text", ["8/1/64", "0/1/64/128", "8/0/64/128", "8/1/0/128", "8/1/64/many", "8/1/64 shared/8"])
def test_what_is_no_work_is_refused(text: str) -> None:
    with pytest.raises(CommandError, match="--work"):
        typed_work(text, seed=1)


def test_typed_work_is_read_as_it_is_named() -> None:
    for works in ROWS.values():
        for work in works:
            assert typed_work(work.name, work.seed) == work
