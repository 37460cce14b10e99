"""Which block is wanted, at which epoch and by whom. Owner of these tables.

A block may be wanted by several lineages. It counts once, is charged to the tenant of its
*keeper*, on whose shelf it lies when free, and stays wanted while any of them wants it:
when the keeper drops it, another becomes keeper. A hand-over is keeper before any session,
and what it keeps is charged to nobody.

A want names (block, epoch). Once the epoch has moved on, the want means nothing: it is
never honoured, and is swept out when the block is wanted anew.

The lists are public for reading, because the free queue asks once per block.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from turncache_server.retention.sessions import Lineage
from turncache_server.retention.values import ChainBlock


class WantBoard:
    """Wants of all lineages over one pool.

    Args:
        num_blocks: blocks in the pool.

    Attributes:
        epoch: epoch at which each block is wanted, -1 for not at all.
        keeper: number of the lineage that keeps it, -1 for none.
        index: its place in the chains that want it.
        others: numbers of further lineages that want it, by block.
        num_wanted: distinct blocks that are wanted.
        wanting: lineages that want at least one block, by number.
        charged: blocks charged to each tenant, None for those without a tenant.
        num_charged: sum of these.
    """

    def __init__(self, num_blocks: int) -> None:
        self.epoch: list[int] = [-1] * num_blocks
        self.keeper: list[int] = [-1] * num_blocks
        self.index: list[int] = [-1] * num_blocks
        self.others: dict[int, set[int]] = {}
        self.num_wanted = 0
        self.wanting: dict[int, Lineage] = {}
        self.charged: dict[str | None, int] = {}
        self.num_charged = 0

    def wanters(self, block_id: int) -> list[int]:
        """Return the numbers of all lineages that want a block, its keeper first."""
        keeper = self.keeper[block_id]
        return [] if keeper < 0 else [keeper, *self.others.get(block_id, ())]

    def want(self, lineage: Lineage, chain: Sequence[ChainBlock], changed: list[int]) -> None:
        """Let a lineage want exactly the blocks of ``chain``.

        Args:
            lineage: whose wants are replaced.
            chain: blocks by their place in the chain, from its first block.
            changed: receives the blocks whose class may have changed.
        """
        number = lineage.number
        for place, block_id in enumerate(lineage.blocks):
            if block_id >= 0 and (place >= len(chain) or chain[place].block_id != block_id):
                self.drop(lineage, block_id, changed)
        before = lineage.blocks
        blocks: list[int] = []
        # Set before the loop: a place that is forgotten in it is blanked in the new list.
        lineage.blocks = blocks
        epochs, keepers, index = self.epoch, self.keeper, self.index
        for place, (block_id, epoch, _) in enumerate(chain):
            if (
                epochs[block_id] == epoch
                and keepers[block_id] == number
                and index[block_id] == place
            ):
                blocks.append(block_id)
            elif self._add(lineage, block_id, epoch, place):
                blocks.append(block_id)
                changed.append(block_id)
            else:
                blocks.append(-1)
                if place < len(before) and before[place] == block_id:
                    self.drop(lineage, block_id, changed)

    def drop(self, lineage: Lineage, block_id: int, changed: list[int]) -> None:
        """Let a lineage want a block no longer; one that it does not want is ignored."""
        number = lineage.number
        others = self.others.get(block_id)
        if self.keeper[block_id] != number:
            if others is None or number not in others:
                return
            self._discard_other(block_id, number)
        elif others is None:
            self._charge(lineage, -1)
            self._blank(block_id)
            changed.append(block_id)
        else:
            self._keep(block_id, max(others, key=self._precedence))
            self._discard_other(block_id, number)
            changed.append(block_id)
        self._lose(lineage, block_id)

    def drop_all(self, lineages: Iterable[Lineage], changed: list[int]) -> None:
        """Let lineages want nothing any more, each one's tail first."""
        for lineage in lineages:
            for block_id in lineage.wanted_tail_first():
                self.drop(lineage, block_id, changed)
            lineage.blocks = []

    def forget(self, block_id: int) -> bool:
        """Drop a block from every lineage, its content being gone; False if none wanted it."""
        wanters = self.wanters(block_id)
        if not wanters:
            return False
        self._charge(self.wanting[wanters[0]], -1)
        for number in wanters:
            self._lose(self.wanting[number], block_id)
        self.others.pop(block_id, None)
        self._blank(block_id)
        return True

    def entrust(self, block_id: int, number: int) -> None:
        """Make another lineage that wants a block its keeper."""
        if self.keeper[block_id] != number:
            self._keep(block_id, number)

    def _add(self, lineage: Lineage, block_id: int, epoch: int, place: int) -> bool:
        present = self.epoch[block_id]
        number = lineage.number
        if present == epoch:
            # Content has one place in a chain: another one is a caller's mistake.
            if self.index[block_id] != place:
                return False
            others = self.others.get(block_id)
            if self.keeper[block_id] != number and (others is None or number not in others):
                self.others.setdefault(block_id, set()).add(number)
                lineage.wanted_blocks += 1
                self.wanting[number] = lineage
            if lineage.handover or not self.wanting[self.keeper[block_id]].handover:
                self.entrust(block_id, number)
            return True
        if present > epoch:
            return False
        if present >= 0:
            self.forget(block_id)
        self.epoch[block_id] = epoch
        self.index[block_id] = place
        self.keeper[block_id] = number
        self.num_wanted += 1
        self._charge(lineage, 1)
        lineage.wanted_blocks += 1
        self.wanting[number] = lineage
        return True

    def _keep(self, block_id: int, number: int) -> None:
        """Swap the keeper for one of the others."""
        before = self.keeper[block_id]
        others = self.others[block_id]
        others.remove(number)
        others.add(before)
        self.keeper[block_id] = number
        self._charge(self.wanting[before], -1)
        self._charge(self.wanting[number], 1)

    def _discard_other(self, block_id: int, number: int) -> None:
        others = self.others[block_id]
        others.discard(number)
        if not others:
            del self.others[block_id]

    def _lose(self, lineage: Lineage, block_id: int) -> None:
        lineage.wanted_blocks -= 1
        if not lineage.wanted_blocks:
            del self.wanting[lineage.number]
        place = self.index[block_id]
        if place < len(lineage.blocks) and lineage.blocks[place] == block_id:
            lineage.blocks[place] = -1

    def _blank(self, block_id: int) -> None:
        # The place stays: _lose reads it after the block has been blanked.
        self.epoch[block_id] = -1
        self.keeper[block_id] = -1
        self.num_wanted -= 1

    def _charge(self, lineage: Lineage, blocks: int) -> None:
        if lineage.handover:
            return
        left = self.charged.get(lineage.tenant, 0) + blocks
        self.num_charged += blocks
        if left:
            self.charged[lineage.tenant] = left
        else:
            del self.charged[lineage.tenant]

    def _precedence(self, number: int) -> tuple[bool, int]:
        lineage = self.wanting[number]
        return lineage.handover, lineage.used
