"""What `octavo serve` says once it serves."""

import json
import shlex

import pytest

from octavo.launcher import ready_text
from protocol.config import Config


@pytest.mark.parametrize("name", ["tiny", "it's", 'a "b" \\c', "two\nlines", "é"])
def test_the_request_to_try_is_valid_whatever_the_model_is_called(name: str) -> None:
    first, command = ready_text(Config(model="m", served_model_name=(name,)), 1.0).split("\n", 1)
    assert first.endswith("Try:")
    words = shlex.split(command.replace("\\\n", ""))
    assert words[:2] == ["curl", "http://127.0.0.1:8000/v1/chat/completions"]
    assert json.loads(words[words.index("-d") + 1])["model"] == name
