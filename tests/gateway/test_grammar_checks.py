"""The processes that find out whether grammars can be used."""

import os
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from octavo.gateway.reading.grammar_checks import GrammarChecks
from octavo.gateway.request_error import RequestError
from octavo.gateway.text.grammar import json_schema_grammar
from tests.gateway.test_http_structured import EXPLODING, SCHEMA


@pytest.fixture
def checks(tiny_model: Path) -> Iterator[GrammarChecks]:
    checks = GrammarChecks(tiny_model)
    yield checks
    checks.close()


def burning(checks: GrammarChecks) -> list[int]:
    """Return the processor time, in ticks, of each process that checks grammars."""
    ticks = []
    for checker in checks._checkers:
        if checker._process is not None and checker._process.poll() is None:
            fields = Path(f"/proc/{checker._process.pid}/stat").read_text().rpartition(")")[2].split()
            ticks.append(int(fields[11]) + int(fields[12]))
    return ticks


def test_verdicts_are_kept_and_the_process_of_an_exploding_grammar_has_ended(checks: GrammarChecks) -> None:
    simple, exploding = json_schema_grammar(SCHEMA, "a"), json_schema_grammar(EXPLODING, "b")
    checks.check(simple)
    for _ in range(2):
        with pytest.raises(RequestError, match="b cannot be used: it takes more than"):
            checks.check(exploding)
    checks.check(json_schema_grammar({"const": 1}, "c"))
    before = burning(checks)
    time.sleep(0.2)
    assert sum(burning(checks)) - sum(before) < 0.1 * os.sysconf("SC_CLK_TCK")


def test_a_process_that_was_killed_is_started_again(checks: GrammarChecks) -> None:
    for index in range(4):
        checks.check(json_schema_grammar({"const": index}, "a"))
        for checker in checks._checkers:
            if checker._process is not None:
                checker._process.kill()
                checker._process.wait()


def test_a_tokenizer_that_cannot_be_used_refuses_grammars_alone(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(msgspec.json.encode({"model": {}}))
    checks = GrammarChecks(tmp_path)
    with pytest.raises(RequestError, match="the tokenizer of this model cannot be used for grammars"):
        checks.check(json_schema_grammar({}, "a"))
    checks.close()
    with pytest.raises(RequestError, match="stopping"):
        checks.check(json_schema_grammar({"const": 1}, "a"))
