"""Turns the shares of a step into arrays: all tokens of all sequences in one row, without padding."""

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from octavo.executor.step.sequences import SequenceState
from octavo.protocol.messages import SequenceStep

# T tokens of this step, S sequences, M blocks of the longest block table

PADDING_SLOT = -1  # its key and value are not stored


class ShareInputs(NamedTuple):
    """One sequence's part of a step. `token_ids` begin at the first token that is not computed yet."""

    state: SequenceState
    token_ids: bytes  # int32
    block_table: bytes  # int32
    sample: bool
    pending_row: int | None = None  # the row of the share's one token among the last step's samples
    ends_embedding: bool = False  # the share has the last token of a prompt that is embedded

    @classmethod
    def of(cls, step: SequenceStep, state: SequenceState) -> "ShareInputs | None":
        """Return the share that `step` asks for; None if `step` does not continue `state`."""
        token_ids = state.share_token_ids(step)
        if token_ids is None:
            return None
        pending_row = None if step.token_ids else state.pending_row
        ends_embedding = state.embeds and step.num_computed_tokens + len(token_ids) == state.num_prompt_tokens
        return cls(state, token_ids.tobytes(), step.block_table, step.sample, pending_row, ends_embedding)

    @property
    def has_grammar(self) -> bool:
        return self.state.has_grammar

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids) // 4


class StepArrays(NamedTuple):
    """The arrays of a StepInputs, in its order and dtypes."""

    token_ids_T: np.ndarray
    positions_T: np.ndarray
    slot_mapping_T: np.ndarray
    cu_seqlens_q: np.ndarray
    seq_lens_S: np.ndarray
    block_tables_SM: np.ndarray


def pack(shares: Sequence[ShareInputs], block_size: int, num_blocks: int) -> StepArrays:
    """Return the arrays of one step's shares. PENDING stands for a token that only the device knows.

    Raises ValueError if a block table is too short or names a block outside the pool: a write through it would land in
    another sequence.
    """
    # Python's arithmetic is faster here than NumPy's: each step's weights push NumPy's code out of the CPU's caches, so
    # its first use takes as long as the rest of this function takes for one sequence.
    lengths = [share.num_tokens for share in shares]
    seq_lens = [share.state.num_computed_tokens + length for share, length in zip(shares, lengths, strict=True)]
    block_tables_SM = _block_tables(shares, [-(-seq_len // block_size) for seq_len in seq_lens], num_blocks)
    token_ids_T = np.frombuffer(b"".join([share.token_ids for share in shares]), np.int32)
    positions, slots = _places(shares, seq_lens, block_tables_SM, block_size)
    return StepArrays(
        token_ids_T=token_ids_T.astype(np.int64),
        positions_T=np.array(positions, np.int64),
        slot_mapping_T=np.array(slots, np.int64),
        cu_seqlens_q=np.array([0, *accumulate(lengths)], np.int32),
        seq_lens_S=np.array(seq_lens, np.int32),
        block_tables_SM=block_tables_SM,
    )


def pad(arrays: StepArrays, num_seqs: int, num_table_blocks: int) -> StepArrays:
    """Return a decode step of `num_seqs` sequences with block tables of `num_table_blocks`.

    A padding sequence has one token; the token sees block 0 and is stored nowhere.
    """
    num_more = num_seqs - len(arrays.seq_lens_S)
    width = arrays.block_tables_SM.shape[1]
    return StepArrays(
        token_ids_T=np.pad(arrays.token_ids_T, (0, num_more)),
        positions_T=np.pad(arrays.positions_T, (0, num_more)),
        slot_mapping_T=np.pad(arrays.slot_mapping_T, (0, num_more), constant_values=PADDING_SLOT),
        cu_seqlens_q=np.arange(num_seqs + 1, dtype=np.int32),
        seq_lens_S=np.pad(arrays.seq_lens_S, (0, num_more), constant_values=1),
        block_tables_SM=np.pad(arrays.block_tables_SM, ((0, num_more), (0, num_table_blocks - width))),
    )


def pending_rows(shares: Sequence[ShareInputs]) -> tuple[np.ndarray, np.ndarray]:
    """Return the pending tokens of the step, and their rows among the last step's samples, int64."""
    tokens, rows, end = [], [], 0
    for share in shares:
        end += share.num_tokens
        if share.pending_row is not None:
            tokens.append(end - 1)
            rows.append(share.pending_row)
    return np.array(tokens, np.int64), np.array(rows, np.int64)


def _block_tables(shares: Sequence[ShareInputs], needed: Sequence[int], num_blocks: int) -> np.ndarray:
    """Return the first `needed` blocks of each share, which the step reaches, padded with 0."""
    for share, num_needed in zip(shares, needed, strict=True):
        if len(share.block_table) < 4 * num_needed:
            raise ValueError(f"a block table has {len(share.block_table) // 4} blocks where {num_needed} are needed")
    width = max(needed)
    rows = [share.block_table[: 4 * n].ljust(4 * width, b"\0") for share, n in zip(shares, needed, strict=True)]
    packed = bytearray().join(rows)
    block_ids = np.frombuffer(packed, np.uint32)  # a negative id becomes a large one
    if block_ids[block_ids.argmax()] >= num_blocks:
        raise ValueError(f"a block table names a block that is not among the {num_blocks} of the pool")
    return np.ndarray((len(shares), width), np.int32, packed)


def _places(
    shares: Sequence[ShareInputs], seq_lens: Sequence[int], block_tables_SM: np.ndarray, block_size: int
) -> tuple[list[int], list[int]]:
    """Return the positions of all tokens, and the slots of their keys and values. Slots of a block are adjacent."""
    positions: list[int] = []
    slots: list[int] = []
    for row, (share, end) in enumerate(zip(shares, seq_lens, strict=True)):
        start = share.state.num_computed_tokens
        positions += range(start, end)
        if start + 1 == end:  # one token, as in a decode step
            slots.append(block_tables_SM.item(row, start // block_size) * block_size + start % block_size)
            continue
        while start < end:
            entry, offset = divmod(start, block_size)
            num_tokens = min(block_size - offset, end - start)
            slot = block_tables_SM.item(row, entry) * block_size + offset
            slots += range(slot, slot + num_tokens)
            start += num_tokens
    return positions, slots
