"""Blocks whose content nobody has confirmed. Owner of their list.

A stock hand-over reads without asking its source before and after, so what it brings gets no
written mark and is given to nobody else; the same holds for what was computed on it. While
the mode is not *on* that is all. Once it is, such blocks have to leave the prefix cache:
their session would find them here at every call, would therefore never pull them, and
could never be returned, because a peek ends at the first block without a mark. Nobody finds
them then, so nobody is to keep them either.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from turncache_server.retention.lineages import LineageTable
from turncache_server.retention.values import NO_EFFECT, Effect


class Unproven:
    """The blocks that stock hand-overs brought or whose computation used those.

    Args:
        epoch: present epoch of each block; an entry holds for one epoch of its block.

    Attributes:
        calls: calls in flight that compute on unproven blocks, each with the index of its first
            one; to be looked at only.
        due: the mode has become *on*, and such blocks are still in the prefix cache.
    """

    def __init__(self, epoch: Sequence[int]) -> None:
        self._epoch = epoch
        # At most one entry per block of the pool.
        self._blocks: dict[int, int] = {}
        self.calls: dict[str, int] = {}
        self.due = False

    def __bool__(self) -> bool:
        return bool(self._blocks)

    def brought(self, request_id: str, block_ids: Sequence[int], first: int) -> None:
        """Hear that a stock hand-over fills a call's blocks from index ``first`` on."""
        self.calls[request_id] = min(first, self.calls.get(request_id, first))
        self._add(block_ids[first:])

    def admitted(self, request_id: str, block_ids: Sequence[int]) -> None:
        """Look whether an admitted call has found unproven blocks in the prefix cache."""
        if request_id in self.calls:
            return
        for index, block_id in enumerate(block_ids):
            if self._blocks.get(block_id) == self._epoch[block_id]:
                self.calls[request_id] = index
                return

    def ended(self, request_id: str, block_ids: Sequence[int]) -> bool:
        """End a call; returns whether it used unproven blocks.

        All its blocks from the first such on have been computed on them.
        """
        first = self.calls.pop(request_id, None)
        if first is None:
            return False
        self._add(block_ids[first:])
        return True

    def leave(self, pool: Any, table: LineageTable) -> Effect:
        """Have such blocks leave the prefix cache of vLLM's pool, and nobody want them."""
        block_ids = self._take()
        if not block_ids:
            return NO_EFFECT
        pool.evict_blocks(block_ids)
        return table.lost(block_ids)

    def _take(self) -> set[int]:
        found = {
            block_id for block_id, epoch in self._blocks.items() if self._epoch[block_id] == epoch
        }
        if not self.calls:
            # Calls in flight may not have them in the cache yet, and can be joined until they end.
            self._blocks.clear()
        return found

    def _add(self, block_ids: Sequence[int]) -> None:
        for block_id in block_ids:
            self._blocks[block_id] = self._epoch[block_id]
