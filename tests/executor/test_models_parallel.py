"""Ranks of a tensor-parallel model together compute what one alone computes; only sums and joins pass between them."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from octavo.executor.models import LoadPlan, TensorParallel, load_model, read_model_config
from octavo.kernels import cpu
from octavo.models.convert import link_gguf
from tests.fakes.checkpoints import make_checkpoint
from tests.fakes.paged_decoding import PagedDecoding, assert_near
from tests.fakes.quantized_checkpoints import awq, compressed_fp8, compressed_packed, fp8_blocks, gptq
from tests.fakes.tiny_gguf import tiny_model, write_gguf

TIMEOUT_S = 30.0
TOKEN_IDS = list(range(3, 260, 13))


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

    def gather(self, x: Tensor) -> Tensor:
        return torch.cat(self.lockstep.exchange(self.rank, x), dim=-1)


def logits_of(directory: Path, parallel: TensorParallel, **options: Any) -> Tensor:
    config = read_model_config(directory)
    options = {"max_model_len": 64, "backend": cpu, "progress": False} | options
    model = load_model(LoadPlan(directory, config, torch.float32, parallel=parallel, **options))
    return PagedDecoding(model, 16, 4, torch.float32).step({0: TOKEN_IDS[:5], 1: TOKEN_IDS})


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("tied", [True, False])
def test_ranks_together_compute_the_whole_models_logits(tmp_path: Path, world_size: int, tied: bool) -> None:
    """2 KV heads among 4 ranks are held twice; the vocabulary does not divide; biases are added once."""
    assert_ranks_equal_the_whole(
        make_checkpoint(tmp_path, attention_bias=True, mlp_bias=True, vocab_size=319, tie_word_embeddings=tied),
        world_size,
    )


QUANTIZED: dict[str, Callable[[Path], Path]] = {
    "awq": lambda folder: awq(folder, attention_bias=True).quantized,
    "gptq": lambda folder: gptq(folder).quantized,
    "gptq, no groups": lambda folder: gptq(folder, -1, hidden_size=512, intermediate_size=512).quantized,
    "compressed-tensors": lambda folder: compressed_packed(folder, 32, symmetric=False).quantized,
    "fp8 blocks": lambda folder: fp8_blocks(folder).quantized,
    "fp8 channels": lambda folder: compressed_fp8(folder, "channel").quantized,
    "gguf, tied": lambda folder: mixed_gguf(folder),
}


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("name", QUANTIZED)
def test_ranks_together_compute_the_whole_quantized_models_logits(tmp_path: Path, name: str, world_size: int) -> None:
    """Inputs are cut between groups, outputs anywhere; llama.cpp's order of rows is undone before they are cut."""
    assert_ranks_equal_the_whole(QUANTIZED[name](tmp_path), world_size)


def mixed_gguf(folder: Path) -> Path:
    model = tiny_model("llama", hidden_size=256, intermediate_size=512, head_dim=64, tie_word_embeddings=True)
    kinds = {"attn_v.weight": "Q6_K", "token_embd.weight": "Q8_0", "attn_output.weight": "Q4_1", "": "Q4_K"}
    link_gguf(write_gguf(folder / "tiny.gguf", model, kinds=kinds), folder / "linked")
    return folder / "linked"


def test_ranks_round_plain_weights_as_the_whole_does(tmp_path: Path) -> None:
    """Where the shares of inputs are groups of 128, too."""
    directory = make_checkpoint(tmp_path, hidden_size=256, intermediate_size=256)
    assert_ranks_equal_the_whole(directory, 2, quantization="int8")


def assert_ranks_equal_the_whole(directory: Path, world_size: int, **options: Any) -> None:
    lockstep = Lockstep(world_size)

    def run(rank: int) -> Tensor:
        with lockstep.turn:
            return logits_of(directory, LockstepRank(rank, world_size, lockstep), **options)

    with ThreadPoolExecutor(world_size) as threads:
        results = list(threads.map(run, range(world_size)))
    expected_SV = logits_of(directory, TensorParallel(), **options)
    for logits_SV in results:
        assert_near(logits_SV, expected_SV)
