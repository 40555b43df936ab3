"""Bitwise the same tokens and log probabilities, whatever else runs and however the work is cut."""

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from octavo.executor.models import Decoder, LoadPlan, load_model, read_model_config
from octavo.kernels import cpu
from octavo.protocol.sampling import Sampling
from tests.fakes.checkpoints import make_checkpoint
from tests.fakes.scheduler_with_runner import Generated, SchedulerWithRunner

# dtype, and to what plain weights are rounded: quantized products are held to the same promise
MODELS = {
    "float32": (torch.float32, "auto"),
    "bfloat16": (torch.bfloat16, "auto"),
    "int8 in float32": (torch.float32, "int8"),
    "int4 in bfloat16": (torch.bfloat16, "int4"),
}
Request = tuple[list[int], Sampling]
SHARED = [3 + 5 * i % 310 for i in range(48)]


def requests() -> list[Request]:
    """Return 16 requests: greedy and random, with and without penalties, some that share a prefix."""
    rng = random.Random(7)
    made = []
    for i in range(16):
        prompt = [rng.randrange(3, 320) for _ in range(rng.choice([1, 7, 16, 40, 90]))]
        sampling = Sampling(
            max_tokens=rng.randint(10, 24),
            seed=rng.getrandbits(64),
            temperature=(0.0, 0.7, 1.3)[i % 3],
            top_p=(1.0, 0.9)[i % 2],
            top_k=(0, 0, 0, 30)[i % 4],
            repetition_penalty=(1.0, 1.2)[i % 5 == 0],
            frequency_penalty=(0.0, 0.3)[i % 6 == 0],
            num_logprobs=i % 4,
            num_prompt_logprobs=2 if i % 8 == 3 else None,
        )
        made.append(((SHARED if i % 4 == 1 else []) + prompt, sampling))
    return made


def heard(results: Sequence[Generated]) -> list[tuple[object, ...]]:
    """Return all that a client could tell apart, bit for bit."""
    return [(r.token_ids, r.logprobs, r.prompt_logprobs, r.finish_reasons) for r in results]


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Decoder, torch.dtype]:
    dtype, quantization = MODELS[request.param]
    target = tmp_path_factory.mktemp("tiny")
    directory: Path = make_checkpoint(target, "Qwen3ForCausalLM", dtype=dtype, num_hidden_layers=2)
    options = {"max_model_len": 256, "quantization": quantization, "progress": False}
    return load_model(LoadPlan(directory, read_model_config(directory), dtype, backend=cpu, **options)), dtype


@pytest.fixture(scope="module")
def alone(model: tuple[Decoder, torch.dtype]) -> list[tuple[object, ...]]:
    """Return what each request gives alone: one after the other, prompts whole, no prefix cache, no plan ahead."""
    engine = SchedulerWithRunner(*model, enable_prefix_caching=False, steps_ahead=0)
    results = [engine.generate([request])[0] for request in requests()]
    assert all(result.finish_reasons == ["length"] for result in results)
    assert len({tuple(result.token_ids) for result in results}) == 16
    return heard(results)


@pytest.mark.parametrize(("block_size", "steps_ahead"), [(1, 1), (8, 0), (16, 0), (16, 1), (32, 1)])
def test_together_in_blocks_of(
    block_size: int, steps_ahead: int, model: tuple[Decoder, torch.dtype], alone: list[tuple[object, ...]]
) -> None:
    engine = SchedulerWithRunner(*model, block_size=block_size, num_blocks=4096 // block_size, steps_ahead=steps_ahead)
    assert heard(engine.generate(requests(), arrivals={i: i // 2 for i in range(16)})) == alone


@pytest.mark.parametrize("max_num_batched_tokens", [1, 16, 23])
def test_in_chunks_of(
    max_num_batched_tokens: int, model: tuple[Decoder, torch.dtype], alone: list[tuple[object, ...]]
) -> None:
    engine = SchedulerWithRunner(*model, max_num_batched_tokens=max_num_batched_tokens, max_num_seqs=16)
    assert heard(engine.generate(requests())) == alone
    longest = max(len(prompt) for prompt, _ in requests())
    assert longest > max_num_batched_tokens
    assert max(sum(_num_tokens(s) for s in step.sequences) for step in engine.planned) <= max_num_batched_tokens


def test_with_prefix_hits(model: tuple[Decoder, torch.dtype], alone: list[tuple[object, ...]]) -> None:
    engine = SchedulerWithRunner(*model)
    assert heard(engine.generate(requests())) == alone
    again = engine.generate(requests())
    assert heard(again) == alone
    hits = [result.num_cached_tokens for result in again]
    expected = [
        0 if sampling.num_prompt_logprobs is not None else (len(prompt) - 1) // 16 * 16
        for prompt, sampling in requests()
    ]
    assert hits == expected


@pytest.mark.parametrize(("block_size", "steps_ahead"), [(1, 1), (8, 0), (16, 1)])
def test_with_preemptions_in_a_small_pool(
    steps_ahead: int, block_size: int, model: tuple[Decoder, torch.dtype], alone: list[tuple[object, ...]]
) -> None:
    """Two or three of the 16 fit at once; each grows past what it was admitted with."""
    engine = SchedulerWithRunner(*model, block_size=block_size, num_blocks=256 // block_size, steps_ahead=steps_ahead)
    assert heard(engine.generate(requests())) == alone
    assert engine.scheduler.counters.num_preemptions > 0
    assert engine.scheduler.num_used_blocks == 0


def _num_tokens(step: object) -> int:
    return max(1, len(step.token_ids) // 4)
