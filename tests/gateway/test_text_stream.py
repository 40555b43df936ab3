import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.gateway.text.delta import Delta, TokenLogprob
from octavo.gateway.text.text_stream import TextStream
from octavo.gateway.text.tokenizer import Tokenizer
from octavo.protocol.messages import Output, pack_ids
from octavo.protocol.sampling import Sampling
from tests.fakes.toy_model import logprobs_of

IM_END = 4


@pytest.fixture(scope="module")
def tokenizer(byte_level: Tokenizer) -> Tokenizer:
    return byte_level


def letters(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return one token a byte, whatever larger tokens there are."""
    token_of = {tokenizer.token_bytes(token_id): token_id for token_id in range(5, 261)}
    return [token_of[bytes([byte])] for byte in text.encode()]


def stream(
    tokenizer: Tokenizer,
    token_ids: list[int],
    *stop: str,
    finish_reason: str | None = "length",
    batches: list[int] | None = None,
    include_stop: bool = False,
    skip_special_tokens: bool = True,
    **sampling: object,
) -> list[Delta]:
    """Return the Deltas of `token_ids`, which come in `batches` (default: one by one)."""
    params = Sampling(max_tokens=100, seed=0, **sampling)
    detokenizer = tokenizer.detokenizer(skip_special_tokens=skip_special_tokens)
    text_stream = TextStream(detokenizer, params, [5, 6, 7], stop, include_stop)
    deltas, first = [], 0
    for size in batches or [1] * len(token_ids):
        batch, last = token_ids[first : first + size], first + size >= len(token_ids)
        logprobs = None if params.num_logprobs is None else logprobs_of(batch, params.num_logprobs)
        output = Output("r", first, pack_ids(batch), finish_reason if last else None, logprobs)
        if delta := text_stream.push(output):
            deltas.append(delta)
            if delta.finish_reason:
                break
        first += size
    return deltas


def joined(deltas: list[Delta]) -> tuple[str, list[int]]:
    return "".join(delta.text for delta in deltas), [token_id for delta in deltas for token_id in delta.token_ids]


@given(
    text=st.text("abé🫠 ", max_size=30),
    stop=st.lists(st.text("abé ", min_size=1, max_size=4), max_size=2),
    seed=st.integers(0, 1000),
    include_stop=st.booleans(),
)
@settings(deadline=None, max_examples=150)
def test_text_tokens_and_finish_do_not_depend_on_how_tokens_are_batched(
    tokenizer: Tokenizer, text: str, stop: list[str], seed: int, include_stop: bool
) -> None:
    token_ids = letters(tokenizer, text)
    batches, rng = [], random.Random(seed)
    while sum(batches) < len(token_ids):
        batches.append(min(rng.randint(1, 8), len(token_ids) - sum(batches)))
    single = stream(tokenizer, token_ids, *stop, include_stop=include_stop, num_logprobs=1)
    batched = stream(tokenizer, token_ids, *stop, include_stop=include_stop, num_logprobs=1, batches=batches or None)
    assert joined(single) == joined(batched)
    assert [(d.finish_reason, d.stop_reason) for d in single[-1:]] == [
        (d.finish_reason, d.stop_reason) for d in batched[-1:]
    ]
    ends = [(text.find(each) + len(each), -len(each), each) for each in stop if each in text]
    if ends:
        end, _, first = min(ends)
        assert joined(single) == (text[: end if include_stop else end - len(first)], letters(tokenizer, text[:end]))
        assert (single[-1].finish_reason, single[-1].stop_reason) == ("stop", first)
    else:
        assert joined(single) == (text, token_ids)
    for delta in [*single, *batched]:
        assert delta.text or delta.finish_reason
        assert [logprob.token_id for logprob in delta.logprobs or []] == delta.token_ids


@given(token_ids=st.lists(st.integers(0, 300), max_size=40), skip=st.booleans())
@settings(deadline=None, max_examples=150)
def test_text_alone_comes_as_it_does_with_log_probabilities(
    tokenizer: Tokenizer, token_ids: list[int], skip: bool
) -> None:
    plain = stream(tokenizer, token_ids, skip_special_tokens=skip)
    full = stream(tokenizer, token_ids, skip_special_tokens=skip, num_logprobs=0)
    assert [(d.text, d.token_ids, d.finish_reason) for d in plain] == [
        (d.text, d.token_ids, d.finish_reason) for d in full
    ]
    assert all(delta.logprobs is None for delta in plain)


def test_what_may_become_a_stop_string_is_held_with_its_tokens(tokenizer: Tokenizer) -> None:
    deltas = stream(tokenizer, letters(tokenizer, "x<en<end"), "<end>")
    # The second "<" shows that the first was no stop string; at the end nothing can come any more.
    assert [(delta.text, len(delta.token_ids)) for delta in deltas] == [("x", 1), ("<en", 3), ("<end", 4)]


def test_usage_ends_with_the_token_that_completed_the_stop_string(tokenizer: Tokenizer) -> None:
    token_ids = letters(tokenizer, "abSTOPcd")
    [delta] = stream(tokenizer, token_ids, "STOP", batches=[8])
    assert (delta.text, delta.token_ids, delta.stop_reason) == ("ab", token_ids[:6], "STOP")
    [delta] = stream(tokenizer, token_ids, "STOP", batches=[8], include_stop=True)
    assert (delta.text, delta.token_ids) == ("abSTOP", token_ids[:6])


def test_a_stop_string_counts_only_after_min_tokens(tokenizer: Tokenizer) -> None:
    deltas = stream(tokenizer, letters(tokenizer, "aXbXc"), "X", min_tokens=2)
    assert joined(deltas)[0] == "aXb"


def test_the_token_that_ends_a_text_by_its_id_is_counted_but_not_shown(tokenizer: Tokenizer) -> None:
    token_ids = [*letters(tokenizer, "ab"), IM_END]
    ended = {"finish_reason": "stop", "skip_special_tokens": False}
    deltas = stream(tokenizer, token_ids, eos_token_ids=(IM_END,), **ended)
    assert (joined(deltas), deltas[-1].stop_reason) == (("ab", token_ids), None)
    deltas = stream(tokenizer, token_ids, stop_token_ids=(IM_END,), **ended)
    assert (joined(deltas), deltas[-1].stop_reason) == (("ab", token_ids), IM_END)
    deltas = stream(tokenizer, token_ids, stop_token_ids=(IM_END,), include_stop=True, **ended)
    assert joined(deltas) == ("ab<|im_end|>", token_ids)


def test_a_text_cut_by_length_keeps_its_last_token(tokenizer: Tokenizer) -> None:
    deltas = stream(tokenizer, [*letters(tokenizer, "ab"), IM_END], skip_special_tokens=False)
    assert (joined(deltas)[0], deltas[-1].finish_reason) == ("ab<|im_end|>", "length")


def test_an_unfinished_character_at_the_end_is_shown_in_the_last_delta(tokenizer: Tokenizer) -> None:
    deltas = stream(tokenizer, letters(tokenizer, "aé")[:-1])
    assert [(delta.text, len(delta.token_ids)) for delta in deltas] == [("a", 1), ("\ufffd", 1)]


def test_tokens_without_text_come_with_the_next_text(tokenizer: Tokenizer) -> None:
    deltas = stream(tokenizer, [IM_END, IM_END, *letters(tokenizer, "a"), IM_END])
    assert [(delta.text, len(delta.token_ids)) for delta in deltas] == [("a", 3), ("", 1)]


def test_logprobs_are_those_of_the_tokens(tokenizer: Tokenizer) -> None:
    [token_id] = letters(tokenizer, "a")
    [delta] = stream(tokenizer, [token_id], num_logprobs=2)
    top = [(token_id + 1, -0.25), (token_id + 2, -0.5)]
    assert delta.logprobs == [TokenLogprob(token_id, -(token_id % 7) - 0.5, token_id + 1, top)]
    [delta] = stream(tokenizer, [token_id], num_logprobs=0)
    assert delta.logprobs is not None
    assert delta.logprobs[0].top == []
    assert stream(tokenizer, [token_id])[0].logprobs is None


def test_logprobs_of_the_prompt_come_first_even_without_text(tokenizer: Tokenizer) -> None:
    params = Sampling(max_tokens=0, seed=0, num_prompt_logprobs=0)
    text_stream = TextStream(tokenizer.detokenizer(), params, [5, 6, 7])
    delta = text_stream.push(Output("r", 0, finish_reason="length", prompt_logprobs=logprobs_of([6, 7], 0)))
    assert delta is not None
    assert delta.prompt_logprobs == [None, TokenLogprob(6, -6.5, 7, []), TokenLogprob(7, -0.5, 8, [])]
    assert (delta.text, delta.token_ids, delta.finish_reason) == ("", [], "length")


def test_a_failure_lets_out_what_was_held(tokenizer: Tokenizer) -> None:
    params = Sampling(max_tokens=9, seed=0)
    text_stream = TextStream(tokenizer.detokenizer(), params, [5], ("ab",))
    assert text_stream.push(Output("r", 0, pack_ids(letters(tokenizer, "a")))) is None
    delta = text_stream.push(Output("r", 1, finish_reason="error", error="it broke", num_cached_tokens=3))
    assert delta is not None
    assert (delta.text, delta.finish_reason, delta.error, delta.num_cached_tokens) == ("a", "error", "it broke", 3)
