"""Which Submits become sequences."""

import msgspec
import pytest

from octavo.protocol.messages import Submit, pack_ids
from octavo.protocol.sampling import Sampling
from octavo.scheduler.admission import SubmitError, make_prompt, make_sequence

GOOD = Submit(
    "r",
    1,
    pack_ids([0, 99]),
    Sampling(max_tokens=1, seed=2, stop_token_ids=(99,), logit_bias=((0, 1.0), (99, -1.0)), eos_token_ids=(100,)),
    pack_ids([5]),
    tenant="t",
    priority=3,
    cache_salt="c",
    body_id="b",
)


def test_every_field_arrives():
    sequence = make_sequence(GOOD, make_prompt(GOOD, 100), 7, vocab_size=100)
    assert (sequence.seq_id, sequence.sampling) == (7, GOOD.sampling)
    assert (sequence.prompt_token_ids.tolist(), sequence.output_token_ids.tolist()) == ([0, 99], [5])
    assert (sequence.tenant, sequence.priority, sequence.cache_salt, sequence.body_id) == ("t", 3, "c", "b")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"prompt_token_ids": b""}, "no tokens"),
        ({"prompt_token_ids": pack_ids([1, 100])}, "prompt_token_ids has 100"),
        ({"prompt_token_ids": pack_ids([-1])}, "prompt_token_ids has -1"),
        ({"prompt_token_ids": b"12345"}, "whole number of int32"),
        ({"output_token_ids": pack_ids([100])}, "output_token_ids has 100"),
        ({"sampling": Sampling(max_tokens=1, seed=1, stop_token_ids=(1, 100))}, "stop_token_ids has 100"),
        ({"sampling": Sampling(max_tokens=1, seed=1, logit_bias=((-2, 0.0),))}, "logit_bias has -2"),
    ],
)
def test_a_submit_that_would_crash_an_executor_is_refused(fields, words):
    submit = msgspec.structs.replace(GOOD, **fields)
    with pytest.raises(SubmitError, match=words):
        make_sequence(submit, make_prompt(submit, 100), 7, vocab_size=100)
