"""Steps of equal sequences for one runner, as a scheduler would plan them, and how long each takes."""

import math
import time
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch

from octavo.bench.step.floor import StepShape
from octavo.executor.models.kv_caches import KVCaches
from octavo.executor.step.runner import ModelRunner
from octavo.protocol.config import Config
from octavo.protocol.messages import SequenceInit, SequenceStep, Step, StepResult, pack_ids
from octavo.protocol.sampling import Sampling

ROUND_TOKENS = 16  # by which the sequences of a decode step grow before they begin anew
TILE_BLOCKS = 64  # with random keys and values, again and again in the pool
CASE_S = 5.0  # after which a case has been repeated often enough


class Case(NamedTuple):
    """A step to time: each of `num_seqs` sequences computes `num_new_tokens` up to `length`, which is at least 2."""

    num_seqs: int
    num_new_tokens: int
    length: int

    @property
    def name(self) -> str:
        if self.num_new_tokens > 1:
            return f"prefill of {self.num_new_tokens} tokens"
        return f"batch {self.num_seqs}, context {self.length}"

    @property
    def first_length(self) -> int:
        """Return how long the sequences of a decode step are with their first token, whose step is not timed."""
        return max(1, self.length - ROUND_TOKENS)

    @property
    def shape(self) -> StepShape:
        """Return the mean of the steps that are timed, in which sequences grow to `length`."""
        if self.num_new_tokens > 1:
            return StepShape(self.num_seqs, self.num_new_tokens, self.length)
        return StepShape(self.num_seqs, 1, (self.first_length + 1 + self.length) // 2)


def why_not(case: Case, config: Config, max_model_len: int, num_blocks: int) -> str | None:
    """Return why no server with these settings would come to do such a step; None if it could."""
    needed_blocks = case.num_seqs * math.ceil(case.length / config.block_size)
    if case.num_seqs > config.max_num_seqs:
        return f"max_num_seqs is {config.max_num_seqs}"
    if case.num_seqs * case.num_new_tokens > config.max_num_batched_tokens:
        return f"max_num_batched_tokens is {config.max_num_batched_tokens}"
    if case.length > max_model_len:
        return f"max_model_len is {max_model_len}"
    if needed_blocks > num_blocks:
        return f"it needs {needed_blocks} KV blocks, and there is room for {num_blocks}"
    return None


class Steps:
    """Plans and times the steps of a runner that nobody else uses.

    Sequences have blocks of their own all over the pool, in random order, whose keys and values are random: fresh pages
    would all be one page of zeros, which lies in the first cache.
    """

    def __init__(self, runner: ModelRunner, vocab_size: int, temperature: float) -> None:
        self._runner = runner
        self._sampling = Sampling(max_tokens=1 << 20, seed=0, temperature=temperature)
        self._random = np.random.default_rng(0)
        self._token_ids = self._random.integers(0, vocab_size, 1 << 14, dtype=np.int32)
        self._num_filled_blocks = 0

    def times_s(self, case: Case, num_repeats: int) -> list[float]:
        """Return the seconds of `num_repeats` such steps; of fewer, but one, if they take longer than CASE_S."""
        times_s: list[float] = []
        steps = self.plan(case)
        while len(times_s) < num_repeats and (not times_s or sum(times_s) < CASE_S):
            step = next(steps)
            started_s = time.perf_counter()
            self.run(step)
            times_s.append(time.perf_counter() - started_s)
        return times_s

    def run(self, step: Step) -> None:
        result = self._runner.run(step)
        assert isinstance(result, StepResult), result

    def plan(self, case: Case) -> Iterator[Step]:
        """Yield such steps without end, to be run in turn; what has to be run before the first of them is."""
        tables = self._tables(case)
        return self._prefill(case, tables) if case.num_new_tokens > 1 else self._decode(case, tables)

    def _prefill(self, case: Case, tables: list[bytes]) -> Iterator[Step]:
        while True:
            yield self._first_step(case.num_new_tokens, tables)
            self._runner.reset()

    def _decode(self, case: Case, tables: list[bytes]) -> Iterator[Step]:
        while True:
            self._runner.reset()
            self.run(self._first_step(1, tables, num_computed_tokens=case.first_length - 1))
            for position in range(case.first_length, case.length):
                parts = [SequenceStep(i, position, b"", table, True) for i, table in enumerate(tables)]
                yield Step("", "", 1, parts)

    def _first_step(self, num_new_tokens: int, tables: list[bytes], num_computed_tokens: int = 0) -> Step:
        length = num_computed_tokens + num_new_tokens
        sequences = []
        for seq_id, table in enumerate(tables):
            token_ids = np.roll(self._token_ids, seq_id)[np.arange(length) % len(self._token_ids)]
            init = SequenceInit(self._sampling, length)
            new = token_ids[num_computed_tokens:].tobytes()
            sequences.append(SequenceStep(seq_id, num_computed_tokens, new, table, True, init))
        return Step("", "", 1, sequences)

    def _tables(self, case: Case) -> list[bytes]:
        """Return each sequence's block table, over blocks that are filled."""
        each = math.ceil(case.length / self._runner.block_size)
        self._fill(case.num_seqs * each)
        blocks = self._random.permutation(case.num_seqs * each).reshape(case.num_seqs, each)
        return [pack_ids(table) for table in blocks.tolist()]

    def _fill(self, num_blocks: int) -> None:
        if num_blocks > self._num_filled_blocks:
            fill_with_noise(self._runner.kv_caches, self._num_filled_blocks, num_blocks)
            self._num_filled_blocks = num_blocks


def fill_with_noise(kv_caches: KVCaches, first_block: int, end_block: int) -> None:
    """Write random numbers of a usual size into the blocks `first_block` to `end_block`."""
    for cache in (cache for layer in kv_caches for cache in layer):
        tile = torch.randn(TILE_BLOCKS, *cache.shape[1:]).to(cache.dtype)
        for start in range(first_block, end_block, TILE_BLOCKS):
            target = cache[start : min(start + TILE_BLOCKS, end_block)]
            target.copy_(tile[: len(target)])
