"""Ranks of a tensor-parallel model together compute what one alone computes; only sums and joins pass between them."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor

from executor.models import TensorParallel, load_model, read_model_config
from kernels import cpu
from tests.fakes.checkpoints import make_checkpoint
from tests.fakes.paged_decoding import PagedDecoding

TIMEOUT_S = 30.0
TOKEN_IDS = list(range(3, 300, 13))


class Lockstep:
    """Threads that take turns: one computes at a time, and all of them wait where they exchange tensors."""

    def __init__(self, world_size: int) -> None:
        self.turn = threading.Lock()
        self._barrier = threading.Barrier(world_size, timeout=TIMEOUT_S)
        self._slots: list[Tensor | None] = [None] * world_size

    def exchange(self, rank: int, x: Tensor) -> list[Tensor]:
        """Return every rank's `x`. The caller holds the turn, and holds it again afterwards."""
        self._slots[rank] = x.clone()
        self.turn.release()
        self._barrier.wait()
        parts = [part for part in self._slots if part is not None]
        self._barrier.wait()
        self.turn.acquire()
        return parts


class LockstepRank(TensorParallel):
    """A rank whose collectives go through a Lockstep in place of torch.distributed."""

    def __init__(self, rank: int, world_size: int, lockstep: Lockstep) -> None:
        super().__init__(rank, world_size)
        object.__setattr__(self, "lockstep", lockstep)

    def sum(self, x: Tensor) -> Tensor:
        return torch.stack(self.lockstep.exchange(self.rank, x)).sum(0)

    def concat(self, x: Tensor) -> Tensor:
        return torch.cat(self.lockstep.exchange(self.rank, x), dim=-1)


def logits_of(directory: Path, parallel: TensorParallel) -> Tensor:
    config = read_model_config(directory)
    model = load_model(
        directory, config, torch.float32, max_model_len=64, parallel=parallel, backend=cpu, progress=False
    )
    return PagedDecoding(model, 16, 4, torch.float32).step({0: TOKEN_IDS[:5], 1: TOKEN_IDS})


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("tied", [True, False])
def test_ranks_together_compute_the_whole_models_logits(tmp_path: Path, world_size: int, tied: bool) -> None:
    """2 KV heads among 4 ranks are held twice; the vocabulary does not divide; biases are added once."""
    directory = make_checkpoint(tmp_path, attention_bias=True, mlp_bias=True, vocab_size=319, tie_word_embeddings=tied)
    lockstep = Lockstep(world_size)

    def run(rank: int) -> Tensor:
        with lockstep.turn:
            return logits_of(directory, LockstepRank(rank, world_size, lockstep))

    with ThreadPoolExecutor(world_size) as threads:
        results = list(threads.map(run, range(world_size)))
    expected_SV = logits_of(directory, TensorParallel())
    for logits_SV in results:
        torch.testing.assert_close(logits_SV, expected_SV, rtol=1e-4, atol=1e-4)
