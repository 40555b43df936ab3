"""From the shares of a step to tensors: all tokens of all sequences in one row, without padding."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from executor.inputs import StepInputs
from executor.sequences import SequenceState
from protocol.messages import SequenceStep

# T tokens of this step, S sequences, M blocks of the longest block table


@dataclass(frozen=True, slots=True)
class Share:
    """One sequence's part of a step: `token_ids` from the first token that is not computed on."""

    state: SequenceState
    token_ids: bytes  # int32
    block_table: bytes  # int32
    sample: bool

    @classmethod
    def of(cls, step: SequenceStep, state: SequenceState) -> "Share | None":
        """Return the share that `step` asks for, or None if it does not continue `state`."""
        token_ids = state.share_token_ids(step)
        if token_ids is None:
            return None
        [block_table] = step.block_tables
        return cls(state, token_ids.tobytes(), block_table, step.sample)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids) // 4


def pack(shares: Sequence[Share], block_size: int, num_blocks: int, device: torch.device) -> StepInputs:
    """Return the StepInputs of one step's shares.

    Raises ValueError for a block table that is too short or names a block that is not there: a write through it would
    land in another sequence.
    """
    lengths_S = np.array([share.num_tokens for share in shares])
    starts_S = np.array([share.state.num_computed_tokens for share in shares])
    seq_lens_S = starts_S + lengths_S
    block_tables_SM = _block_tables(shares, -(-seq_lens_S // block_size), num_blocks)
    cu_seqlens_q = np.concatenate(([0], lengths_S.cumsum()))
    rows_T = np.repeat(np.arange(len(shares)), lengths_S)
    positions_T = np.arange(cu_seqlens_q[-1]) + (starts_S - cu_seqlens_q[:-1])[rows_T]
    blocks_T = block_tables_SM[rows_T, positions_T // block_size].astype(np.int64)
    token_ids_T = np.frombuffer(b"".join(share.token_ids for share in shares), np.int32)

    def tensor(values: np.ndarray, dtype: type) -> Tensor:
        return torch.from_numpy(values.astype(dtype)).to(device)

    return StepInputs(
        token_ids_T=tensor(token_ids_T, np.int64),
        positions_T=tensor(positions_T, np.int64),
        slot_mapping_T=tensor(blocks_T * block_size + positions_T % block_size, np.int64),
        cu_seqlens_q=tensor(cu_seqlens_q, np.int32),
        seq_lens_S=tensor(seq_lens_S, np.int32),
        block_tables_SM=tensor(block_tables_SM, np.int32),
    )


def _block_tables(shares: Sequence[Share], needed_S: np.ndarray, num_blocks: int) -> np.ndarray:
    """Return the blocks that the step reaches, padded with 0."""
    block_tables_SM = np.zeros((len(shares), needed_S.max()), np.int32)
    for row, (share, needed) in enumerate(zip(shares, needed_S.tolist(), strict=True)):
        table = np.frombuffer(share.block_table, np.int32)
        if len(table) < needed:
            raise ValueError(f"a block table has {len(table)} blocks where {needed} are needed")
        block_tables_SM[row, :needed] = table[:needed]
    if block_tables_SM.min() < 0 or block_tables_SM.max() >= num_blocks:
        raise ValueError(f"a block table names a block that is not among the {num_blocks} of the pool")
    return block_tables_SM
