"""The retained class: free blocks by the lineage that keeps them. Owner of their order.

A shelf is one lineage's free blocks, and its chain's tail goes first, whatever the order in
which they came. Shelves go in the order of the last ranking; one that the ranking does not
know comes after all others, because it was filled later.

A promoted block is at the valuable end of its shelf: it goes after all blocks that are not
promoted, among those again the tail first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

from turncache_server.retention.wants import WantBoard

#: Subtracted from the key of a promoted block; beyond any place in any chain.
_PROMOTED: Final = 1 << 80
#: Keys of blocks that have left a shelf are swept out above this many, when they are the
#: majority.
_STALE_ALLOWED: Final = 64


class Shelf:
    """Free blocks that one lineage keeps.

    Attributes:
        lineage: number of the lineage.
        position: place in the order of victims.
        live: blocks on the shelf.
        keys: a key per block; the highest one goes first. Keys of blocks that have left, or
            came twice, stay until they are met.
        settled: the keys are in ascending order.
        promoted: ids of promoted blocks.
    """

    __slots__ = ("keys", "lineage", "live", "position", "promoted", "settled")

    def __init__(self, lineage: int, position: int) -> None:
        self.lineage = lineage
        self.position = position
        self.live = 0
        self.keys: list[int] = []
        self.settled = True
        self.promoted: set[int] = set()


#: Stands for a shelf until the first block has named one; nothing is put on it.
_NO_SHELF: Final = Shelf(-1, -1)


class Shelves:
    """All shelves of one queue.

    Args:
        board: says who keeps a block, and its place in the chain.
        epoch: present epoch of each block.
        blocks: block by id; those that are put become known in it.

    Attributes:
        of: the shelf on which each block lies, None for a block that is not retained.
    """

    def __init__(self, board: WantBoard, epoch: list[int], blocks: list[Any]) -> None:
        self.of: list[Shelf | None] = [None] * len(blocks)
        self._board = board
        self._epoch = epoch
        self._blocks = blocks
        # A key is the block's place in the chain above its id, so that sorting keys sorts
        # places, and the key alone finds the block.
        self._id_bits = len(blocks).bit_length()
        self._id_mask = (1 << self._id_bits) - 1
        self._shelves: dict[int, Shelf] = {}
        # Lineages by position, and from where on one may have something on its shelf.
        self._order: list[int] = []
        self._positions: dict[int, int] = {}
        self._first = 0

    def put_wanted(self, blocks: Sequence[Any]) -> list[Any]:
        """Put free blocks that are wanted on their keepers' shelves, and return the rest."""
        # Called with every freed block while anything is wanted: one loop without calls.
        board, epoch, known, of = self._board, self._epoch, self._blocks, self.of
        wanted, keepers, index, bits = board.epoch, board.keeper, board.index, self._id_bits
        rest = []
        keeper = -1  # no lineage has this number
        shelf, keys = _NO_SHELF, _NO_SHELF.keys
        for block in blocks:
            block_id = block.block_id
            if wanted[block_id] != epoch[block_id]:
                rest.append(block)
                continue
            if keepers[block_id] != keeper:
                keeper = keepers[block_id]
                shelf = self._ready(keeper)
                keys = shelf.keys
            known[block_id] = block
            of[block_id] = shelf
            shelf.live += 1
            keys.append(index[block_id] << bits | block_id)
        return rest

    def take(self, block_id: int) -> Any:
        """Take a retained block away."""
        shelf = self.of[block_id]
        assert shelf is not None, f"block {block_id} is not retained"
        self.of[block_id] = None
        shelf.live -= 1
        if not shelf.live:
            shelf.keys.clear()
        if shelf.promoted:
            shelf.promoted.discard(block_id)
        return self._blocks[block_id]

    def move(self, block_id: int) -> None:
        """Move a retained block to its keeper's shelf; promoted or not stays as it is."""
        shelf = self.of[block_id]
        assert shelf is not None, f"block {block_id} is not retained"
        if shelf.lineage != self._board.keeper[block_id]:
            promoted = block_id in shelf.promoted
            self.put_wanted([self.take(block_id)])
            if promoted:
                self.promote(block_id)

    def promote(self, block_id: int) -> None:
        """Move a retained block to the valuable end of its shelf."""
        shelf = self.of[block_id]
        assert shelf is not None, f"block {block_id} is not retained"
        if block_id not in shelf.promoted:
            shelf.promoted.add(block_id)
            shelf.keys.append(self._key(block_id))
            shelf.settled = False

    def next_victim(self) -> tuple[int, Shelf]:
        """Return the block that goes next and its shelf; there must be one."""
        while True:
            shelf = self._shelves.get(self._order[self._first])
            if shelf is None or not shelf.live:
                self._first += 1
                continue
            if not shelf.settled:
                # Blocks come in descending runs, which this sort merges in linear time.
                shelf.keys.sort()
                shelf.settled = True
            key = shelf.keys[-1]
            if self._lies(shelf, key):
                return key & self._id_mask, shelf
            shelf.keys.pop()

    def position(self, lineage: int) -> int:
        """Return a lineage's place in the order of victims; unranked ones are last."""
        return self._positions.get(lineage, len(self._order))

    def rank(self, victims: Sequence[int]) -> None:
        """Set the order of victims; shelves of lineages that are not in it go first."""
        self._shelves = {n: shelf for n, shelf in self._shelves.items() if shelf.live}
        ranked = set(victims)
        self._order = [n for n in self._shelves if n not in ranked]
        self._order += victims
        self._positions = {n: place for place, n in enumerate(self._order)}
        for number, shelf in self._shelves.items():
            shelf.position = self._positions[number]
        self._first = 0

    def walk(self, after: int | None = None) -> Iterator[Any]:
        """Yield retained blocks in the order in which they go, from behind block ``after``.

        A block that several lineages want is yielded with its shelf, which is the earliest
        moment at which it could go.
        """
        start = None if after is None else self.of[after]
        for number in self._order[0 if start is None else start.position :]:
            shelf = self._shelves.get(number)
            if shelf is None or not shelf.live:
                continue
            keys = sorted(set(shelf.keys), reverse=True)
            for key in keys:
                if shelf is start and after is not None and key >= self._key(after):
                    continue
                if self._lies(shelf, key):
                    yield self._blocks[key & self._id_mask]

    def in_order(self, block_ids: set[int]) -> list[int]:
        """Sort retained blocks by the order in which they would go."""

        def place(block_id: int) -> tuple[int, int]:
            shelf = self.of[block_id]
            return -1 if shelf is None else shelf.position, -self._key(block_id)

        return sorted(block_ids, key=place)

    def _key(self, block_id: int) -> int:
        # The place stays on the board when the want has gone.
        key = self._board.index[block_id] << self._id_bits | block_id
        shelf = self.of[block_id]
        return key - _PROMOTED if shelf is not None and block_id in shelf.promoted else key

    def _lies(self, shelf: Shelf, key: int) -> bool:
        """Whether a key stands for a block that lies on the shelf, at this place of it."""
        block_id = key & self._id_mask
        return self.of[block_id] is shelf and (key < 0) == (block_id in shelf.promoted)

    def _ready(self, lineage: int) -> Shelf:
        """Find or make a lineage's shelf and prepare it for more blocks."""
        shelf = self._shelves.get(lineage)
        if shelf is None:
            position = self._positions.get(lineage)
            if position is None:
                position = self._positions[lineage] = len(self._order)
                self._order.append(lineage)
            shelf = self._shelves[lineage] = Shelf(lineage, position)
        if len(shelf.keys) > 2 * shelf.live + _STALE_ALLOWED:
            shelf.keys[:] = {key for key in shelf.keys if self._lies(shelf, key)}
        shelf.settled = False
        self._first = min(self._first, shelf.position)
        return shelf
