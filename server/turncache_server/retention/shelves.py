"""The retained class: free blocks by the lineage that keeps them. Owner of their order.

A shelf is one lineage's free blocks, and its chain's tail goes first, whatever the order in
which they came. Shelves go in the order of the last ranking; one that the ranking does not
know comes after all others, because it was filled later.

A promoted block is at the valuable end of its shelf: it goes after all blocks that are not
promoted, among those again the tail first. It is promoted until it leaves the shelf.

A block lies on the shelf that its backward link names. Laying it there and taking it away
happen with every hit, so both cost next to nothing; a shelf is put in order when a victim
is needed from it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, ClassVar, Final

from turncache_server.retention.wants import WantBoard

#: Subtracted from the place of a promoted block; beyond the length of any chain.
_PROMOTED: Final = 1 << 40
#: A shelf is swept when it lists twice as many blocks as after the last time, and these more.
_SWEEP_SLACK: Final = 64


class Shelf:
    """Free blocks that one lineage keeps.

    Attributes:
        lineage: number of the lineage.
        position: place in the order of victims.
        blocks: the blocks on it; the last one goes first when settled. Blocks that have
            left, or came twice, stay listed until the shelf is swept.
        settled: the blocks are in order.
        sweep_at: number of listed blocks at which those that have left are swept out.
        promoted: ids of promoted blocks.
    """

    __slots__ = ("blocks", "lineage", "position", "promoted", "settled", "sweep_at")

    #: vLLM prints the ids of a block's neighbours; this is the one of its fake blocks.
    block_id: ClassVar[int] = -1

    def __init__(self, lineage: int, position: int) -> None:
        self.lineage = lineage
        self.position = position
        self.blocks: list[Any] = []
        self.settled = True
        self.sweep_at = _SWEEP_SLACK
        self.promoted: set[int] = set()


class Shelves:
    """All shelves of one queue.

    Args:
        board: says who keeps a block, and its place in the chain.
    """

    def __init__(self, board: WantBoard) -> None:
        self._board = board
        self._shelves: dict[int, Shelf] = {}
        # Lineages by position, and from where on one may have something on its shelf.
        self._order: list[int] = []
        self._positions: dict[int, int] = {}
        self._first = 0

    def ready(self, lineage: int) -> Shelf:
        """Find or make a lineage's shelf, for blocks that are laid on it at once.

        Who lays a block links it to the shelf and adds it to the shelf's blocks.
        """
        shelf = self._shelves.get(lineage)
        if shelf is None:
            shelf = self._new(lineage)
        elif len(shelf.blocks) >= shelf.sweep_at:
            self._settle(shelf)
        shelf.settled = False
        if shelf.position < self._first:  # noqa: PLR1730 - min() is a call per freed chain
            self._first = shelf.position
        return shelf

    def put(self, block: Any) -> None:
        """Lay a block, linked to nothing, on its keeper's shelf."""
        shelf = self.ready(self._board.keeper[block.block_id])
        shelf.blocks.append(block)
        block.prev_free_block = shelf

    @staticmethod
    def take(block: Any) -> None:
        """Take a retained block away."""
        block.prev_free_block.promoted.discard(block.block_id)
        block.prev_free_block = None

    def move(self, block: Any) -> None:
        """Move a retained block to its keeper's shelf; promoted or not stays as it is."""
        shelf = block.prev_free_block
        if shelf.lineage != self._board.keeper[block.block_id]:
            promoted = block.block_id in shelf.promoted
            self.take(block)
            self.put(block)
            if promoted:
                self.promote(block)

    @staticmethod
    def promote(block: Any) -> None:
        """Move a retained block to the valuable end of its shelf."""
        shelf = block.prev_free_block
        shelf.promoted.add(block.block_id)
        shelf.settled = False

    def next_victim(self) -> Any:
        """Return the retained block that goes next; there must be one."""
        while True:
            shelf = self._shelves.get(self._order[self._first])
            if shelf is None or not shelf.blocks:
                self._first += 1
            elif not shelf.settled:
                self._settle(shelf)
            elif shelf.blocks[-1].prev_free_block is shelf:
                return shelf.blocks[-1]
            else:
                shelf.blocks.pop()

    def position(self, lineage: int) -> int:
        """Return a lineage's place in the order of victims; unranked ones are last."""
        return self._positions.get(lineage, len(self._order))

    def rank(self, victims: Sequence[int]) -> None:
        """Set the order of victims; shelves of lineages that are not in it go first."""
        self._shelves = {
            number: shelf
            for number, shelf in self._shelves.items()
            if any(block.prev_free_block is shelf for block in shelf.blocks)
        }
        ranked = set(victims)
        self._order = [number for number in self._shelves if number not in ranked]
        self._order += victims
        self._positions = {number: place for place, number in enumerate(self._order)}
        for number, shelf in self._shelves.items():
            shelf.position = self._positions[number]
        self._first = 0

    def walk(self, after: Any | None = None) -> Iterator[Any]:
        """Yield retained blocks in the order in which they go, from behind ``after``.

        A block that several lineages want is yielded with its shelf, which is the earliest
        moment at which it could go.
        """
        start = None if after is None else after.prev_free_block
        for number in self._order[0 if start is None else start.position :]:
            shelf = self._shelves.get(number)
            if shelf is None:
                continue
            left = self._tail_last(shelf)
            if shelf is start:
                while left.pop() is not after:
                    pass
            while left:
                block = left.pop()
                if block.prev_free_block is shelf:
                    yield block

    def in_order(self, blocks: Iterable[Any]) -> list[Any]:
        """Sort retained blocks by the order in which they would go."""

        def turn(block: Any) -> tuple[int, int]:
            return block.prev_free_block.position, -self._place(block)

        return sorted(blocks, key=turn)

    def _place(self, block: Any) -> int:
        # The place stays on the board when the want has gone.
        place = self._board.index[block.block_id]
        promoted = block.block_id in block.prev_free_block.promoted
        return int(place - _PROMOTED if promoted else place)

    def _tail_last(self, shelf: Shelf) -> list[Any]:
        """List the blocks on a shelf, each once, in the reverse order of their going."""
        lying = {block.block_id: block for block in shelf.blocks if block.prev_free_block is shelf}
        return sorted(lying.values(), key=self._place)

    def _settle(self, shelf: Shelf) -> None:
        shelf.blocks = self._tail_last(shelf)
        shelf.settled = True
        shelf.sweep_at = 2 * len(shelf.blocks) + _SWEEP_SLACK

    def _new(self, lineage: int) -> Shelf:
        position = self._positions.get(lineage)
        if position is None:
            position = self._positions[lineage] = len(self._order)
            self._order.append(lineage)
        shelf = self._shelves[lineage] = Shelf(lineage, position)
        return shelf
