"""The retained class: free blocks by the lineage that keeps them. Owner of their order.

A shelf is one lineage's free blocks, and its chain's tail goes first, whatever the order in
which they came. Shelves go in the order of the last ranking; one that the ranking does not
know comes after all others, because it was filled later.

A promoted block is at the valuable end of its shelf: it goes after all blocks that are not
promoted, among those again the tail first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

#: Subtracted from the key of a promoted block; beyond any place in any chain.
_PROMOTED: Final = 1 << 80
#: Entries of blocks that have left the shelf are swept out above this many, when they are
#: the majority.
_STALE_ALLOWED: Final = 64


class Shelf:
    """Free blocks that one lineage keeps.

    Attributes:
        lineage: number of the lineage.
        position: place in the order of victims.
        live: blocks on the shelf.
        keys: a key per block, in ascending order after :meth:`Shelves.settle`; the last one
            goes first. Keys of blocks that have left stay until they are met.
        settled: the keys are in order.
    """

    __slots__ = ("keys", "lineage", "live", "position", "settled")

    def __init__(self, lineage: int, position: int) -> None:
        self.lineage = lineage
        self.position = position
        self.live = 0
        self.keys: list[int] = []
        self.settled = True


class Placed(NamedTuple):
    """Where a retained block lies."""

    shelf: Shelf
    key: int
    block: Any


class Shelves:
    """All shelves of one queue.

    Args:
        num_blocks: blocks in the pool; ids are below.

    Attributes:
        placed: every retained block by its id.
    """

    def __init__(self, num_blocks: int) -> None:
        # A key is the block's place in the chain above its id, so that sorting keys sorts
        # places, and the key alone finds the block.
        self._id_bits = num_blocks.bit_length()
        self._id_mask = (1 << self._id_bits) - 1
        self.placed: dict[int, Placed] = {}
        self._shelves: dict[int, Shelf] = {}
        # Lineages by position, and from where on one may have something on its shelf.
        self._order: list[int] = []
        self._positions: dict[int, int] = {}
        self._first = 0

    def __len__(self) -> int:
        return len(self.placed)

    def put(self, block: Any, lineage: int, place: int) -> None:
        """Lay a free block on a lineage's shelf."""
        shelf = self._shelves.get(lineage) or self._new(lineage)
        block_id = block.block_id
        self._lay(shelf, block, (place << self._id_bits) | block_id)

    def take(self, block_id: int) -> Any:
        """Take a retained block away."""
        shelf, _, block = self.placed.pop(block_id)
        shelf.live -= 1
        if not shelf.live:
            shelf.keys.clear()
            shelf.settled = True
        return block

    def move(self, block_id: int, lineage: int, place: int) -> None:
        """Move a retained block to where it belongs; promoted or not stays as it is."""
        shelf, key, block = self.placed[block_id]
        wanted_key = (place << self._id_bits) | block_id
        if key < 0:
            wanted_key -= _PROMOTED
        if shelf.lineage == lineage and key == wanted_key:
            return
        self.take(block_id)
        self._lay(self._shelves.get(lineage) or self._new(lineage), block, wanted_key)

    def promote(self, block_id: int) -> None:
        """Move a retained block to the valuable end of its shelf."""
        shelf, key, block = self.placed[block_id]
        if key >= 0:
            self.take(block_id)
            self._lay(shelf, block, key - _PROMOTED)

    def next_victim(self) -> tuple[int, Shelf]:
        """Return the block that goes next and its shelf; there must be one."""
        while True:
            shelf = self._shelves.get(self._order[self._first])
            if shelf is None or not shelf.live:
                self._first += 1
                continue
            self._settle(shelf)
            key = shelf.keys[-1]
            block_id = key & self._id_mask
            if self._is_live(shelf, key, block_id):
                return block_id, shelf
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
        start = self.placed[after] if after is not None else None
        first = 0 if start is None else start.shelf.position
        for number in self._order[first:]:
            shelf = self._shelves.get(number)
            if shelf is None or not shelf.live:
                continue
            below = start.key if start is not None and shelf is start.shelf else None
            for key in sorted(set(shelf.keys), reverse=True):
                if below is not None and key >= below:
                    continue
                block_id = key & self._id_mask
                if self._is_live(shelf, key, block_id):
                    yield self.placed[block_id].block

    def in_order(self, block_ids: set[int]) -> list[int]:
        """Sort retained blocks by the order in which they would go."""
        placed = self.placed
        return sorted(
            block_ids,
            key=lambda block_id: (placed[block_id].shelf.position, -placed[block_id].key),
        )

    def _is_live(self, shelf: Shelf, key: int, block_id: int) -> bool:
        placed = self.placed.get(block_id)
        return placed is not None and placed.shelf is shelf and placed.key == key

    def _new(self, lineage: int) -> Shelf:
        position = self._positions.get(lineage)
        if position is None:
            position = self._positions[lineage] = len(self._order)
            self._order.append(lineage)
        shelf = self._shelves[lineage] = Shelf(lineage, position)
        return shelf

    def _lay(self, shelf: Shelf, block: Any, key: int) -> None:
        keys = shelf.keys
        if len(keys) > 2 * shelf.live + _STALE_ALLOWED:
            # A set, because a block that left and came back has its key twice.
            keys[:] = {k for k in keys if self._is_live(shelf, k, k & self._id_mask)}
            shelf.settled = False
        shelf.settled = not keys or (shelf.settled and keys[-1] < key)
        keys.append(key)
        shelf.live += 1
        self._first = min(self._first, shelf.position)
        self.placed[block.block_id] = Placed(shelf, key, block)

    @staticmethod
    def _settle(shelf: Shelf) -> None:
        if not shelf.settled:
            # Blocks come in descending runs, which this sort merges in linear time.
            shelf.keys.sort()
            shelf.settled = True
