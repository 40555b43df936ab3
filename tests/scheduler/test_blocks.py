"""The pool of blocks by itself."""

import pytest

from octavo.scheduler.blocks import BlockManager


def test_blocks_go_around() -> None:
    blocks = BlockManager(4)
    table = blocks.allocate(3)
    assert (blocks.num_free, blocks.num_cached, blocks.num_used) == (1, 0, 3)
    blocks.register(table[0], b"a")
    blocks.register(table[1], b"b")
    blocks.release(table)
    assert (blocks.num_free, blocks.num_cached, blocks.num_used) == (2, 2, 0)
    assert blocks.find([b"a", b"b", b"c"]) == table[:2]
    assert blocks.find([b"b"]) == [table[1]]
    blocks.acquire(table[:1])
    blocks.acquire(table[:1])
    assert blocks.count_cached(table[:2]) == 1
    blocks.check_integrity([table[:1], table[:1]])


def test_eviction_takes_free_blocks_first_and_then_tails_before_their_parents() -> None:
    blocks = BlockManager(4)
    table = blocks.allocate(3)
    for block, block_hash in zip(table, (b"a", b"b", b"c"), strict=True):
        blocks.register(block, block_hash)
    blocks.release(table)
    taken = blocks.allocate(2)
    assert taken[1] == table[2]
    assert blocks.num_evicted == 1
    assert blocks.find([b"a", b"b", b"c"]) == table[:2]


def test_the_first_block_of_a_hash_is_kept_and_found() -> None:
    blocks = BlockManager(2)
    first, second = blocks.allocate(2)
    blocks.register(first, b"a")
    blocks.register(second, b"a")
    assert blocks.find([b"a"]) == [first]
    blocks.release([second])
    assert blocks.num_free == 1
    blocks.check_integrity([[first]])


@pytest.mark.parametrize(
    ("tables", "message"),
    [([], "references"), ([[0, 1], [0]], "references"), ([[0]], "references")],
)
def test_integrity_notices_tables_that_do_not_agree(tables: list[list[int]], message: str) -> None:
    blocks = BlockManager(3)
    assert blocks.allocate(2) == [0, 1]
    blocks.check_integrity([[0, 1]])
    with pytest.raises(AssertionError, match=message):
        blocks.check_integrity(tables)


def test_integrity_notices_a_block_released_twice() -> None:
    blocks = BlockManager(3)
    table = blocks.allocate(1)
    blocks.release(table)
    blocks.release(table)
    with pytest.raises(AssertionError):
        blocks.check_integrity([])


def test_a_reset_pool_is_empty_and_knows_nothing() -> None:
    blocks = BlockManager(3)
    blocks.register(blocks.allocate(1)[0], b"a")
    blocks.reset(2)
    assert (blocks.num_blocks, blocks.num_free, blocks.find([b"a"])) == (2, 2, [])
    blocks.check_integrity([])
