"""A drop-in for vLLM's queue of free blocks, with two classes: ordinary and retained.

*Ordinary* blocks are vLLM's own list: least recently used first, handed out first.
*Retained* blocks are those that a lineage wants, handed out only when no ordinary block is
left, the least valuable lineage first and its chain's tail first. Both count as free, so
whatever the scheduler counts can be allocated.

Owner of which block is free and in which class. That is read from the queue's own links and
shelves, never from a block's reference count: vLLM lowers counts before it calls the queue.
Only the engine thread calls these methods; what a block is worth is the lineage table's
affair, and no clock is read.

The links of an ordinary block are vLLM's. A retained block's backward link names its shelf
and its forward link is None. Both are None for a block in use, as in vLLM.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from typing import Any

from turncache_server.retention.ledger import Ledger
from turncache_server.retention.lineages import LineageTable
from turncache_server.retention.shelves import Shelf, Shelves


def _nothing() -> None:
    """Do nothing before a choice."""


class _End:
    """A fake block at either end of the ordinary list, as in vLLM."""

    __slots__ = ("block_id", "next_free_block", "prev_free_block")

    def __init__(self) -> None:
        self.block_id = -1
        self.next_free_block: Any = None
        self.prev_free_block: Any = None


class FreeQueue:
    """Free blocks of one pool; made by :meth:`adopt`.

    Attributes:
        num_free_blocks: ordinary and retained blocks together.
        num_retained: retained blocks.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        ledger: Ledger,
        table: LineageTable,
        before_choice: Callable[[], object],
        pending: Sized | None,
    ) -> None:
        self.num_free_blocks = 0
        self.num_retained = 0
        self._ledger = ledger
        self._table = table
        self._board = table.board
        self._epoch = ledger.epoch
        self._before_choice = before_choice
        self._pending: Sized | bool = True if pending is None else pending
        self._retaining = True
        self._head = _End()
        self._tail = _End()
        self._head.next_free_block = self._tail
        self._tail.prev_free_block = self._head
        self._successor: Any = None
        # Block by id, as far as known.
        self._blocks: list[Any] = [None] * num_blocks
        self._num_unknown = 0
        self._shelves = Shelves(self._board)
        # The block that a walk came to last, and whether it was retained then.
        self._walked: Any = None
        self._walked_retained = False

    @classmethod
    def adopt(
        cls,
        stock: Any,
        *,
        num_blocks: int,
        ledger: Ledger,
        table: LineageTable,
        before_choice: Callable[[], object] = _nothing,
        pending: Sized | None = None,
        blocks: Sequence[Any] | None = None,
    ) -> FreeQueue:
        """Take over a stock queue's free blocks in their order; the stock queue is left empty.

        Blocks that are in use come in when they are freed, so this is right at any moment
        between two calls of the queue.

        Args:
            stock: vLLM's queue.
            num_blocks: blocks in the pool; every block id is below.
            ledger: epochs, raised for every block that is handed out.
            table: says what is wanted, and hears what is handed out all the same.
            before_choice: called before a block is chosen and at no other moment; may
                change classes.
            pending: what ``before_choice`` would work off; while it is empty, the call is
                saved. None to call it always.
            blocks: all blocks of the pool by id. Without them, those in use at this moment
                become known when they are freed, at the cost of a look at each freed block.
        """
        queue = cls(
            num_blocks=num_blocks,
            ledger=ledger,
            table=table,
            before_choice=before_choice,
            pending=pending,
        )
        # Looked at before anything is taken: a refusal must leave the stock queue whole.
        for block in stock.get_all_free_blocks():
            block_id = block.block_id
            if not 0 <= block_id < num_blocks or queue._blocks[block_id] is not None:
                raise ValueError(
                    f"block id {block_id} is free in the stock queue: expected each id "
                    f"once, from 0 to {num_blocks - 1}; give the pool's number of blocks"
                )
            queue._blocks[block_id] = block
        if blocks is not None:
            queue._blocks[:] = blocks
        queue._num_unknown = queue._blocks.count(None)
        queue.append_n(stock.popleft_n(stock.num_free_blocks))
        return queue

    def release_to(self, stock_type: type) -> Any:
        """Give all blocks back as a stock queue, in the order in which they would go.

        A choice that is under way in this queue is completed by the new one.
        """
        blocks = self.get_all_free_blocks()
        for block in blocks:
            block.prev_free_block = block.next_free_block = None
        self._head.next_free_block = self._tail
        self._tail.prev_free_block = self._head
        self._shelves = Shelves(self._board)
        self.num_free_blocks = self.num_retained = 0
        self._successor = stock_type(blocks)
        return self._successor

    # --- vLLM's queue -----------------------------------------------------------------------

    def popleft(self) -> Any:
        """Hand out the first free block; raises ValueError when there is none."""
        if self._pending:
            self._before_choice()
        if self._successor is not None:
            return self._successor.popleft()
        if not self.num_free_blocks:
            raise ValueError("No free blocks available")
        return self._pop(1)[0]

    def popleft_n(self, n: int) -> list[Any]:
        """Hand out the first ``n`` free blocks; there must be as many, ``n`` may be 0."""
        if self._pending:
            self._before_choice()
        if n > self.num_free_blocks - self.num_retained or (
            not self._retaining and self._board.num_wanted
        ):
            return self._pop(n)
        # The common case without a further call: a decode step takes blocks one by one.
        self.num_free_blocks -= n
        ledger, epoch, head = self._ledger, self._epoch, self._head
        raised = ledger.last_epoch = ledger.last_epoch + 1
        block = head.next_free_block
        if n == 1:
            epoch[block.block_id] = raised
            following = head.next_free_block = block.next_free_block
            following.prev_free_block = head
            block.prev_free_block = block.next_free_block = None
            return [block]
        blocks = []
        for _ in range(n):
            blocks.append(block)
            epoch[block.block_id] = raised
            following = block.next_free_block
            block.prev_free_block = block.next_free_block = None
            block = following
        head.next_free_block = block
        block.prev_free_block = head
        return blocks

    def remove(self, block: Any) -> None:
        """Take a free block out of the middle; raises RuntimeError for any other block."""
        following = block.next_free_block
        if following is None:
            shelf = block.prev_free_block
            if shelf is None:
                raise RuntimeError(f"remove() called on a block that is not free: {block}")
            # What Shelves.take does, without its call: a hit takes a chain block by block.
            block.prev_free_block = None
            if shelf.promoted:
                shelf.promoted.discard(block.block_id)
            self.num_retained -= 1
        else:
            before = block.prev_free_block
            before.next_free_block = following
            following.prev_free_block = before
            block.prev_free_block = block.next_free_block = None
        self.num_free_blocks -= 1

    def append(self, block: Any) -> None:
        """Put a block back, to be handed out last of its class."""
        self.append_n([block])

    def append_n(self, blocks: list[Any]) -> None:
        """Put blocks back: wanted ones on their keeper's shelf, the others at the end."""
        if not blocks:
            return
        if self._num_unknown:
            self._learn(blocks)
        if self._retaining and self._board.num_wanted:
            self._append_classified(blocks)
            return
        self._link_back(blocks)
        self.num_free_blocks += len(blocks)

    def prepend_n(self, blocks: list[Any]) -> None:
        """Put blocks without a hash back: wanted rests on their shelf, the others at the front."""
        if not blocks:
            return
        if self._num_unknown:
            self._learn(blocks)
        self.num_free_blocks += len(blocks)
        if self._retaining and self._board.num_wanted:
            blocks = self._lay_wanted(blocks)
        self._link_front(blocks)

    def get_all_free_blocks(self) -> list[Any]:
        """Return all free blocks in the order of :meth:`iter_blocks_after`."""
        return list(self.iter_blocks_after(None))

    def iter_blocks_after(self, cursor: Any | None) -> Iterator[Any]:
        """Walk free blocks in the order in which they would go, from behind ``cursor``.

        A retained block that several lineages want comes with its shelf, at the earliest
        moment at which it could go.

        A cursor that is not free ends the walk, as in vLLM. One that has changed class
        since a walk came to it starts the walk anew: going on from where it is would leave
        out everything in between.
        """
        if cursor is not None and cursor.prev_free_block is None:
            return
        retained = cursor is not None and cursor.next_free_block is None
        if cursor is not None and cursor is self._walked and retained != self._walked_retained:
            cursor, retained = None, False
        if not retained:
            block = self._head.next_free_block if cursor is None else cursor.next_free_block
            while block is not self._tail:
                if block is None:  # taken while the walk stood on it
                    return
                self._walked, self._walked_retained = block, False
                yield block
                block = block.next_free_block
            cursor = None
        for block in self._shelves.walk(cursor):
            self._walked, self._walked_retained = block, True
            yield block

    # --- classes ----------------------------------------------------------------------------

    @property
    def retaining(self) -> bool:
        """Whether wanted blocks are retained; if not, every block is ordinary."""
        return self._retaining

    @retaining.setter
    def retaining(self, retaining: bool) -> None:
        if retaining == self._retaining:
            return
        self._retaining = retaining
        if retaining:
            board = self._board
            self.reclassify(i for i, epoch in enumerate(board.epoch) if epoch >= 0)
        else:
            # Behind all others: the order in which blocks go is the same before and after.
            retained = list(self._shelves.walk())
            for block in retained:
                self._shelves.take(block)
            self.num_free_blocks -= len(retained)
            self.num_retained = 0
            self.append_n(retained)

    def is_free(self, block_id: int) -> bool:
        """Whether a block is in this queue."""
        block = self._blocks[block_id]
        return block is not None and block.prev_free_block is not None

    def is_retained(self, block_id: int) -> bool:
        """Whether a block is free and retained."""
        return self.is_free(block_id) and self._blocks[block_id].next_free_block is None

    def reclassify(self, block_ids: Iterable[int], dead: Iterable[int] = ()) -> None:
        """Move free blocks to the class that the table gives them; others are ignored.

        What is wanted goes to its keeper's shelf. What is no longer wanted goes to the end of
        ordinary, in the order in which it would have gone, as if it had been used just now:
        its time was over or its budget, and it may come back all the same. At the front it
        would go before everything that is older, and an agent would be worse off than
        without us. Only what nobody will ask for again goes to the front.

        Args:
            block_ids: blocks whose class may have changed.
            dead: those of them without a future.
        """
        wanted_at, epoch = self._board.epoch, self._epoch
        unwanted: dict[int, Any] = {}
        for block_id in block_ids:
            if not self.is_free(block_id):
                continue
            block = self._blocks[block_id]
            retained = block.next_free_block is None
            if not self._retaining or wanted_at[block_id] != epoch[block_id]:
                if retained:
                    unwanted[block_id] = block
            elif retained:
                self._shelves.move(block)
            else:
                self.remove(block)
                self._shelves.put(block)
                self.num_free_blocks += 1
                self.num_retained += 1
        if unwanted:
            # What has no hash is found by nobody once it is no longer kept.
            lost = [block_id for block_id, block in unwanted.items() if block.block_hash is None]
            self._demote(self._shelves.in_order(unwanted.values()), frozenset((*dead, *lost)))

    def _demote(self, blocks: list[Any], dead: frozenset[int]) -> None:
        for block in blocks:
            self._shelves.take(block)
        self.num_retained -= len(blocks)
        self._link_front([block for block in blocks if block.block_id in dead])
        self._link_back([block for block in blocks if block.block_id not in dead])

    def promote(self, block_ids: Sequence[int], epochs: Sequence[int]) -> None:
        """Move blocks to the valuable ends of their shelves, where retained at these epochs."""
        blocks, epoch = self._blocks, self._epoch
        # A long prompt is peeked at as a whole, and this is the engine's time.
        for block_id, at in zip(block_ids, epochs, strict=True):
            block = blocks[block_id]
            if epoch[block_id] == at and block is not None and block.next_free_block is None:
                shelf = block.prev_free_block
                if shelf is not None:
                    shelf.promoted.add(block_id)
                    shelf.settled = False

    def rank(self, victims: Sequence[int]) -> None:
        """Set the order of lineages for the next choices, least valuable first.

        A lineage that is not in it although it has blocks here wants them no longer, and
        goes first; one that fills its shelf later goes last until the next ranking.
        """
        self._shelves.rank(victims)

    # --- inside -----------------------------------------------------------------------------

    def _pop(self, n: int) -> list[Any]:
        """Choose from both classes, or for an extension that only observes."""
        if self._successor is not None:
            released: list[Any] = self._successor.popleft_n(n)
            return released
        assert self.num_free_blocks >= n, f"{n} blocks asked for, {self.num_free_blocks} free"
        self._ledger.last_epoch += 1
        num_ordinary = min(n, self.num_free_blocks - self.num_retained)
        blocks = self._pop_ordinary(num_ordinary) if num_ordinary else []
        if num_ordinary < n:
            blocks += self._pop_retained(n - num_ordinary)
        self.num_free_blocks -= n
        return blocks

    def _pop_ordinary(self, n: int) -> list[Any]:
        epoch, raised = self._epoch, self._ledger.last_epoch
        blocks = []
        block = self._head.next_free_block
        for _ in range(n):
            blocks.append(block)
            epoch[block.block_id] = raised
            following = block.next_free_block
            block.prev_free_block = block.next_free_block = None
            block = following
        self._head.next_free_block = block
        block.prev_free_block = self._head
        if self._board.num_wanted and not self._retaining:
            # What the engine's own order gives away although it is wanted.
            wanted = self._board.epoch
            for block in blocks:
                if wanted[block.block_id] >= 0:
                    self._table.evicted(block.block_id)
        return blocks

    def _pop_retained(self, n: int) -> list[Any]:
        epoch, raised = self._epoch, self._ledger.last_epoch
        shelves = self._shelves
        blocks: list[Any] = []
        while len(blocks) < n:
            block = shelves.next_victim()
            block_id = block.block_id
            if block_id in self._board.others and self._pass_on(block):
                continue
            shelves.take(block)
            blocks.append(block)
            epoch[block_id] = raised
            self._table.evicted(block_id)
        self.num_retained -= n
        return blocks

    def _pass_on(self, block: Any) -> bool:
        """Give a shared block to its most valuable wanter, if that one comes later."""
        position = self._shelves.position
        heir = max(self._board.wanters(block.block_id), key=position)
        if position(heir) <= block.prev_free_block.position:
            return False
        self._board.entrust(block.block_id, heir)
        self._shelves.move(block)
        return True

    def _append_classified(self, blocks: list[Any]) -> None:
        """Append while something is wanted."""
        # Most often, all blocks are one lineage's chain: nothing but the check per block.
        wanted, epoch, keepers = self._board.epoch, self._epoch, self._board.keeper
        keeper = keepers[blocks[0].block_id]
        if keeper >= 0:
            shelf = self._shelves.ready(keeper)
            num_laid = len(blocks)
            for block in blocks:
                block_id = block.block_id
                if keepers[block_id] != keeper or wanted[block_id] != epoch[block_id]:
                    num_laid = _count_on(shelf, blocks)
                    break
                block.prev_free_block = shelf
            shelf.blocks += blocks[:num_laid]
            self.num_free_blocks += num_laid
            self.num_retained += num_laid
            if num_laid == len(blocks):
                return
            blocks = blocks[num_laid:]
        last = self._tail.prev_free_block
        num_laid = 0
        for block in blocks:
            block_id = block.block_id
            if keepers[block_id] < 0 or wanted[block_id] != epoch[block_id]:
                block.prev_free_block = last
                last.next_free_block = block
                last = block
            else:
                self._shelves.put(block)
                num_laid += 1
        last.next_free_block = self._tail
        self._tail.prev_free_block = last
        self.num_free_blocks += len(blocks)
        self.num_retained += num_laid

    def _lay_wanted(self, blocks: list[Any]) -> list[Any]:
        """Lay the blocks that are wanted on their shelves; returns the others."""
        wanted, epoch = self._board.epoch, self._epoch
        others = []
        for block in blocks:
            if wanted[block.block_id] == epoch[block.block_id]:
                self._shelves.put(block)
                self.num_retained += 1
            else:
                others.append(block)
        return others

    def _link_front(self, blocks: list[Any]) -> None:
        first = self._head.next_free_block
        last: Any = self._head
        for block in blocks:
            block.prev_free_block = last
            last.next_free_block = block
            last = block
        last.next_free_block = first
        first.prev_free_block = last

    def _link_back(self, blocks: list[Any]) -> None:
        last = self._tail.prev_free_block
        for block in blocks:
            block.prev_free_block = last
            last.next_free_block = block
            last = block
        last.next_free_block = self._tail
        self._tail.prev_free_block = last

    def _learn(self, blocks: Iterable[Any]) -> None:
        for block in blocks:
            if self._blocks[block.block_id] is None:
                self._blocks[block.block_id] = block
                self._num_unknown -= 1


def _count_on(shelf: Shelf, blocks: Sequence[Any]) -> int:
    """Count the leading blocks that lie on a shelf."""
    count = 0
    while blocks[count].prev_free_block is shelf:
        count += 1
    return count
