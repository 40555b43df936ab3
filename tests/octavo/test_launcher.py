"""What `octavo serve` says once it serves."""

import json
import shlex

import pytest

from octavo.errors import LaunchError
from octavo.protocol.config import Config
from octavo.protocol.tcp import bind
from octavo.serving.launcher import ready_text
from octavo.serving.listening import server_url, with_ports


@pytest.mark.parametrize("name", ["tiny", "it's", 'a "b" \\c', "two\nlines", "é"])
def test_the_request_to_try_is_valid_whatever_the_model_is_called(name: str) -> None:
    first, command = ready_text(Config(model="m", served_model_name=(name,)), 1.0).split("\n", 1)
    assert first.endswith("Try:")
    words = shlex.split(command.replace("\\\n", ""))
    assert words[:2] == ["curl", "http://127.0.0.1:8000/v1/chat/completions"]
    assert json.loads(words[words.index("-d") + 1])["model"] == name


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("::", "http://[::1]:8000"),
        ("[::]", "http://[::1]:8000"),
        ("[::1]", "http://[::1]:8000"),
        ("::1", "http://[::1]:8000"),
        ("", "http://127.0.0.1:8000"),
        ("*", "http://127.0.0.1:8000"),
        ("0.0.0.0", "http://127.0.0.1:8000"),
        ("localhost", "http://localhost:8000"),
    ],
)
def test_the_url_that_is_shown_can_be_asked_whatever_the_host_is(host: str, url: str) -> None:
    config = Config(host=host, served_model_name=("m",))
    assert f" on {url} (" in ready_text(config, 1.0)
    assert f"curl {url}/v1/chat/completions" in ready_text(config, 1.0)
    assert server_url(config) == url


@pytest.mark.parametrize("host", ["::", "", "*", "[::1]"])
def test_a_port_is_found_for_every_spelling_and_one_in_use_is_named(host: str) -> None:
    config = with_ports(Config(host=host, port=0, metrics_port=0))
    assert config.port
    with bind(host, config.port) as taken:
        taken.listen()
        with pytest.raises(LaunchError, match="Address already in use"):
            with_ports(config)


def test_the_request_to_try_goes_to_the_socket_if_there_is_one() -> None:
    text = ready_text(Config(uds="/run/my octavo.sock", served_model_name=("m",)), 1.0)
    assert " on /run/my octavo.sock (" in text
    assert "curl --unix-socket '/run/my octavo.sock' http://localhost/v1/chat/completions" in text
