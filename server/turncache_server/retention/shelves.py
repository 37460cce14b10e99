"""The retained class: free blocks by the lineage that keeps them. Owner of their order.

A shelf is one lineage's free blocks, and its chain's tail goes first, whatever the order in
which they came. Shelves go in the order of the last ranking; one that the ranking does not
know comes after all others, because it was filled later.

A promoted block is at the valuable end of its shelf: it goes after all blocks that are not
promoted, among those again the tail first. It is promoted until it leaves the shelf.

Laying a block on a shelf and taking it away happen with every hit, so both are constant and
nearly free; a shelf is put in order when a victim is needed from it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from turncache_server.retention.wants import WantBoard

#: Subtracted from the place of a promoted block; beyond the length of any chain.
_PROMOTED: Final = 1 << 40
#: A shelf is swept when it has twice as many ids as after the last time, and these more.
_SWEEP_SLACK: Final = 64


class Shelf:
    """Free blocks that one lineage keeps.

    Attributes:
        lineage: number of the lineage.
        position: place in the order of victims.
        ids: ids of the blocks on it; the last one goes first when settled. Ids of blocks
            that have left, or came twice, stay until the shelf is swept.
        settled: the ids are in order.
        sweep_at: number of ids at which those that have left are swept out.
        promoted: ids of promoted blocks.
    """

    __slots__ = ("ids", "lineage", "position", "promoted", "settled", "sweep_at")

    def __init__(self, lineage: int, position: int) -> None:
        self.lineage = lineage
        self.position = position
        self.ids: list[int] = []
        self.settled = True
        self.sweep_at = _SWEEP_SLACK
        self.promoted: set[int] = set()


class Shelves:
    """All shelves of one queue.

    Args:
        board: says who keeps a block, and its place in the chain.
        num_blocks: blocks in the pool; ids are below.

    Attributes:
        of: the shelf on which each block lies, None for a block that is not retained. A
            block is laid on a shelf by setting it, beside adding the id, and leaves with
            :meth:`take` only, or with its entry here and among the promoted.
    """

    def __init__(self, board: WantBoard, num_blocks: int) -> None:
        self.of: list[Shelf | None] = [None] * num_blocks
        self._board = board
        self._shelves: dict[int, Shelf] = {}
        # Lineages by position, and from where on one may have something on its shelf.
        self._order: list[int] = []
        self._positions: dict[int, int] = {}
        self._first = 0

    def ready(self, lineage: int) -> Shelf:
        """Find or make a lineage's shelf, for blocks that will be laid on it at once."""
        shelf = self._shelves.get(lineage)
        if shelf is None:
            shelf = self._new(lineage)
        elif len(shelf.ids) >= shelf.sweep_at:
            self._settle(shelf)
        shelf.settled = False
        self._first = min(self._first, shelf.position)
        return shelf

    def put(self, block_id: int) -> None:
        """Lay a block on its keeper's shelf."""
        shelf = self.ready(self._board.keeper[block_id])
        shelf.ids.append(block_id)
        self.of[block_id] = shelf

    def take(self, block_id: int) -> None:
        """Take a retained block away."""
        self._shelf(block_id).promoted.discard(block_id)
        self.of[block_id] = None

    def move(self, block_id: int) -> None:
        """Move a retained block to its keeper's shelf; promoted or not stays as it is."""
        shelf = self._shelf(block_id)
        if shelf.lineage != self._board.keeper[block_id]:
            promoted = block_id in shelf.promoted
            self.take(block_id)
            self.put(block_id)
            if promoted:
                self.promote(block_id)

    def promote(self, block_id: int) -> None:
        """Move a retained block to the valuable end of its shelf."""
        shelf = self._shelf(block_id)
        shelf.promoted.add(block_id)
        shelf.settled = False

    def next_victim(self) -> tuple[int, Shelf]:
        """Return the block that goes next and its shelf; there must be one."""
        while True:
            shelf = self._shelves.get(self._order[self._first])
            if shelf is None or not shelf.ids:
                self._first += 1
                continue
            if not shelf.settled:
                self._settle(shelf)
                continue
            block_id = shelf.ids[-1]
            if self.of[block_id] is shelf:
                return block_id, shelf
            shelf.ids.pop()

    def position(self, lineage: int) -> int:
        """Return a lineage's place in the order of victims; unranked ones are last."""
        return self._positions.get(lineage, len(self._order))

    def rank(self, victims: Sequence[int]) -> None:
        """Set the order of victims; shelves of lineages that are not in it go first."""
        of = self.of
        self._shelves = {
            number: shelf
            for number, shelf in self._shelves.items()
            if any(of[block_id] is shelf for block_id in shelf.ids)
        }
        ranked = set(victims)
        self._order = [number for number in self._shelves if number not in ranked]
        self._order += victims
        self._positions = {number: place for place, number in enumerate(self._order)}
        for number, shelf in self._shelves.items():
            shelf.position = self._positions[number]
        self._first = 0

    def walk(self, after: int | None = None) -> Iterator[int]:
        """Yield retained blocks in the order in which they go, from behind block ``after``.

        A block that several lineages want is yielded with its shelf, which is the earliest
        moment at which it could go.
        """
        start = None if after is None else self.of[after]
        for number in self._order[0 if start is None else start.position :]:
            shelf = self._shelves.get(number)
            if shelf is None:
                continue
            ids = self._tail_last(shelf)
            if shelf is start and after is not None:
                del ids[ids.index(after) :]
            for block_id in reversed(ids):
                if self.of[block_id] is shelf:
                    yield block_id

    def in_order(self, block_ids: set[int]) -> list[int]:
        """Sort retained blocks by the order in which they would go."""

        def turn(block_id: int) -> tuple[int, int]:
            shelf = self._shelf(block_id)
            return shelf.position, -self._place(shelf, block_id)

        return sorted(block_ids, key=turn)

    def _shelf(self, block_id: int) -> Shelf:
        shelf = self.of[block_id]
        assert shelf is not None, f"block {block_id} is not retained"
        return shelf

    def _place(self, shelf: Shelf, block_id: int) -> int:
        # The place stays on the board when the want has gone.
        place = self._board.index[block_id]
        return place - _PROMOTED if block_id in shelf.promoted else place

    def _tail_last(self, shelf: Shelf) -> list[int]:
        """List the blocks on a shelf, each once, in the reverse order of their going."""
        of = self.of
        lying = {block_id for block_id in shelf.ids if of[block_id] is shelf}
        if not shelf.promoted:
            return sorted(lying, key=self._board.index.__getitem__)
        return sorted(lying, key=lambda block_id: self._place(shelf, block_id))

    def _settle(self, shelf: Shelf) -> None:
        shelf.ids = self._tail_last(shelf)
        shelf.settled = True
        shelf.sweep_at = 2 * len(shelf.ids) + _SWEEP_SLACK

    def _new(self, lineage: int) -> Shelf:
        position = self._positions.get(lineage)
        if position is None:
            position = self._positions[lineage] = len(self._order)
            self._order.append(lineage)
        shelf = self._shelves[lineage] = Shelf(lineage, position)
        return shelf
