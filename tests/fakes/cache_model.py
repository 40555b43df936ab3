"""A model whose logits are a pure function of the tokens that it finds in its paged cache, and of nothing else."""

from typing import ClassVar

import torch
from torch import Tensor

from octavo.executor.models.inputs import StepInputs
from octavo.executor.models.kv_caches import KVCaches, allocate_kv_caches
from octavo.executor.step.device import Device
from octavo.executor.step.runner import ModelRunner
from octavo.kernels import cpu

MODULUS = 8191


class CacheModel:
    """One layer, one head of size 1, the key of a position is its token: a lost or stale slot changes what follows."""

    kv_shapes: ClassVar = [(1, 1, 1)]

    def __init__(self, vocab_size: int = 64) -> None:
        self.vocab_size = vocab_size
        self.num_forwards = 0
        self.fails_at: int | None = None  # forward passes

    def forward(self, inputs: StepInputs, kv_caches: KVCaches) -> Tensor:
        self.num_forwards += 1
        if self.num_forwards == self.fails_at:
            raise ArithmeticError("told to fail")
        k_cache_NKDP, _ = kv_caches[0]
        block_size = k_cache_NKDP.shape[3]
        for token_id, slot in zip(inputs.token_ids_T.tolist(), inputs.slot_mapping_T.tolist(), strict=True):
            if slot >= 0:
                k_cache_NKDP[slot // block_size, 0, 0, slot % block_size] = token_id + 1
        hidden = []
        starts = inputs.cu_seqlens_q.tolist()
        for row, table in enumerate(inputs.block_tables_SM.tolist()):
            length = int(inputs.seq_lens_S[row])
            positions = inputs.positions_T[starts[row] : starts[row + 1]].tolist()
            assert positions == list(range(length - len(positions), length))
            tokens = [k_cache_NKDP[table[p // block_size], 0, 0, p % block_size].item() for p in range(length)]
            hidden += [[digest(tokens[: position + 1])] for position in positions]
        return torch.tensor(hidden, dtype=torch.float32)

    def compute_logits(self, hidden_SE: Tensor) -> Tensor:
        phases = (hidden_SE.double() + 1) * torch.arange(1, self.vocab_size + 1)
        return (3 * torch.sin(phases)).float()


def digest(tokens: list[float]) -> int:
    value = 7
    for token in tokens:
        value = (value * 31 + int(token)) % MODULUS
    return value


def make_runner(
    model: CacheModel | None = None, *, block_size: int = 4, num_blocks: int = 32, device: Device | None = None
) -> ModelRunner:
    """Return a runner of a CacheModel."""
    kv_caches = allocate_kv_caches([(1, 1, 1)], num_blocks, block_size, torch.float32, torch.device("cpu"))
    return ModelRunner(
        model or CacheModel(), kv_caches, cpu, block_size=block_size, num_blocks=num_blocks, device=device
    )
