"""SamplingParams: the fields of the HTTP API, under its checks, as keywords."""

import copy
import inspect
import typing

import pytest

from octavo import SamplingParams, StructuredOutputsParams
from octavo.gateway.openai.neutral import OnlyNeutral
from octavo.gateway.openai.types import CommonRequest


def test_every_sampling_field_of_the_http_api_is_a_keyword() -> None:
    no_sampling = {
        "model",
        "stream",
        "stream_options",
        "cache_salt",
        "user",
        "metadata",
        "response_format",
        "store",
        "service_tier",
        "max_completion_tokens",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "prompt_cache_options",
        "moderation",
        "priority",
        "request_id",
        "return_token_ids",
        "return_tokens_as_token_ids",
        "truncate_prompt_tokens",
        "truncation_side",
    }
    hints = typing.get_type_hints(CommonRequest, include_extras=True)
    honoured = {
        name
        for name, hint in hints.items()
        if not any(isinstance(mark, OnlyNeutral) for mark in getattr(hint, "__metadata__", ()))
    }
    assert set(inspect.signature(SamplingParams).parameters) == honoured - no_sampling | {"logprobs", "prompt_logprobs"}


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"temperature": -1}, "temperature: expected number >= 0"),
        ({"temperature": float("nan")}, "temperature has to be finite"),
        ({"logit_bias": {5: float("inf")}}, "logit_bias has to be finite"),
        ({"logit_bias": {5: 200.0}}, "logit_bias"),
        ({"max_tokens": 0}, "max_tokens must be at least 1"),
        ({"n": 0}, "n: expected integer >= 1"),
        ({"n": True}, "n: expected integer"),
        ({"stop": ["a", ""]}, "stop cannot hold an empty string"),
        ({"logprobs": 21}, "logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"bad_words": ["x"]}, "bad_words is not supported"),
        ({"structured_outputs": {}}, "structured_outputs needs one of"),
        ({"structured_outputs": StructuredOutputsParams(json={}, regex="a")}, "exclude each other"),
        ({"structured_outputs": StructuredOutputsParams(choice=[])}, r"structured_outputs\.choice"),
        ({"structured_outputs": StructuredOutputsParams(structural_tag="x")}, "structural_tag 'x' is not supported"),
        ({"guided_json": "{"}, "guided_json cannot be used: it is not JSON"),
    ],
)
def test_a_value_that_cannot_be_is_named(fields: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        SamplingParams(**fields)


def test_an_unknown_field_names_the_nearest() -> None:
    with pytest.raises(TypeError, match=r"'temprature'; did you mean temperature\?"):
        SamplingParams(temprature=0)
    with pytest.raises(TypeError, match="no field 'stream'"):
        SamplingParams(stream=True)


def test_fields_can_be_read_and_set_under_the_same_checks() -> None:
    params = SamplingParams(temperature=0.5, logit_bias={7: 1.0})
    assert (params.temperature, params.max_tokens, params.logit_bias) == (0.5, 16, {"7": 1.0})
    params.max_tokens = 3
    with pytest.raises(ValueError, match="top_p"):
        params.top_p = 2
    with pytest.raises(AttributeError, match=r"did you mean top_k\?"):
        params.topk = 2
    assert params == SamplingParams(temperature=0.5, logit_bias={7: 1.0}, max_tokens=3)
    assert repr(copy.deepcopy(params)) == "SamplingParams(temperature=0.5, logit_bias={7: 1.0}, max_tokens=3)"


def test_no_limit_is_something_else_than_none_said() -> None:
    assert SamplingParams(max_tokens=None) != SamplingParams()


def test_max_tokens_shows_as_its_signature_says() -> None:
    signature = inspect.signature(SamplingParams).parameters["max_tokens"]
    assert SamplingParams().max_tokens == signature.default == 16
    assert SamplingParams(max_tokens=None).max_tokens is None
    assert SamplingParams(max_tokens=3).max_tokens == 3
