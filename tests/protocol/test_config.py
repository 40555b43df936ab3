"""One Config from environment, flags and defaults; a wrong setting is an error that names the setting."""

import argparse

import msgspec
import pytest

from octavo.protocol.config import FIELDS, Config, ConfigError
from octavo.protocol.settings.flags import add_flags
from octavo.protocol.settings.loading import child_environ, load_config
from octavo.protocol.settings.values import parse_integer


def parse_flags(*arguments: str) -> dict[str, object]:
    parser = argparse.ArgumentParser()
    add_flags(parser)
    return vars(parser.parse_args(arguments))


def test_defaults():
    assert load_config({}) == Config()
    assert load_config({"HOME": "/", "OCTAV": "x"}) == Config()


def test_every_field_is_described():
    parser = argparse.ArgumentParser()
    add_flags(parser)
    text = " ".join(parser.format_help().split())
    for name in FIELDS:
        assert "--" + name.replace("_", "-") in text
    for action in parser._actions:
        assert action.help


@pytest.mark.parametrize(
    ("variable", "text", "value"),
    [
        ("OCTAVO_PORT", "0", 0),
        ("OCTAVO_MAX_MODEL_LEN", "8k", 8000),
        ("OCTAVO_KV_CACHE_MEMORY_BYTES", "2GiB", 2 << 30),
        ("OCTAVO_GPU_MEMORY_UTILIZATION", "0.5", 0.5),
        ("OCTAVO_ENABLE_PREFIX_CACHING", "false", False),
        ("OCTAVO_ASYNC_SCHEDULING", "0", False),
        ("OCTAVO_API_KEY", "one, two", ("one", "two")),
        ("OCTAVO_API_KEY", '["a,b", "c"]', ("a,b", "c")),
        ("OCTAVO_DTYPE", "bfloat16", "bfloat16"),
        ("OCTAVO_GENERATION_CONFIG", "vllm", "octavo"),
        ("OCTAVO_DTYPE", "half", "float16"),
    ],
)
def test_variables_are_read_by_type(variable, text, value):
    assert getattr(load_config({variable: text}), variable.removeprefix("OCTAVO_").lower()) == value


@pytest.mark.parametrize(
    ("variable", "text", "words"),
    [
        ("OCTAVO_MAX_NUM_SEQ", "1", "did you mean OCTAVO_MAX_NUM_SEQS?"),
        ("OCTAVO_PORT", "65536", "port cannot be 65536"),
        ("OCTAVO_PORT", "http", "port cannot be 'http'"),
        ("OCTAVO_MAX_NUM_SEQS", "0", "max_num_seqs"),
        ("OCTAVO_MAX_NUM_SEQS", "1.5", "max_num_seqs"),
        ("OCTAVO_DTYPE", "bfloat", "did you mean bfloat16?"),
        ("OCTAVO_ASYNC_SCHEDULING", "maybe", "async_scheduling"),
        ("OCTAVO_GPU_MEMORY_UTILIZATION", "1.5", "gpu_memory_utilization"),
        ("OCTAVO_PEER_TIMEOUT_S", "0", "peer_timeout_s"),
        ("OCTAVO_API_KEY", "[1", "api_key"),
    ],
)
def test_a_wrong_variable_is_named(variable, text, words):
    with pytest.raises(ConfigError) as raised:
        load_config({variable: text})
    assert words in str(raised.value)


def test_metrics_have_a_port_of_their_own():
    assert load_config({"OCTAVO_PORT": "0", "OCTAVO_METRICS_PORT": "0"}).metrics_port == 0
    with pytest.raises(ConfigError, match="metrics_port and port are both 9"):
        load_config({"OCTAVO_PORT": "9", "OCTAVO_METRICS_PORT": "9"})


def test_overrides_win_over_variables():
    config = load_config({"OCTAVO_PORT": "1", "OCTAVO_HOST": "h"}, {"port": 2})
    assert (config.port, config.host) == (2, "h")
    with pytest.raises(ConfigError, match="did you mean max_num_seqs"):
        load_config({}, {"max_nums_seqs": 2})


def test_budget_below_the_batch_is_refused():
    with pytest.raises(ConfigError, match="max_num_batched_tokens"):
        load_config({}, {"max_num_seqs": 64, "max_num_batched_tokens": 63})


def test_a_rank_beyond_the_group_is_refused():
    assert load_config({}, {"rank": 2, "tensor_parallel_size": 3}).rank == 2
    with pytest.raises(ConfigError, match=r"rank \(3\) must be below tensor_parallel_size \(3\)"):
        load_config({}, {"rank": 3, "tensor_parallel_size": 3})
    with pytest.raises(ConfigError, match="an address such as tcp://"):
        load_config({}, {"distributed_address": "host:1"})


def test_flags_that_were_not_given_leave_no_trace():
    assert parse_flags() == {}
    assert parse_flags("--port", "9", "--no-async-scheduling", "--api-key", "a", "--api-key", "b") == {
        "port": "9",
        "async_scheduling": False,
        "api_key": ["a", "b"],
    }


def test_flags_become_a_config():
    flags = parse_flags("--served-model-name", "x", "y", "--max-model-len", "4Ki", "--enable-prefix-caching")
    config = load_config({"OCTAVO_ENABLE_PREFIX_CACHING": "no"} | {}, flags)
    assert config.served_model_name == ("x", "y")
    assert config.max_model_len == 4096
    assert config.enable_prefix_caching is True


def test_a_flag_of_a_list_may_be_repeated_or_be_json():
    flags = parse_flags("--allowed-origins", "http://a", "--allowed-origins", '["http://b", "http://c"]')
    assert load_config({}, flags).allowed_origins == ("http://a", "http://b", "http://c")


def test_a_child_loads_the_same_config():
    config = load_config(
        {},
        {
            "model": "a b",
            "api_key": ["k,1", "k2"],
            "served_model_name": ["n"],
            "port": 0,
            "async_scheduling": False,
            "kv_cache_memory_bytes": "1GiB",
            "peer_timeout_s": 2.5,
            "seed": 0,
        },
    )
    environ = {"PATH": "/bin", "OCTAVO_HOST": "stale"}
    assert load_config(child_environ(config, environ, secrets=True)) == config
    without = child_environ(config, environ, secrets=False)
    assert without["PATH"] == "/bin"
    assert not any("k2" in value for value in without.values())
    assert load_config(without) == msgspec.structs.replace(config, api_key=())


@pytest.mark.parametrize(
    ("text", "value"),
    [("12", 12), ("8k", 8000), ("8K", 8192), ("8Ki", 8192), ("1.5k", 1500), ("256MiB", 256 << 20), ("2GB", 2 * 10**9)],
)
def test_integers_with_units(text, value):
    assert parse_integer(text) == value


@pytest.mark.parametrize("text", ["", "k", "-1", "1.5", "0x10", "1 000", "1e3", "5X"])
def test_a_text_that_is_not_an_integer_is_refused(text):
    with pytest.raises(ValueError, match="not"):
        parse_integer(text)
