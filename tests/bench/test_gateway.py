"""What a streamed token costs a gateway: with a real one, and a model that has a token for each byte."""

import argparse
from pathlib import Path

import msgspec
import pytest

from octavo.bench.gateway import describe, open_rig
from octavo.errors import CommandError
from tests.fakes.model_directories import write_tiny_model


def test_it_streams_from_each_endpoint_as_often_and_as_long_as_asked(tmp_path: Path, capsys) -> None:
    parser = argparse.ArgumentParser()
    describe(parser)
    model, file = write_tiny_model(tmp_path), tmp_path / "results.json"
    flags = vars(parser.parse_args(f"--model {model} --streams 2 --tokens 3 70 --json {file}".split()))
    assert flags.pop("run")(flags) == 0
    results = msgspec.json.decode(file.read_bytes())
    asked = [(row["endpoint"], row["num_tokens"]) for row in results["rows"]]
    assert asked == [("completions", 3), ("completions", 70), ("chat", 3), ("chat", 70)]
    assert (results["bench"], results["flags"]["streams"]) == ("gateway", 2)
    assert capsys.readouterr().out.count("\n") == 2 + len(asked)


def test_an_answer_that_is_no_stream_ends_it(tmp_path: Path) -> None:
    with (
        open_rig(str(write_tiny_model(tmp_path)), num_streams=1, step_s=0.0) as rig,
        pytest.raises(CommandError, match="max_tokens"),
    ):
        rig.stream("completions", num_tokens=1 << 21)
