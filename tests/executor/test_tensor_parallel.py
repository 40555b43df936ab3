"""Ranks together generate what one alone does, token for token, whatever the scheduler makes of the work.

Real processes that meet through gloo. Greedy tokens must not hang on rounding: the model alone shows a clear gap.
"""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from llguidance import LLMatcher

from octavo.executor.models import LoadPlan, load_model, read_model_config
from octavo.kernels import cpu
from octavo.protocol.config import Config
from octavo.protocol.messages import Logprobs, NeedInit, StepResult
from octavo.protocol.sampling import Sampling
from tests.fakes.checkpoints import make_checkpoint
from tests.fakes.model_directories import FIRST_BYTE, IM_END, write_tiny_model
from tests.fakes.rank_group import Followers, RankGroup, free_address
from tests.fakes.runner_driver import init, share, step
from tests.fakes.scheduler_with_runner import Generated, SchedulerWithRunner
from tests.fakes.slow_pool import SlowPool

BLOCK_SIZE = 8
LEAST_GAP = 1e-3  # between the log probabilities of the best two tokens
PREFIX = [3 + 5 * i % 310 for i in range(20)]
LENGTHS = (1, 30, 9, 17, 40, 5)
# The vocabulary does not divide. 2 ranks have a KV head each, of 4 ranks two hold the same. Tied and untied heads.
MODELS = {2: {"tie_word_embeddings": False}, 4: {"tie_word_embeddings": True}}


def requests() -> list[tuple[list[int], Sampling]]:
    """Return greedy requests, half of them with one prefix; one is penalized, one wants its prompt scored."""
    made = []
    for i, length in enumerate(LENGTHS):
        prompt = [3 + (11 * i + 7 * j * j) % 310 for j in range(length)]
        sampling = Sampling(
            max_tokens=10,
            seed=i,
            temperature=0.0,
            num_logprobs=2,
            frequency_penalty=0.5 if i == 3 else 0.0,
            num_prompt_logprobs=1 if i == 4 else None,
        )
        made.append(((PREFIX if i % 2 else []) + prompt, sampling))
    return made


@pytest.fixture(scope="module")
def configs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[int, Config]]:
    """Return the Config of rank 0 by the number of ranks; the others are there."""
    made = {}
    tokenizer = write_tiny_model(tmp_path_factory.mktemp("tokenizer"))
    for world_size, differences in MODELS.items():
        directory = tmp_path_factory.mktemp("tiny")
        make_checkpoint(
            directory, attention_bias=True, mlp_bias=True, vocab_size=319, num_hidden_layers=2, **differences
        )
        shutil.copy(tokenizer / "tokenizer.json", directory)
        made[world_size] = Config(
            model=str(directory),
            dtype="float32",
            block_size=BLOCK_SIZE,
            kv_cache_memory_bytes=1 << 20,
            num_threads=1,
            tensor_parallel_size=world_size,
            distributed_address=free_address() if world_size == 2 else f"file://{directory}/ranks",
        )
    with Followers(list(made.values())) as followers:
        yield made
        lives = [sum(rank < world_size for world_size in made) for rank in (1, 2, 3)]
        for (status, said), num_lives in zip(followers.wait(), lives, strict=True):
            assert status == 0
            assert said.count("another rank has ended") == num_lives


@pytest.fixture(scope="module", params=MODELS)
def group(request: pytest.FixtureRequest, configs: dict[int, Config]) -> Iterator[RankGroup]:
    with RankGroup(configs[request.param]) as group:
        yield group


@pytest.fixture(scope="module")
def alone(group: RankGroup) -> list[Generated]:
    """Return what each request gives alone on one rank, its prompt in one piece."""
    directory = Path(group.config.model)
    decoder = load_model(
        LoadPlan(directory, read_model_config(directory), torch.float32, max_model_len=256, backend=cpu, progress=False)
    )
    engine = SchedulerWithRunner(decoder, torch.float32, enable_prefix_caching=False, steps_ahead=0)
    results = [engine.generate([request])[0] for request in requests()]
    for result, (_, sampling) in zip(results, requests(), strict=True):
        best, second = top_logprobs(result.logprobs).T
        if not sampling.frequency_penalty:
            assert (best - second).min() > LEAST_GAP, "the model is undecided: choose another prompt"
    assert len({tuple(result.token_ids) for result in results}) == len(results)
    return results


def engine_of(group: RankGroup, **limits: object) -> SchedulerWithRunner:
    group.reset()
    engine = SchedulerWithRunner(group.decoder, torch.float32, block_size=BLOCK_SIZE, **limits)
    engine.runner = group
    return engine


def top_logprobs(logprobs: Logprobs) -> np.ndarray:
    return np.frombuffer(logprobs.top_logprobs, np.float32).reshape(logprobs.num_tokens, -1)


def assert_same(results: list[Generated], expected: list[Generated]) -> None:
    """Assert the same tokens, and log probabilities that differ by rounding alone."""
    assert [result.token_ids for result in results] == [result.token_ids for result in expected]
    for result, other in zip(results, expected, strict=True):
        np.testing.assert_allclose(top_logprobs(result.logprobs), top_logprobs(other.logprobs), atol=1e-4)
        assert (result.prompt_logprobs is None) == (other.prompt_logprobs is None)
        if other.prompt_logprobs is not None:
            np.testing.assert_allclose(
                top_logprobs(result.prompt_logprobs), top_logprobs(other.prompt_logprobs), atol=1e-4
            )


def test_together_and_again_with_prefix_hits(group: RankGroup, alone: list[Generated]) -> None:
    engine = engine_of(group, num_blocks=512)
    together = engine.generate(requests())
    assert_same(together, alone)
    again = engine.generate(requests())
    assert sum(result.num_cached_tokens for result in again) > sum(result.num_cached_tokens for result in together) > 0
    # on every rank the bits are those of the first time
    assert [result.logprobs for result in again] == [result.logprobs for result in together]


def test_in_chunks(group: RankGroup, alone: list[Generated]) -> None:
    engine = engine_of(group, num_blocks=512, max_num_batched_tokens=23, max_num_seqs=8)
    assert_same(engine.generate(requests()), alone)
    assert any(not share.sample for planned in engine.planned for share in planned.sequences)


def test_with_preemptions(group: RankGroup, alone: list[Generated]) -> None:
    engine = engine_of(group, num_blocks=10, max_model_len=80, enable_prefix_caching=False)
    assert_same(engine.generate(requests()), alone)
    assert engine.scheduler.counters.num_preemptions > 0


def test_what_cannot_be_done_is_left_by_every_rank(group: RankGroup, alone: list[Generated]) -> None:
    group.reset()
    assert isinstance(group.launch(step(1, share(7, 0, [5], [0]))), NeedInit)
    group.keep_alive()
    prompt, _ = requests()[0]
    result = group.launch(step(1, share(7, 0, prompt, [0], init=init(prompt)))).wait()
    assert isinstance(result, StepResult)
    assert result.sequences[0].token_ids == alone[0].token_ids[:1]


@pytest.mark.parametrize("delay_s", [0.0, 0.01])
def test_all_ranks_agree_on_who_follows_a_grammar_and_who_sits_out(group: RankGroup, delay_s: float) -> None:
    regex = LLMatcher.grammar_from_regex("(ab|cd){4,6}")
    given = [
        (prompt, Sampling(max_tokens=30, seed=i, eos_token_ids=(IM_END,))) for i, (prompt, _) in enumerate(requests())
    ]
    engine = engine_of(group, num_blocks=512)
    group.grammars.builders, group.grammars.threads = SlowPool(2 * delay_s), SlowPool(delay_s)
    found = engine.generate(given, arrivals={3: 4}, grammars=dict.fromkeys(range(0, 6, 2), regex) | {1: "no grammar"})
    for each in found[::2]:
        answer = bytes(token_id - FIRST_BYTE for token_id in each.token_ids[:-1]).decode()
        assert re.fullmatch("(ab|cd){4,6}", answer)
        assert each.finish_reasons == ["stop"]
    assert found[1].finish_reasons == ["error"]
    engine = engine_of(group, num_blocks=512, steps_ahead=0)
    assert [each.token_ids for each in engine.generate(given[::2], grammars=dict.fromkeys(range(3), regex))] == [
        each.token_ids for each in found[::2]
    ]
