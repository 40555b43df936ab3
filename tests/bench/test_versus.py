"""`python -m octavo.bench.versus`: servers that are started in turn, measured, and ended with their children."""

import json
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
from aiohttp.test_utils import TestServer

from octavo.bench.serve.client import Server
from octavo.bench.serve.measure import measure
from octavo.bench.serve.work import Work
from octavo.bench.versus.__main__ import main
from octavo.bench.versus.one_at_a_time import load
from octavo.bench.versus.report import Report
from tests.fakes.commands import descendants, start, tiny_checkpoint
from tests.fakes.waiting import wait_until

ROOT = Path(__file__).parents[2]
FAKE = f"{sys.executable} -m tests.fakes.fake_openai --port {{port}}"
MUTE = f"{sys.executable} -u -c 'import signal; print(\"listens\"); signal.pause()' {{port}}"
# A server that is a child of what was started, as with many.
NESTED = f"{sys.executable} -c 'import subprocess, sys; subprocess.run(sys.argv[1:])' {FAKE}"


def versus(directory: Path, servers: dict[str, dict[str, Any]], *flags: str) -> int:
    tables = [
        f"[servers.{name}]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in table.items())
        for name, table in servers.items()
    ]
    (directory / "servers.toml").write_text("\n".join(tables))
    return main([str(directory / "servers.toml"), "--output-dir", str(directory / "out"), *flags])


def test_each_server_lives_once_a_round_and_is_compared_by_row(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    before = {process.pid for process in psutil.Process().children(recursive=True)}
    servers = {
        "ours": {"command": FAKE, "rows": ["streams"]},
        "theirs": {"command": NESTED, "rows": ["streams", "bf16"]},
    }
    assert versus(tmp_path, servers, "--rounds", "1", "--rows", "streams") == 0
    report = msgspec.json.decode((tmp_path / "out" / "versus.json").read_bytes(), type=Report)
    assert [(life.label, life.round) for life in report.lives] == [("ours", 1), ("theirs", 1)]
    assert all(life.first_token_s > 0 for life in report.lives)
    assert report.lives[1].pss_bytes > report.lives[0].pss_bytes + 10**6 > 2 * 10**6  # of both processes
    assert [(result.label, result.name) for result in report.results] == [
        ("ours", "streams, 32/32/128/64"),
        ("theirs", "streams, 32/32/128/64"),
    ]
    assert all(result.median.output_tokens == 32 * 64 for result in report.results)
    table = (tmp_path / "out" / "versus.md").read_text()
    assert "| ours | theirs | ours ÷ theirs |" in table
    assert capsys.readouterr().out == table
    assert (tmp_path / "out" / "versus.png").read_bytes().startswith(b"\x89PNG")
    assert {process.pid for process in psutil.Process().children(recursive=True)} <= before


@pytest.mark.parametrize(
    ("server", "said"),
    [
        ({"command": f"{sys.executable} -c 'exit(\"no such model\")' {{port}}"}, "ended with status 1: "),
        ({"command": "/no/such/program {port}"}, "/no/such/program cannot be started: No such file or directory"),
        ({"command": "serve"}, "server 'it' has no {port}"),
        ({"command": "serve {port}", "rows": ["fp4"]}, "has rows 'fp4'; there are bf16, 4-bit, streams"),
        ({"command": "serve '{port}", "rows": []}, "cannot be read: No closing quotation"),
        ({"commands": "serve {port}"}, "is no plan of servers: "),
    ],
)
def test_what_cannot_be_measured_is_one_sentence(
    server: dict[str, Any], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert versus(tmp_path, {"it": server}) == 1
    assert said in capsys.readouterr().err.splitlines()[-1]


async def test_transformers_answers_one_at_a_time(tmp_path: Path) -> None:
    server = load(tiny_checkpoint(tmp_path), "float32")
    async with TestServer(server.application()) as listening:
        asked = Server(str(listening.make_url("")).rstrip("/"))
        work = Work(num_prompts=3, max_concurrency=3, input_len="4", output_len="5")
        [run] = (await measure(asked, work)).runs
    assert (run.figures.num_failed, run.notes) == (0, [])
    assert [len(record.chunks_s) for record in run.requests] == [5, 5, 5]
    answers = sorted(
        (record.start_s + record.chunks_s[0], record.start_s + record.latency_s) for record in run.requests
    )
    assert all(end_s <= next_start_s for (_, end_s), (next_start_s, _) in pairwise(answers))


def test_told_to_end_it_ends_its_server(tmp_path: Path) -> None:
    plan = tmp_path / "servers.toml"
    plan.write_text(f"[servers.mute]\ncommand = {json.dumps(MUTE)}\n")
    process = start("octavo.bench.versus", str(plan), "--output-dir", str(tmp_path))
    log = tmp_path / "logs" / "mute-1.log"
    wait_until(lambda: log.exists() and log.read_text() == "listens\n")
    [server] = descendants(process)
    process.terminate()
    process.communicate(timeout=20)
    assert process.returncode == 130
    assert not server.is_running()
