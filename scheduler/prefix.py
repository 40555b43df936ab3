"""Which full blocks can be shared: one strong hash stands for everything that a block's content depends on.

The chain of hashes starts from who may share at all (tenant, cache salt); each block adds its token ids. Every part is
framed by its kind and length, so that different lists of parts never have the same bytes: a cache salt that reads like
a tenant's name is still a cache salt.
"""

import hashlib
import struct

from octavo.scheduler.blocks import BlockManager
from octavo.scheduler.sequence import PlannedShare, Sequence


class PrefixCache:
    """Finds the blocks that a sequence need not compute: they are known, or a step in flight computes them.

    A block becomes known only once the step that filled it is done.
    """

    def __init__(self, blocks: BlockManager, block_size: int, enabled: bool) -> None:
        self._blocks = blocks
        self._block_size = block_size
        self._enabled = enabled
        self.computing: dict[bytes, PlannedShare] = {}  # by hash; if two compute the same block, the first of them

    def find(self, sequence: Sequence) -> list[int] | None:
        """Return the known blocks with which a sequence can start; None if a step in flight computes the next block."""
        if not self._enabled:
            return []
        num_blocks = sequence.max_num_cached_tokens // self._block_size
        blocks = self._find_known(sequence, num_blocks)
        if len(blocks) < num_blocks and sequence.block_hashes[len(blocks)] in self.computing:
            return None
        return blocks

    def num_known_tokens(self, sequence: Sequence) -> int:
        """Return how many tokens the known blocks have with which a sequence could start."""
        if not self._enabled:
            return 0
        num_blocks = sequence.max_num_cached_tokens // self._block_size
        return len(self._find_known(sequence, num_blocks)) * self._block_size

    def enter(self, share: PlannedShare) -> None:
        """A share of known tokens is planned: other sequences may wait for the blocks that it fills."""
        first_block, end_block = share.start // self._block_size, share.end // self._block_size
        if first_block < end_block and self._enabled:
            share.hashes = self._hashes(share.sequence, end_block)[first_block:end_block]
            for each in share.hashes:
                self.computing.setdefault(each, share)

    def leave(self, share: PlannedShare) -> None:
        """A share is done, or will not be done."""
        for each in share.hashes:
            if self.computing.get(each) is share:
                del self.computing[each]

    def register(self, sequence: Sequence) -> None:
        """Let other sequences find the full blocks of a sequence."""
        end = sequence.num_computed_tokens // self._block_size
        if end > sequence.num_registered_blocks and self._enabled:
            hashes = self._hashes(sequence, end)
            for index in range(sequence.num_registered_blocks, end):
                self._blocks.register(sequence.block_table[index], hashes[index])
            sequence.num_registered_blocks = end

    def clear(self) -> None:
        """No step is in flight any more."""
        self.computing.clear()

    def _find_known(self, sequence: Sequence, num_blocks: int) -> list[int]:
        """Return which of the first `num_blocks` are known. The sequence keeps the hashes that were looked up."""
        return self._blocks.find(self._hashes(sequence, index + 1)[index] for index in range(num_blocks))

    def _hashes(self, sequence: Sequence, num_blocks: int) -> list[bytes]:
        """Return the hashes of at least the first `num_blocks` blocks. All tokens of these blocks are known.

        The hashes of a prompt's blocks are made once for all sequences of the prompt.
        """
        hashes, of_prompt = sequence.block_hashes, sequence.prompt.block_hashes
        if len(hashes) < min(num_blocks, len(of_prompt)):
            hashes += of_prompt[len(hashes) :]
        num_prompt_blocks = len(sequence.prompt_token_ids) // self._block_size
        while len(hashes) < num_blocks:
            parent = hashes[-1] if hashes else root_hash(sequence.tenant, sequence.cache_salt)
            start = len(hashes) * self._block_size
            hashes.append(block_hash(parent, sequence.pack(start, start + self._block_size)))
            if len(hashes) <= num_prompt_blocks:
                of_prompt.append(hashes[-1])
        return hashes


def root_hash(tenant: str, cache_salt: str) -> bytes:
    """Return the 32 bytes from which the chain of a sequence's block hashes starts."""
    parts = (("tenant", tenant), ("cache_salt", cache_salt))
    return hashlib.sha256(b"".join(_frame(kind, value.encode()) for kind, value in parts)).digest()


def block_hash(parent: bytes, token_ids: bytes) -> bytes:
    """Return the 32 bytes that stand for a full block and all blocks before it. `token_ids` are int32 bytes."""
    return hashlib.sha256(parent + _frame("token_ids", token_ids)).digest()


def _frame(kind: str, value: bytes) -> bytes:
    return struct.pack("<16sq", kind.encode(), len(value)) + value
