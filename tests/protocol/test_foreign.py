"""Variables that look as if they were for this server: a platform's, another server's, misspelt ones."""

import logging

import pytest

from octavo.protocol.config import FIELDS, ConfigError
from octavo.protocol.settings.foreign import say_what_has_no_effect
from octavo.protocol.settings.loading import load_config, refuse_foreign_keys

# Kubernetes sets these in every pod of a namespace with the Services octavo, octavo-gateway and octavo-metrics.
PLATFORM = {
    "OCTAVO_SERVICE_HOST": "10.0.0.1",
    "OCTAVO_SERVICE_PORT": "8000",
    "OCTAVO_SERVICE_PORT_HTTP": "8000",
    "OCTAVO_PORT": "tcp://10.0.0.1:8000",
    "OCTAVO_PORT_8000_TCP": "tcp://10.0.0.1:8000",
    "OCTAVO_PORT_8000_TCP_PROTO": "tcp",
    "OCTAVO_PORT_8000_TCP_PORT": "8000",
    "OCTAVO_PORT_8000_TCP_ADDR": "10.0.0.1",
    "OCTAVO_GATEWAY_SERVICE_HOST": "10.0.0.2",
    "OCTAVO_GATEWAY_SERVICE_PORT": "80",
    "OCTAVO_GATEWAY_PORT": "tcp://10.0.0.2:80",
    "OCTAVO_GATEWAY_PORT_80_TCP_ADDR": "10.0.0.2",
    "OCTAVO_METRICS_SERVICE_HOST": "10.0.0.3",
    "OCTAVO_METRICS_PORT": "tcp://10.0.0.3:9090",
    "OCTAVO_SCHEDULER_0_PORT_5555_UDP": "udp://10.0.0.4:5555",
}


def said(caplog: pytest.LogCaptureFixture, environ: dict[str, str]) -> list[str]:
    caplog.set_level(logging.INFO)
    say_what_has_no_effect(environ, FIELDS)
    return [record.getMessage() for record in caplog.records]


def test_variables_of_a_platform_are_not_settings(caplog: pytest.LogCaptureFixture) -> None:
    assert load_config(PLATFORM) == load_config({})
    [line] = said(caplog, PLATFORM)
    assert all(name in line for name in PLATFORM)


@pytest.mark.parametrize("variable", PLATFORM)
def test_each_variable_of_a_platform_is_ignored(variable: str) -> None:
    assert load_config({variable: PLATFORM[variable]}) == load_config({})


def test_a_port_that_is_a_number_is_a_setting() -> None:
    config = load_config({**PLATFORM, "OCTAVO_PORT": "8001", "OCTAVO_METRICS_PORT": "9000"})
    assert (config.port, config.metrics_port) == (8001, 9000)


@pytest.mark.parametrize("variable", ["OCTAVO_SERVICES", "OCTAVO_GATEWAY_HOST", "OCTAVO_PORTS", "OCTAVO_GATEWAY_PORT"])
def test_a_variable_almost_like_a_platforms_is_an_error(variable: str) -> None:
    with pytest.raises(ConfigError, match=f"unknown variable {variable}"):
        load_config({variable: "1"})


def test_variables_of_other_servers_are_named(caplog: pytest.LogCaptureFixture) -> None:
    environ = {"VLLM_USE_MODELSCOPE": "1", "VLLM_LOGGING_LEVEL": "DEBUG", "LLAMA_ARG_PORT": "8080", "VLLM_EMPTY": ""}
    assert said(caplog, environ) == [
        "VLLM_USE_MODELSCOPE is a variable of vLLM and has no effect here; OCTAVO_USE_MODELSCOPE has",
        "VLLM_LOGGING_LEVEL is a variable of vLLM and has no effect here",
        "LLAMA_ARG_PORT is a variable of llama.cpp and has no effect here; OCTAVO_PORT has",
    ]


def test_misspelt_variables_of_the_hub_are_named_and_others_are_not(caplog: pytest.LogCaptureFixture) -> None:
    environ = {
        "HF_TOKN": "x",
        "HF_HUB_OFLINE": "1",
        "HF_TOKEN": "x",
        "HF_HOME": "/h",
        "HF_MY_OWN_THING": "1",
        "HOME": "/",
    }
    assert said(caplog, environ) == [
        "HF_TOKN is a variable that nobody reads; did you mean HF_TOKEN?",
        "HF_HUB_OFLINE is a variable that nobody reads; did you mean HF_HUB_OFFLINE?",
    ]


@pytest.mark.parametrize("variable", ["VLLM_API_KEY", "LLAMA_API_KEY", "SGLANG_API_KEY", "LLAMA_ARG_API_KEY"])
def test_a_key_of_another_server_is_refused(variable: str) -> None:
    environ = {variable: "abc"}
    with pytest.raises(
        ConfigError, match=f"{variable} has no effect here, so that the server would be open"
    ) as refused:
        refuse_foreign_keys(load_config(environ), environ)
    assert "abc" not in str(refused.value)
    refuse_foreign_keys(load_config({**environ, "OCTAVO_API_KEY": "ours"}), environ)
    refuse_foreign_keys(load_config({}), {variable: ""})
