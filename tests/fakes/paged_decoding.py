"""Greedy decoding on a model by hand: what a runner does, small enough to be believed."""

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from octavo.executor.models import LoadedModel
from octavo.executor.models.inputs import StepInputs
from octavo.executor.models.kv_caches import allocate_kv_caches


class PagedDecoding:
    """Sequences that share a paged cache, computed in chunks; their blocks are scattered over the pool."""

    def __init__(self, model: LoadedModel, num_blocks: int, block_size: int, dtype: torch.dtype) -> None:
        self._model = model
        self._block_size = block_size
        self._kv_caches = allocate_kv_caches(model.kv_shapes, num_blocks, block_size, dtype, torch.device("cpu"))
        order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(0))
        self._free_blocks: list[int] = order.tolist()
        self._tables: dict[int, list[int]] = {}
        self._num_computed_tokens: dict[int, int] = {}

    def step(self, chunks: dict[int, Sequence[int]]) -> Tensor:
        """Compute the next tokens of some sequences, by number; return the logits_SV of each one's last token."""
        inputs = self._inputs(chunks)
        hidden_TE = self._model.forward(inputs, self._kv_caches)
        return self._model.compute_logits(hidden_TE[inputs.cu_seqlens_q[1:].long() - 1])

    def score(self, token_ids: Sequence[int]) -> Tensor:
        """Compute the next tokens of sequence 0; return the logits_TV of all of them."""
        return self._model.compute_logits(self._model.forward(self._inputs({0: token_ids}), self._kv_caches))

    def _inputs(self, chunks: dict[int, Sequence[int]]) -> StepInputs:
        positions, slots = [], []
        for number, token_ids in chunks.items():
            start = self._num_computed_tokens.get(number, 0)
            stop = self._num_computed_tokens[number] = start + len(token_ids)
            table = self._tables.setdefault(number, [])
            while len(table) * self._block_size < stop:
                table.append(self._free_blocks.pop())
            positions += range(start, stop)
            slots += [
                table[p // self._block_size] * self._block_size + p % self._block_size for p in range(start, stop)
            ]
        tables = [self._tables[number] for number in chunks]
        width = max(map(len, tables))
        return StepInputs(
            token_ids_T=torch.tensor([token for token_ids in chunks.values() for token in token_ids]),
            positions_T=torch.tensor(positions),
            slot_mapping_T=torch.tensor(slots),
            cu_seqlens_q=torch.tensor([0, *accumulate(map(len, chunks.values()))], dtype=torch.int32),
            seq_lens_S=torch.tensor([self._num_computed_tokens[number] for number in chunks], dtype=torch.int32),
            block_tables_SM=torch.tensor([table + [0] * (width - len(table)) for table in tables], dtype=torch.int32),
        )


def greedy_tokens(
    model: LoadedModel,
    prompts: Sequence[Sequence[int]],
    num_tokens: Sequence[int],
    *,
    chunk_size: int,
    block_size: int = 4,
    dtype: torch.dtype = torch.float32,
) -> list[list[int]]:
    """Return `num_tokens[i]` greedy tokens after each prompt, all computed together, prompts in chunks."""
    num_blocks = sum(-(-(len(p) + n) // block_size) for p, n in zip(prompts, num_tokens, strict=True))
    decoding = PagedDecoding(model, num_blocks, block_size, dtype)
    todo = {number: list(prompt) for number, prompt in enumerate(prompts)}
    outputs: list[list[int]] = [[] for _ in prompts]
    while todo:
        chunks = {number: token_ids[:chunk_size] for number, token_ids in todo.items()}
        token_ids = decoding.step(chunks).argmax(-1).tolist()
        for (number, chunk), token_id in zip(chunks.items(), token_ids, strict=True):
            todo[number] = todo[number][len(chunk) :]
            if not todo[number]:
                outputs[number].append(token_id)
                todo[number] = [token_id]
            if len(outputs[number]) == num_tokens[number]:
                del todo[number]
    return outputs


def assert_greedy(logits_TV: Tensor, token_ids: Sequence[int], least_gap: float = 1e-3) -> None:
    """Assert that a reference's logits pick exactly these tokens, each with a clear gap to the second best."""
    best = logits_TV.topk(2).values
    assert (best[:, 0] - best[:, 1]).min() > least_gap, "the reference is undecided: choose another seed or prompt"
    assert list(token_ids) == logits_TV.argmax(-1).tolist()


def assert_near(logits_TV: Tensor, expected_TV: Tensor) -> None:
    """Assert that logits differ by less than 1e-4 of the largest: by no more than the order of sums makes them."""
    largest = expected_TV.abs().max()
    assert (logits_TV - expected_TV).abs().max() < 1e-4 * largest


def assert_rounded(logits_TV: Tensor, expected_TV: Tensor) -> None:
    """Assert that logits differ by less than 10 %, root mean square: inputs of 8 bits, or bfloat16, make them so."""
    error = (logits_TV - expected_TV).square().mean().sqrt()
    assert error < 0.1 * expected_TV.square().mean().sqrt()
