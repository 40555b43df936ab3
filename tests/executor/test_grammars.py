"""Sequences that follow a grammar: what they may generate, alone, beside others, with late masks, and after losses."""

import json
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from llguidance import LLMatcher

from octavo.executor.step.grammars import Grammars
from octavo.protocol.sampling import Sampling
from tests.fakes.cache_model import CacheModel
from tests.fakes.lazy_device import LazyDevice
from tests.fakes.model_directories import FIRST_BYTE, FIRST_WORD, IM_END, VOCAB_SIZE, text_ids, write_tiny_model
from tests.fakes.scheduler_with_runner import Generated, SchedulerWithRunner
from tests.fakes.slow_pool import SlowPool

PROMPT = text_ids("Say it.")


def json_schema(schema: Any) -> str:
    return json.dumps({"grammars": [{"json_schema": {**schema, "x-guidance": {"whitespace_flexible": False}}}]})


def regex(pattern: str) -> str:
    return LLMatcher.grammar_from_regex(pattern)


PERSON = json_schema(
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 8},
            "age": {"type": "integer", "minimum": 0, "maximum": 150},
            "tags": {"type": "array", "items": {"enum": ["é", "😀", "yes", "yesterday"]}, "maxItems": 3},
        },
        "required": ["name", "age", "tags"],
        "additionalProperties": False,
    }
)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


class SlowGrammars(Grammars):
    def __init__(self, directory: Path, *, build_s: float = 0.0, mask_s: float = 0.0) -> None:
        super().__init__(directory, VOCAB_SIZE)
        self._build_s = build_s
        self.threads = SlowPool(mask_s)

    def compile(self, grammar: str) -> LLMatcher:
        time.sleep(self._build_s)
        return super().compile(grammar)


def engine(grammars: Grammars, **options: Any) -> SchedulerWithRunner:
    return SchedulerWithRunner(
        CacheModel(VOCAB_SIZE), torch.float32, block_size=4, grammars=grammars, **{"num_blocks": 256} | options
    )


def sampling(seed: int = 1, **fields: Any) -> Sampling:
    return Sampling(**{"max_tokens": 150, "seed": seed, "eos_token_ids": (IM_END,)} | fields)


def text(given: Generated) -> str:
    token_ids = given.token_ids[:-1] if given.token_ids[-1:] == [IM_END] else given.token_ids
    spelled = (f" w{i}".encode() if i >= FIRST_WORD else bytes([i - FIRST_BYTE]) for i in token_ids)
    return b"".join(spelled).decode()


def is_person(answer: str) -> bool:
    value = json.loads(answer)
    tags = value.pop("tags")
    return (
        set(tags) <= {"é", "😀", "yes", "yesterday"}
        and len(tags) <= 3
        and 0 <= value.pop("age") <= 150
        and len(value.pop("name")) <= 8
        and not value
    )


@pytest.mark.parametrize("steps_ahead", [0, 1])
@pytest.mark.parametrize("is_lazy", [False, True])
def test_many_answers_follow_their_schema_beside_sequences_without_one(
    directory: Path, steps_ahead: int, is_lazy: bool
) -> None:
    device = LazyDevice() if is_lazy else None
    both = engine(Grammars(directory, VOCAB_SIZE), steps_ahead=steps_ahead, device=device)
    requests = [(PROMPT, sampling(seed, temperature=1.0 if seed % 3 else 0.0)) for seed in range(12)]
    found = both.generate(requests, arrivals={i: i for i in range(12)}, grammars=dict.fromkeys(range(0, 12, 2), PERSON))
    assert all(is_person(text(given)) and given.finish_reasons == ["stop"] for given in found[::2])
    alone = engine(Grammars(directory, VOCAB_SIZE), steps_ahead=0)
    for index, request in enumerate(requests):
        [expected] = alone.generate([request], grammars={0: PERSON} if index % 2 == 0 else {})
        assert expected.token_ids == found[index].token_ids


@pytest.mark.parametrize("steps_ahead", [0, 1])
@pytest.mark.parametrize("is_lazy", [False, True])
def test_late_masks_and_slow_compilers_change_no_token(directory: Path, steps_ahead: int, is_lazy: bool) -> None:
    requests = [(PROMPT, sampling(seed, repetition_penalty=1.1 if seed == 2 else 1.0)) for seed in range(5)]
    grammars = {0: PERSON, 1: PERSON, 2: PERSON, 3: regex("(ab|ba){20}")}
    prompt_ones = engine(Grammars(directory, VOCAB_SIZE), steps_ahead=0).generate(requests, grammars=grammars)
    device = LazyDevice() if is_lazy else None
    slow = engine(
        SlowGrammars(directory, build_s=0.05, mask_s=0.01), steps_ahead=steps_ahead, num_blocks=48, device=device
    )
    late_ones = slow.generate(requests, arrivals={1: 5, 3: 9}, grammars=grammars)
    assert [given.token_ids for given in late_ones] == [given.token_ids for given in prompt_ones]
    assert [given.finish_reasons for given in late_ones] == [["stop"]] * 4 + [["length"]]


def test_others_do_not_wait_for_a_grammar_that_compiles(directory: Path) -> None:
    class HeldGrammars(Grammars):
        may_compile = threading.Event()

        def compile(self, grammar: str) -> LLMatcher:
            assert self.may_compile.wait(60)
            return super().compile(grammar)

    grammars = HeldGrammars(directory, VOCAB_SIZE)
    both = engine(grammars)
    # Sequence 1 ends while the grammar of sequence 0 is held; then that may compile.
    threading.Thread(
        target=lambda: (_wait_for(lambda: 1 not in both.scheduler.sequences), grammars.may_compile.set())
    ).start()
    held, free = both.generate(
        [(PROMPT, sampling(1)), (text_ids("Go"), sampling(2, max_tokens=30, eos_token_ids=()))], grammars={0: PERSON}
    )
    assert len(free.token_ids) == 30
    assert is_person(text(held))


def _wait_for(reached: Callable[[], bool]) -> None:
    while not reached():
        time.sleep(0.005)


def test_preempted_answers_go_on(directory: Path) -> None:
    requests = [(PROMPT, sampling(seed)) for seed in range(6)]
    grammars = dict.fromkeys(range(6), PERSON)
    roomy = engine(Grammars(directory, VOCAB_SIZE)).generate(requests, grammars=grammars)
    tight = engine(Grammars(directory, VOCAB_SIZE), num_blocks=24, max_model_len=90)
    found = tight.generate([(p, s) for p, s in requests], grammars=grammars)
    assert tight.scheduler.counters.num_preemptions
    assert [given.token_ids for given in found] == [given.token_ids for given in roomy]


def test_answers_go_on_with_another_runner(directory: Path) -> None:
    first = engine(Grammars(directory, VOCAB_SIZE), steps_ahead=0)
    [expected] = first.generate([(PROMPT, sampling())], grammars={0: PERSON})
    second = engine(Grammars(directory, VOCAB_SIZE), steps_ahead=0)
    second.dies_at = {5, 11, 12}
    [found] = second.generate([(PROMPT, sampling())], grammars={0: PERSON})
    assert found.token_ids == expected.token_ids
    assert second.num_deaths == 3


def test_what_does_not_compile_ends_its_sequence_alone(directory: Path) -> None:
    both = engine(Grammars(directory, VOCAB_SIZE))
    wrong, right = both.generate(
        [(PROMPT, sampling(1)), (PROMPT, sampling(2))], grammars={0: json_schema({"type": "strin"}), 1: PERSON}
    )
    assert wrong.finish_reasons == ["error"]
    assert wrong.error == "the grammar does not compile: Invalid type: strin"
    assert is_person(text(right))


def test_a_grammar_that_is_too_much_work_ends_its_sequence_alone(directory: Path) -> None:
    bounds = json_schema({"allOf": [{"type": "integer", "multipleOf": p} for p in (3, 7, 11, 13, 17, 19, 23, 29)]})
    both = engine(Grammars(directory, VOCAB_SIZE))
    wrong, right = both.generate([(PROMPT, sampling(1)), (PROMPT, sampling(2))], grammars={0: bounds, 1: PERSON})
    assert wrong.finish_reasons == ["error"]
    assert "fuel" in (wrong.error or "")
    assert is_person(text(right))


def test_a_model_without_a_usable_tokenizer_ends_only_what_has_a_grammar(tmp_path: Path) -> None:
    both = engine(Grammars(tmp_path, VOCAB_SIZE))
    wrong, right = both.generate([(PROMPT, sampling(1)), (PROMPT, sampling(2, max_tokens=3))], grammars={0: PERSON})
    assert (wrong.finish_reasons, right.finish_reasons) == (["error"], ["length"])
    assert "tokenizer" in (wrong.error or "")


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_end_is_allowed_where_the_grammar_is_complete(directory: Path, temperature: float) -> None:
    one = engine(Grammars(directory, VOCAB_SIZE))
    # The end is made likely: it comes as soon as it is allowed.
    [given] = one.generate(
        [(PROMPT, sampling(temperature=temperature, logit_bias=((IM_END, 100.0),)))], grammars={0: regex("[ab]{3,9}")}
    )
    assert re.fullmatch("[ab]{3}", text(given))
    assert given.finish_reasons == ["stop"]


def test_min_tokens_forbid_an_end_until_the_grammar_allows_nothing_else(directory: Path) -> None:
    one = engine(Grammars(directory, VOCAB_SIZE))
    biased = {"logit_bias": ((IM_END, 100.0),)}
    [given] = one.generate([(PROMPT, sampling(min_tokens=6, **biased))], grammars={0: regex("[ab]{3,9}")})
    assert re.fullmatch("[ab]{6}", text(given))
    [given] = one.generate([(PROMPT, sampling(min_tokens=60, **biased))], grammars={0: regex("[ab]{3,9}")})
    assert re.fullmatch("[ab]{9}", text(given))
    assert given.finish_reasons == ["stop"]


def test_ends_late_means_where_the_grammar_allows_nothing_else(directory: Path) -> None:
    one = engine(Grammars(directory, VOCAB_SIZE))
    late = sampling(ends_late=True, logit_bias=((IM_END, 100.0),))
    [given] = one.generate([(PROMPT, late)], grammars={0: regex("[ab]{3,9}")})
    assert re.fullmatch("[ab]{9}", text(given))
    assert given.finish_reasons == ["stop"]


def test_biases_and_penalties_make_no_forbidden_token_possible(directory: Path) -> None:
    one = engine(Grammars(directory, VOCAB_SIZE))
    a, b, c = text_ids("abc")
    for fields in (
        {"logit_bias": ((a, -100.0), (b, -100.0), (c, 100.0))},
        {"repetition_penalty": 1e35},
        {"frequency_penalty": 2.0, "presence_penalty": 2.0},
        {"top_k": 1, "min_p": 1.0},
        {"temperature": 2.0, "top_p": 1e-6},
    ):
        [given] = one.generate([(PROMPT, sampling(**fields))], grammars={0: regex("[ab]{20}")})
        assert re.fullmatch("[ab]{20}", text(given)), fields


def test_log_probabilities_are_those_of_the_model(directory: Path) -> None:
    """As without a grammar they are of the raw distribution, so a chosen token may be an unlikely one."""
    one = engine(Grammars(directory, VOCAB_SIZE))
    [given] = one.generate([(PROMPT, sampling(num_logprobs=2, temperature=0.0))], grammars={0: regex("[ab]{4}")})
    assert given.logprobs is not None
    ranks = torch.frombuffer(bytearray(given.logprobs.token_ranks), dtype=torch.int32)
    assert given.logprobs.num_tokens == 5
    assert ranks.max() > 1


def test_another_eos_than_the_tokenizers_ends_an_answer(directory: Path) -> None:
    one = engine(Grammars(directory, VOCAB_SIZE))
    other = sampling(eos_token_ids=(0,), logit_bias=((0, 100.0),))
    [given] = one.generate([(PROMPT, other)], grammars={0: regex("[ab]{3,9}")})
    assert (given.token_ids[-1], len(given.token_ids), given.finish_reasons) == (0, 4, ["stop"])
