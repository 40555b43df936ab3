"""The pool of KV blocks: how often each is referred to, which hold a known prefix, which can be given out."""

from collections import OrderedDict
from collections.abc import Iterable, Sequence


class BlockManager:
    """Every block is in exactly one of three places: free (holds nothing), cached (holds a prefix that nobody refers
    to, least recently used first) or used (referred to by block tables or by steps in flight)."""

    def __init__(self, num_blocks: int) -> None:
        self.num_evicted = 0
        self.reset(num_blocks)

    def reset(self, num_blocks: int) -> None:
        """Start again with an empty pool of another size."""
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._num_references = [0] * num_blocks
        self._hash_of: list[bytes | None] = [None] * num_blocks
        self._block_of: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` could give: free blocks, and cached blocks by evicting them."""
        return len(self._free) + len(self._cached)

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_available

    def find(self, hashes: Iterable[bytes]) -> list[int]:
        """Return the blocks that hold the longest known start of a chain of hashes. Takes no references."""
        blocks = []
        for block_hash in hashes:
            block = self._block_of.get(block_hash)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def count_cached(self, blocks: Iterable[int]) -> int:
        """Return how many of `blocks` are cached: acquiring a cached block makes one block less available."""
        return sum(block in self._cached for block in blocks)

    def acquire(self, blocks: Iterable[int]) -> None:
        """Take one more reference to each block, used or cached."""
        for block in blocks:
            if not self._num_references[block]:
                del self._cached[block]
            self._num_references[block] += 1

    def allocate(self, num_blocks: int) -> list[int]:
        """Return blocks with one reference each. The caller has checked that enough are available."""
        blocks = [self._free.pop() if self._free else self._evict() for _ in range(num_blocks)]
        for block in blocks:
            self._num_references[block] = 1
        return blocks

    def release(self, block_table: Sequence[int]) -> None:
        """Give up one reference to each block of a table.

        The last block goes first, so that it is evicted before its parents: without them nobody could find it.
        """
        for block in reversed(block_table):
            self._num_references[block] -= 1
            if self._num_references[block]:
                continue
            if self._hash_of[block] is None:
                self._free.append(block)
            else:
                self._cached[block] = None

    def register(self, block: int, block_hash: bytes) -> None:
        """Let other sequences find this full block, unless another block has the same hash."""
        if block_hash not in self._block_of:
            self._block_of[block_hash] = block
            self._hash_of[block] = block_hash

    def registered_hash(self, block: int) -> bytes | None:
        return self._hash_of[block]

    def _evict(self) -> int:
        block, _ = self._cached.popitem(last=False)
        block_hash = self._hash_of[block]
        assert block_hash is not None
        del self._block_of[block_hash]
        self._hash_of[block] = None
        self.num_evicted += 1
        return block

    def check_integrity(self, block_tables: Iterable[Iterable[int]]) -> None:
        """Raise AssertionError unless the pool agrees with all tables that name blocks."""
        expected = [0] * self.num_blocks
        for block_table in block_tables:
            for block in block_table:
                expected[block] += 1
        assert self._num_references == expected, f"references are {self._num_references}, by the tables {expected}"
        unreferenced = [block for block, num_references in enumerate(expected) if not num_references]
        assert sorted([*self._free, *self._cached]) == unreferenced, "free and cached are not the unreferenced blocks"
        assert not any(map(self._hash_of.__getitem__, self._free)), "a free block is still known by its hash"
        assert all(map(self._hash_of.__getitem__, self._cached)), "a cached block has no hash"
        named = {block_hash: block for block, block_hash in enumerate(self._hash_of) if block_hash}
        assert named == self._block_of, "hashes and blocks do not map both ways"
