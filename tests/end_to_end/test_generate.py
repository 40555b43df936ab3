"""`octavo generate` with a real model: killed in the middle and run again, a file of prompts has the same results."""

import json
from pathlib import Path

import psutil
import pytest

from octavo.batch.escapes import escape
from tests.fakes.commands import ENGINE_FLAGS, descendants, start, tiny_checkpoint
from tests.fakes.waiting import wait_until

FLAGS = (*ENGINE_FLAGS, "--max-tokens", "20", "--temperature", "0")
BLANK = {4, 100, 199}
PROMPTS = [f"第{i}页：Number {i}\\nis" if i % 2 else f"{i}. 你好，世界" for i in range(200) if i not in BLANK]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


def test_a_killed_run_goes_on_and_gives_the_same_file(model: Path, tmp_path: Path) -> None:
    source, records = tmp_path / "prompts.txt", tmp_path / "results.jsonl"
    lines = iter(PROMPTS)
    source.write_text("".join("  \n" if i in BLANK else f"{next(lines)}\n" for i in range(200)))
    arguments = ("--model", str(model), *FLAGS, "--input-path", str(source), "--output-path")
    target = tmp_path / "results.txt"

    # Two at a time, so that most is left when it is killed.
    killed = start("octavo.entrypoints.cli", *arguments, str(target), "--max-num-seqs", "2")
    wait_until(lambda: (target.exists() and target.read_bytes().count(b"\n") >= 40) or killed.poll() is not None, 120)
    children = descendants(killed)
    killed.kill()
    killed.communicate()
    begun = target.read_bytes()
    assert 40 <= begun.count(b"\n") < 197
    assert len(children) >= 2
    psutil.wait_procs(children, timeout=30)
    assert not any(child.is_running() for child in children)

    again = start("octavo.entrypoints.cli", *arguments, str(target))
    assert again.communicate(timeout=120)[1].endswith(f"197 results are in {target}\n")
    assert again.returncode == 0
    whole = start("octavo", "generate", *arguments, str(records))
    whole.communicate(timeout=120)
    found = [json.loads(line) for line in records.read_text().splitlines()]
    assert [record["prompt"] for record in found] == [prompt.replace("\\n", "\n") for prompt in PROMPTS]
    assert all(len(record["outputs"][0]["token_ids"]) <= 20 for record in found)
    assert len({record["request_id"] for record in found}) == 197
    results = target.read_bytes()
    assert results.startswith(begun[: begun.rindex(b"\n") + 1])
    texts = [record["outputs"][0]["text"] for record in found]
    assert results.decode().splitlines() == [escape(text) for text in texts]
    assert len(set(texts)) > 100
