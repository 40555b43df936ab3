"""What a shared prefix costs, in tokens that were scheduled and blocks that were held."""

from pathlib import Path

import pytest
import torch

from octavo.executor.models import LoadPlan, load_model, read_model_config
from octavo.kernels import cpu
from octavo.protocol.sampling import Sampling
from tests.fakes.checkpoints import make_checkpoint
from tests.fakes.scheduler_with_runner import SchedulerWithRunner

PREFIX = [3 + (7 * i + i * i) % 300 for i in range(512)]
BLOCK_SIZE = 16


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> SchedulerWithRunner:
    directory: Path = make_checkpoint(tmp_path_factory.mktemp("tiny"), max_position_embeddings=1024)
    decoder = load_model(
        LoadPlan(
            directory, read_model_config(directory), torch.float32, max_model_len=1024, backend=cpu, progress=False
        )
    )
    return SchedulerWithRunner(decoder, torch.float32, max_model_len=1024, block_size=BLOCK_SIZE)


def request(tail: list[int]) -> tuple[list[int], Sampling]:
    return PREFIX + tail, Sampling(max_tokens=1, seed=0, temperature=0.0)


def test_eight_at_once_compute_a_prefix_once_and_hold_its_blocks_once(engine: SchedulerWithRunner) -> None:
    before = engine.scheduler.counters.num_scheduled_tokens
    results = engine.generate([request([3 + i]) for i in range(8)])
    assert engine.scheduler.counters.num_scheduled_tokens - before == len(PREFIX) + 8
    assert sorted(result.num_cached_tokens for result in results) == [0] + [len(PREFIX)] * 7
    assert engine.max_used_blocks == len(PREFIX) // BLOCK_SIZE + 8


def test_a_second_request_computes_only_what_is_new(engine: SchedulerWithRunner) -> None:
    engine.generate([request([11])])
    before = engine.scheduler.counters.num_scheduled_tokens
    [result] = engine.generate([request([12, 13, 14])])
    assert engine.scheduler.counters.num_scheduled_tokens - before == 3
    assert result.num_cached_tokens == len(PREFIX)
