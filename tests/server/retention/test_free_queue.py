"""The two classes of free block."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from tests.fakes.blocks import Block, StockQueue
from tests.server.retention.support import admit, finish, hashes, table
from turncache_server.retention.free_queue import FreeQueue
from turncache_server.retention.ledger import Ledger
from turncache_server.retention.lineages import ChainBlock, LineageTable, Signal


@dataclass
class Pool:
    """A queue with its ledger and table, and what the shell would do around them."""

    blocks: list[Block]
    queue: FreeQueue
    ledger: Ledger
    table: LineageTable

    def order(self) -> list[int]:
        """Ids in the order of the walk."""
        return [block.block_id for block in self.queue.get_all_free_blocks()]

    def pop(self, count: int) -> list[int]:
        """Ids of the next blocks."""
        return [block.block_id for block in self.queue.popleft_n(count)]

    def serve(
        self,
        session: str,
        text: str,
        block_ids: list[int],
        *,
        retain_s: float | None = None,
        rest_id: int | None = None,
    ) -> None:
        """Let a call over popped blocks end, and free them as vLLM does, tail first."""
        admission = admit(self.table, session, text)
        rest = None if rest_id is None else ChainBlock(rest_id, self.ledger.epoch[rest_id], b"rest")
        chain = [
            ChainBlock(block_id, self.ledger.epoch[block_id], chain_hash)
            for block_id, chain_hash in zip(block_ids, hashes(text), strict=True)
        ]
        for block in chain:
            self.blocks[block.block_id].block_hash = block.hash
        effect = finish(self.table, admission, chain, retain_s=retain_s, rest=rest)
        self.queue.reclassify(effect.changed)
        self.queue.prepend_n([] if rest_id is None else [self.blocks[rest_id]])
        self.queue.append_n([self.blocks[block_id] for block_id in reversed(block_ids)])


@pytest.fixture
def pool() -> Pool:
    """Ten blocks, block 0 taken as vLLM's null block."""
    return make_pool()


def make_pool(num_blocks: int = 10) -> Pool:
    """Adopt a fresh stock queue."""
    blocks = [Block(block_id) for block_id in range(num_blocks)]
    stock = StockQueue(blocks)
    stock.popleft()
    ledger, lineages = Ledger(num_blocks), table(num_blocks)
    queue = FreeQueue.adopt(stock, num_blocks=num_blocks, ledger=ledger, table=lineages)
    return Pool(blocks, queue, ledger, lineages)


def test_adoption_takes_the_free_blocks_in_their_order(pool: Pool) -> None:
    """All of them, as ordinary blocks, without raising an epoch."""
    assert pool.order() == list(range(1, 10))
    assert (pool.queue.num_free_blocks, pool.queue.num_retained) == (9, 0)
    assert pool.ledger.epoch == [0] * 10


def test_adoption_in_the_middle_of_service_knows_blocks_when_they_are_freed() -> None:
    """A block that was in use is retained like any other afterwards."""
    blocks = [Block(block_id) for block_id in range(6)]
    stock = StockQueue(blocks)
    stock.popleft_n(4)
    ledger, lineages = Ledger(6), table(6)
    queue = FreeQueue.adopt(stock, num_blocks=6, ledger=ledger, table=lineages)
    pool = Pool(blocks, queue, ledger, lineages)
    assert not queue.is_free(1)
    queue.append_n([blocks[1]])
    queue.prepend_n([blocks[2]])
    assert pool.order() == [2, 4, 5, 1]
    effect = finish(
        lineages, admit(lineages, "s", "ab"), [ChainBlock(1, 0, b"a"), ChainBlock(2, 0, b"ab")]
    )
    queue.reclassify(effect.changed)
    assert queue.is_retained(1)
    assert pool.order() == [4, 5, 2, 1]


@pytest.mark.parametrize("num_blocks", [5, 9], ids=["half", "one short"])
def test_a_wrong_number_of_blocks_is_refused_and_takes_nothing(num_blocks: int) -> None:
    """The stock queue stays whole: the engine goes on with it."""
    stock = StockQueue([Block(block_id) for block_id in range(10)])
    with pytest.raises(ValueError, match="expected each id once"):
        FreeQueue.adopt(
            stock, num_blocks=num_blocks, ledger=Ledger(num_blocks), table=table(num_blocks)
        )
    assert stock.num_free_blocks == 10


def test_retained_blocks_go_when_no_ordinary_one_is_left_tail_first(pool: Pool) -> None:
    """Each of them leaves its chain, and the table hears of it."""
    pool.serve("s", "abc", pool.pop(3))
    assert pool.order() == [4, 5, 6, 7, 8, 9, 3, 2, 1]
    assert pool.queue.num_retained == 3
    assert pool.pop(7) == [4, 5, 6, 7, 8, 9, 3]
    assert pool.queue.popleft().block_id == 2
    assert pool.table.stats().evicted_wanted_blocks_total == 2
    assert not pool.queue.is_free(2)
    assert pool.pop(1) == [1]
    with pytest.raises(ValueError, match="No free blocks available"):
        pool.queue.popleft()


def test_the_tail_goes_first_however_the_blocks_came_back(pool: Pool) -> None:
    """A shared prefix may be freed before what follows it."""
    ids = pool.pop(3)
    admission = admit(pool.table, "s", "abc")
    chain = [
        ChainBlock(i, pool.ledger.epoch[i], h) for i, h in zip(ids, hashes("abc"), strict=True)
    ]
    pool.queue.reclassify(finish(pool.table, admission, chain).changed)
    for block_id in (2, 1, 3):
        pool.queue.append(pool.blocks[block_id])
    assert pool.pop(9)[-3:] == [3, 2, 1]


def test_handing_out_raises_the_epoch_of_every_block(pool: Pool) -> None:
    """Ordinary and retained alike, and no other."""
    pool.serve("s", "abc", pool.pop(3))
    before = list(pool.ledger.epoch)
    popped = set(pool.pop(8))
    for block_id, epoch in enumerate(pool.ledger.epoch):
        assert (epoch > before[block_id]) == (block_id in popped)


def test_blocks_whose_time_is_over_are_as_if_just_used(pool: Pool) -> None:
    """Their session may come back all the same: nothing that is older outlives them."""
    pool.serve("s", "abc", pool.pop(3))
    effect = pool.table.expire(1e6)
    pool.queue.reclassify(effect.changed, effect.dead)
    assert pool.order() == [4, 5, 6, 7, 8, 9, 3, 2, 1]
    assert pool.queue.num_retained == 0


@pytest.mark.parametrize("how", ["superseded", "final"])
def test_blocks_without_a_future_go_first_in_their_order(pool: Pool, how: str) -> None:
    """What only a superseded chain used, and what a session that has ended leaves behind."""
    pool.serve("s", "abcdefghi", pool.pop(9))
    if how == "final":
        effect = pool.table.signal("s", Signal.FINAL, expect_s=None, now_s=1)
        expected = [9, 8, 7, 6, 5, 4, 3, 2, 1]
    else:
        admission = admit(pool.table, "s", "abcdefgh")
        kept = [
            ChainBlock(i, pool.ledger.epoch[i], h)
            for i, h in zip(range(1, 9), hashes("abcdefgh"), strict=True)
        ]
        effect = finish(pool.table, admission, kept, compaction=True)
        expected = [9, 8, 7, 6, 5, 4, 3, 2, 1]
    pool.queue.reclassify(effect.changed, effect.dead)
    assert pool.order() == expected
    assert pool.queue.num_retained == (0 if how == "final" else 8)


def test_a_free_block_that_becomes_wanted_leaves_the_ordinary_list(pool: Pool) -> None:
    """Also when its call ends after the block was freed."""
    ids = pool.pop(2)
    admission = admit(pool.table, "s", "ab")
    pool.queue.append_n([pool.blocks[i] for i in reversed(ids)])
    chain = [ChainBlock(i, pool.ledger.epoch[i], h) for i, h in zip(ids, hashes("ab"), strict=True)]
    pool.queue.reclassify(finish(pool.table, admission, chain).changed)
    assert pool.order() == [3, 4, 5, 6, 7, 8, 9, 2, 1]
    assert pool.queue.num_retained == 2


def test_blocks_that_are_not_free_are_left_alone(pool: Pool) -> None:
    """Whether a block is free is what the queue itself did, not what others count."""
    ids = pool.pop(2)
    pool.queue.reclassify([0, *ids])
    pool.queue.promote([ids[0]], [pool.ledger.epoch[ids[0]]])
    assert not any(pool.queue.is_free(i) for i in (0, *ids))
    assert pool.queue.num_free_blocks == 7


def test_taking_a_block_out_of_the_middle(pool: Pool) -> None:
    """From either class; a block that is not free is refused."""
    pool.serve("s", "abc", pool.pop(3))
    pool.queue.remove(pool.blocks[2])
    pool.queue.remove(pool.blocks[5])
    assert pool.order() == [4, 6, 7, 8, 9, 3, 1]
    assert (pool.queue.num_free_blocks, pool.queue.num_retained) == (7, 2)
    for block_id in (0, 2, 5):
        with pytest.raises(RuntimeError, match="not free"):
            pool.queue.remove(pool.blocks[block_id])
    pool.queue.append_n([pool.blocks[2]])
    assert pool.order() == [4, 6, 7, 8, 9, 3, 2, 1]


def test_prepended_blocks_that_nobody_wants_go_first(pool: Pool) -> None:
    """They carry no hash: their content cannot be found again."""
    pool.serve("s", "abc", pool.pop(3))
    assert pool.pop(2) == [4, 5]
    pool.queue.prepend_n([pool.blocks[i] for i in (5, 4)])
    assert pool.order() == [5, 4, 6, 7, 8, 9, 3, 2, 1]
    assert pool.queue.num_retained == 3


def test_a_rest_is_retained_as_the_tail_of_its_chain(pool: Pool) -> None:
    """It carries no hash either, but peers find it; among others that nobody wants."""
    ids = pool.pop(5)
    pool.serve("s", "abc", ids[:3], rest_id=ids[3])
    assert pool.order() == [6, 7, 8, 9, 4, 3, 2, 1]
    assert (pool.queue.num_free_blocks, pool.queue.num_retained) == (8, 4)
    pool.queue.prepend_n([pool.blocks[ids[4]]])
    assert pool.pop(6) == [5, 6, 7, 8, 9, 4]
    assert pool.table.stats().evicted_wanted_blocks_total == 1


def test_a_rest_whose_time_is_over_goes_first(pool: Pool) -> None:
    """Unlike what has a hash, it is found by nobody any more."""
    ids = pool.pop(4)
    pool.serve("s", "abc", ids[:3], rest_id=ids[3])
    effect = pool.table.expire(1e6)
    pool.queue.reclassify(effect.changed, effect.dead)
    assert pool.order() == [4, 5, 6, 7, 8, 9, 3, 2, 1]
    assert pool.queue.num_retained == 0


def test_the_least_valuable_lineage_goes_first(pool: Pool) -> None:
    """As ranked; a lineage that came later is last until it is ranked."""
    pool.serve("a", "aa", pool.pop(2))
    pool.serve("b", "bb", pool.pop(2))
    pool.serve("c", "cc", pool.pop(2))
    a, b, c = (pool.table.keeper(block_id) for block_id in (1, 3, 5))
    assert a is not None and b is not None and c is not None  # noqa: PT018 - for the types
    assert pool.order()[3:] == [2, 1, 4, 3, 6, 5]
    pool.queue.rank([b, a])
    assert pool.order()[3:] == [6, 5, 4, 3, 2, 1], "c is not ranked: it wants nothing any more"
    pool.queue.rank([b, c, a])
    pool.serve("d", "d", pool.pop(1))
    assert pool.order()[2:] == [4, 3, 6, 5, 2, 1, 7]


def test_a_shared_block_goes_with_its_most_valuable_lineage(pool: Pool) -> None:
    """Although the least valuable one is its keeper."""
    ids = pool.pop(5)
    pool.serve("rich", "aab", [ids[0], ids[1], ids[2]])
    for block_id in ids[:2]:
        pool.queue.remove(pool.blocks[block_id])
    pool.serve("poor", "aac", [ids[0], ids[1], ids[3]])
    pool.queue.append(pool.blocks[ids[4]])
    rich, poor = pool.table.keeper(ids[2]), pool.table.keeper(ids[3])
    assert pool.table.keeper(ids[0]) == poor
    assert rich is not None and poor is not None  # noqa: PT018 - for the types
    pool.queue.rank([poor, rich])
    assert pool.pop(9) == [6, 7, 8, 9, 5, 4, 3, 2, 1]


def test_promoted_blocks_are_the_last_of_their_shelf(pool: Pool) -> None:
    """Among themselves the tail still goes first; a stale epoch promotes nothing."""
    pool.serve("s", "abcd", pool.pop(4))
    epoch = pool.ledger.epoch[1]
    pool.queue.promote([3, 2, 4, 9], [epoch, epoch - 1, epoch, 0])
    assert pool.order() == [5, 6, 7, 8, 9, 2, 1, 4, 3]
    pool.queue.reclassify([1, 2, 3, 4])
    assert pool.pop(9) == [5, 6, 7, 8, 9, 2, 1, 4, 3]


def test_nothing_is_retained_while_retaining_is_off(pool: Pool) -> None:
    """Switching keeps the order; wanted blocks that the engine hands out are counted."""
    pool.serve("s", "abc", pool.pop(3))
    pool.queue.retaining = False
    assert pool.order() == [4, 5, 6, 7, 8, 9, 3, 2, 1]
    assert (pool.queue.num_free_blocks, pool.queue.num_retained) == (9, 0)
    pool.pop(7)
    assert pool.table.stats().evicted_wanted_blocks_total == 1
    pool.queue.retaining = True
    assert pool.queue.num_retained == 2
    assert pool.order() == [2, 1]


def test_a_reset_leaves_nothing_retained(pool: Pool) -> None:
    """The shell resets the ledger, clears the table and reclassifies."""
    pool.serve("s", "abc", pool.pop(3))
    pool.ledger.reset()
    pool.queue.reclassify(pool.table.clear().changed)
    assert pool.queue.num_retained == 0
    assert pool.order() == [4, 5, 6, 7, 8, 9, 3, 2, 1]


def test_before_choice_runs_before_a_choice_and_nowhere_else() -> None:
    """What it changes is in force for the choice."""
    calls: list[int] = []
    blocks = [Block(block_id) for block_id in range(4)]
    queue = FreeQueue.adopt(
        StockQueue(blocks),
        num_blocks=4,
        ledger=Ledger(4),
        table=table(4),
        before_choice=lambda: calls.append(1),
    )
    queue.append_n([])
    taken = queue.popleft_n(2)
    queue.append(taken[0])
    queue.prepend_n([taken[1]])
    queue.remove(taken[0])
    list(queue.iter_blocks_after(None))
    assert len(calls) == 1
    queue.popleft()
    assert len(calls) == 2


def test_before_choice_may_change_the_classes(pool: Pool) -> None:
    """A command that was posted in time is obeyed by this very choice."""
    blocks = pool.blocks

    def forget() -> None:
        effect = pool.table.signal("s", Signal.FINAL, expect_s=None, now_s=1)
        queue.reclassify(effect.changed, effect.dead)

    queue = FreeQueue.adopt(
        StockQueue(pool.queue.popleft_n(9)),
        num_blocks=10,
        ledger=pool.ledger,
        table=pool.table,
        before_choice=forget,
    )
    ids = [block.block_id for block in queue.popleft_n(2)]
    again = Pool(blocks, queue, pool.ledger, pool.table)
    again.serve("s", "ab", ids)
    assert queue.num_retained == 2
    assert queue.popleft().block_id == 2


def test_release_gives_a_stock_queue_in_the_order_of_choice(pool: Pool) -> None:
    """Nothing stays behind."""
    pool.serve("s", "abc", pool.pop(3))
    stock = pool.queue.release_to(StockQueue)
    assert [block.block_id for block in stock.get_all_free_blocks()] == [
        4, 5, 6, 7, 8, 9, 3, 2, 1,
    ]  # fmt: skip
    assert pool.queue.num_free_blocks == 0


@pytest.mark.parametrize("single", [True, False], ids=["popleft", "popleft_n"])
def test_a_choice_during_which_the_queue_is_released_is_completed(single: bool) -> None:
    """The extension may break off inside before_choice; the engine must not notice."""
    blocks = [Block(block_id) for block_id in range(4)]
    released: list[StockQueue] = []

    def break_off() -> None:
        released.append(queue.release_to(StockQueue))

    queue = FreeQueue.adopt(
        StockQueue(blocks),
        num_blocks=4,
        ledger=Ledger(4),
        table=table(4),
        before_choice=break_off,
    )
    taken = [queue.popleft()] if single else queue.popleft_n(2)
    assert taken == blocks[: len(taken)]
    assert released[0].get_all_free_blocks() == blocks[len(taken) :]


def test_a_walk_goes_through_both_classes_from_any_cursor(pool: Pool) -> None:
    """From behind it, in the order in which blocks would go."""
    pool.serve("s", "abc", pool.pop(3))
    order = pool.order()
    for place, block_id in enumerate(order):
        walked = [b.block_id for b in pool.queue.iter_blocks_after(pool.blocks[block_id])]
        assert walked == order[place + 1 :]


def test_a_walk_from_a_block_that_is_not_free_is_over(pool: Pool) -> None:
    """As in vLLM, whose users test for it themselves."""
    block = pool.queue.popleft()
    assert list(pool.queue.iter_blocks_after(block)) == []


def test_a_cursor_that_has_changed_class_starts_the_walk_anew(pool: Pool) -> None:
    """Going on from its new place would leave out what lies between."""
    pool.serve("s", "abc", pool.pop(3))
    walk = pool.queue.iter_blocks_after(None)
    cursor = next(block for block in walk if pool.queue.is_retained(block.block_id))
    del walk
    pool.queue.reclassify(pool.table.expire(1e6).changed)
    assert not pool.queue.is_retained(cursor.block_id)
    assert [b.block_id for b in pool.queue.iter_blocks_after(cursor)] == pool.order()


def test_a_walk_ends_when_its_block_is_taken(pool: Pool) -> None:
    """It neither fails nor goes astray."""
    seen = []
    for block in pool.queue.iter_blocks_after(None):
        seen.append(block.block_id)
        pool.queue.remove(block)
    assert seen == [1]
