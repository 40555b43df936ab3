"""Keywords of LLM: the fields of Config, over the same variables as for servers."""

import argparse
import inspect
from pathlib import Path

import pytest

from octavo import LLM, AsyncLLM
from octavo.commands import serve
from octavo.protocol.config import FIELDS, ConfigError
from octavo.python.settings import LAUNCHER_FIELDS, config_of, wants_http


def flags_of_serve() -> set[str]:
    """Return the settings that `octavo serve` takes as flags, and its MODEL."""
    parser = argparse.ArgumentParser(add_help=False)
    serve.describe(parser)
    return {action.dest for action in parser._actions if action.dest in FIELDS}


@pytest.mark.parametrize("kind", [LLM, AsyncLLM])
def test_every_setting_is_a_keyword_and_is_explained(kind: type) -> None:
    names = FIELDS.keys() - set(LAUNCHER_FIELDS)
    assert set(inspect.signature(kind).parameters) == names == flags_of_serve()
    for name in names - {"model"}:
        assert f"    {name}: " in (kind.__doc__ or "")


@pytest.mark.parametrize("kind", [LLM, AsyncLLM])
@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"max_num_seq": 1}, "unexpected keyword argument 'max_num_seq'; did you mean max_num_seqs\\?"),
        ({"backend_address": "ipc:///b"}, "chooses its own"),
    ],
)
def test_a_keyword_that_is_none_is_a_type_error(kind: type, settings: dict[str, object], said: str) -> None:
    with pytest.raises(TypeError, match=said):
        kind("model", **settings)


def test_keywords_win_over_variables_and_none_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_MAX_NUM_SEQS", "8")
    monkeypatch.setenv("OCTAVO_BLOCK_SIZE", "32")
    monkeypatch.setenv("OCTAVO_API_KEY", "for-servers")
    config = config_of("LLM", Path("m"), {"max_num_seqs": 4, "block_size": None, "generation_config": "vllm"})
    assert (config.model, config.max_num_seqs, config.block_size) == ("m", 4, 32)
    assert config.generation_config == "octavo"


def test_only_a_keyword_asks_for_http(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_PORT", "9000")
    for settings in ({}, {"port": None}, {"max_num_seqs": 4}):
        assert not wants_http(settings)
    for settings in ({"port": 0}, {"host": "::1"}, {"metrics_port": 9001}, {"api_key": "k"}):
        assert wants_http(settings)


def test_a_wrong_value_and_a_launchers_variable_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="dtype cannot be 'bfloat'"):
        config_of("LLM", None, {"dtype": "bfloat"})
    monkeypatch.setenv("OCTAVO_FRONTEND_ADDRESS", "tcp://127.0.0.1:5555")
    with pytest.raises(ConfigError, match="LLM chooses its own"):
        config_of("LLM", None, {})
