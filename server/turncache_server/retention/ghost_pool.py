"""A simulated pool under the rules of mode ``on``: the real queue, table, budgets and policy.

Only the blocks are made up. What mode ``on`` would do to real ones, this does to them.
"""

from __future__ import annotations

import enum
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from turncache_server.retention.events import Ended, Signalled
from turncache_server.retention.free_queue import FreeQueue
from turncache_server.retention.ledger import Ledger
from turncache_server.retention.lineages import LineageTable
from turncache_server.retention.policy import Policy
from turncache_server.retention.values import Admission, ChainBlock, Effect, Limits

#: Why blocks went is remembered of so many pools' worth of them.
FATES_POOLS: Final = 2


class Fate(enum.StrEnum):
    """Why retention would not have kept a block.

    ``evicted``: it was wanted, and the pool had no other block left. ``over_budget``: more
    was wanted than the budgets allow. ``expired``: its retention had ended. ``unwanted``:
    no session wanted it, or its session had let it go.
    """

    EVICTED = "evicted"
    OVER_BUDGET = "over_budget"
    EXPIRED = "expired"
    UNWANTED = "unwanted"


class GhostBlock:
    """A block without memory, in the shape that the free queue expects."""

    __slots__ = (
        "block_hash",
        "block_id",
        "fate",
        "next_free_block",
        "prev_free_block",
        "users",
    )

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.block_hash: bytes | None = None
        self.fate = Fate.UNWANTED
        self.users = 0
        self.prev_free_block: Any = None
        self.next_free_block: Any = None


class _Fresh:
    """All blocks of a pool that nobody has used, as a queue to be adopted."""

    def __init__(self, blocks: list[GhostBlock]) -> None:
        self._blocks = blocks

    @property
    def num_free_blocks(self) -> int:
        return len(self._blocks)

    def get_all_free_blocks(self) -> list[GhostBlock]:
        return self._blocks

    def popleft_n(self, n: int) -> list[GhostBlock]:
        taken, self._blocks = self._blocks[:n], self._blocks[n:]
        return taken


@dataclass(slots=True)
class Grant:
    """What one call has in a :class:`GhostPool`.

    Attributes:
        blocks: by place.
        num_hits: leading blocks that were found.
    """

    blocks: list[GhostBlock]
    num_hits: int


class GhostPool:
    """Blocks, and what of them sessions want.

    Args:
        limits: bounds; of ``num_blocks``, one is vLLM's null block.
        policy: which lineage is worth most.

    A pool that hears of no session behaves as vLLM's own.

    Attributes:
        table: the real lineage table.
        short_blocks: blocks that calls should have had and there was no room for.
    """

    def __init__(self, limits: Limits, policy: Policy) -> None:
        self.table = LineageTable(limits, policy)
        self.short_blocks = 0
        self._ledger = Ledger(limits.num_blocks)
        self._blocks = [GhostBlock(block_id) for block_id in range(limits.num_blocks)]
        self._queue = FreeQueue.adopt(
            _Fresh(self._blocks[1:]),
            num_blocks=limits.num_blocks,
            ledger=self._ledger,
            table=self.table,
            pending=(),
            blocks=self._blocks,
        )
        self._cached: dict[bytes, GhostBlock] = {}
        # Further blocks with a hash that is cached already.
        self._twins: dict[bytes, list[GhostBlock]] = {}
        self._fates: OrderedDict[bytes, Fate] = OrderedDict()
        self._max_fates = FATES_POOLS * limits.num_blocks
        self._ranking_is_old = False

    def __contains__(self, chain_hash: bytes) -> bool:
        return chain_hash in self._cached

    @property
    def num_free(self) -> int:
        """Blocks that can be had."""
        return self._queue.num_free_blocks

    @property
    def num_retained(self) -> int:
        """Free blocks that are kept for sessions."""
        return self._queue.num_retained

    @property
    def num_used(self) -> int:
        """Blocks that a call holds."""
        return len(self._blocks) - 1 - self.num_free

    def cached(self) -> set[bytes]:
        """Return every hash that the pool holds."""
        return set(self._cached)

    # --- calls ------------------------------------------------------------------------------

    def start(self, hashes: Sequence[bytes], num_blocks: int, reusable: int) -> Grant:
        """Give a call its blocks.

        Args:
            hashes: of its full blocks.
            num_blocks: what it needs; at least as many.
            reusable: leading blocks that may come from the cache.
        """
        blocks: list[GhostBlock] = []
        for chain_hash in hashes[:reusable]:
            block = self._cached.get(chain_hash)
            if block is None:
                break
            blocks.append(block)
        grant = Grant(blocks, len(blocks))
        for block in blocks:
            if not block.users:
                self._queue.remove(block)
            block.users += 1
        self._take(grant, num_blocks - len(blocks))
        self._fill(grant, hashes)
        return grant

    def end(
        self, grant: Grant, admission: Admission | None, hashes: Sequence[bytes], ended: Ended
    ) -> None:
        """End a call: what it wants is wanted, and its blocks are freed.

        Args:
            grant: what it has.
            admission: of the call, None for an ordinary one.
            hashes: of its whole chain.
            ended: how it ended.
        """
        complete = ended.complete
        self._take(grant, max(0, ended.num_blocks - len(grant.blocks)))
        self._fill(grant, hashes[:complete])
        for block in grant.blocks[max(complete, grant.num_hits) :]:
            if block.users == 1:
                self._drop_hash(block)
        if admission is not None:
            self._finish(grant, admission, hashes[:complete], ended)
        else:
            self.table.ordinary(len(grant.blocks), now_s=ended.now_s)
        self._release(grant)

    def abandon(self, grant: Grant | None, admission: Admission | None, now_s: float) -> None:
        """End a call of which nothing more is known."""
        if admission is not None:
            self._apply(self.table.cancel(admission, now_s=now_s), Fate.UNWANTED)
        if grant is not None:
            self._release(grant)

    def why_missing(self, chain_hash: bytes) -> Fate:
        """Return why a block is not here any more."""
        return self._fates.get(chain_hash, Fate.UNWANTED)

    # --- time and the world -----------------------------------------------------------------

    def tick(self, now_s: float, *, rank: bool) -> None:
        """Let time pass, as a step of the engine does.

        Args:
            now_s: the time.
            rank: the order of lineages is due to be computed anew.
        """
        self._apply(self.table.expire(now_s), Fate.EXPIRED)
        if (rank or self._ranking_is_old) and self._queue.num_retained:
            self._queue.rank(self.table.victims(now_s))
        self._ranking_is_old = False

    def signal(self, event: Signalled) -> None:
        """Hear what the world outside a request says about a session."""
        effect = self.table.signal(
            event.session, event.kind, expect_s=event.expect_s, now_s=event.now_s
        )
        self._apply(effect, Fate.UNWANTED)

    def tail_verified(self, tail_hash: bytes, now_s: float) -> None:
        """End hand-overs."""
        self._apply(self.table.handed_over(tail_hash, now_s=now_s), Fate.UNWANTED)

    def clear(self) -> None:
        """Forget what blocks hold and what is wanted; no call may hold any."""
        self._ledger.reset()
        self._apply(self.table.clear(), Fate.UNWANTED)
        for block in self._blocks:
            block.block_hash = None
        self._cached.clear()
        self._twins.clear()

    # --- inside -----------------------------------------------------------------------------

    def _finish(
        self, grant: Grant, admission: Admission, hashes: Sequence[bytes], ended: Ended
    ) -> None:
        if not ended.answered:
            effect = self.table.cancel(admission, now_s=ended.now_s)
        else:
            epoch, complete = self._ledger.epoch, len(hashes)
            begun = grant.blocks[complete : complete + ended.rest]
            effect = self.table.finish(
                admission,
                [
                    ChainBlock(block.block_id, epoch[block.block_id], chain_hash)
                    for block, chain_hash in zip(grant.blocks, hashes, strict=False)
                ],
                retain_s=ended.retain_s,
                expect_s=ended.expect_s,
                priority=ended.priority,
                final=ended.final,
                compaction=ended.compaction,
                handover=ended.handover,
                now_s=ended.now_s,
                rest=ChainBlock(begun[0].block_id, epoch[begun[0].block_id], b"")
                if begun
                else None,
            )
        self._apply(effect, Fate.OVER_BUDGET if effect.clipped_blocks else Fate.UNWANTED)

    def _take(self, grant: Grant, count: int) -> None:
        room = min(count, self._queue.num_free_blocks)
        self.short_blocks += count - room
        for block in self._queue.popleft_n(room):
            gone = self._drop_hash(block)
            if gone is not None:
                self._remember_fate(gone, block.fate)
            block.fate = Fate.UNWANTED
            block.users = 1
            grant.blocks.append(block)

    def _fill(self, grant: Grant, hashes: Sequence[bytes]) -> None:
        for block, chain_hash in zip(grant.blocks, hashes, strict=False):
            if block.block_hash is None:
                block.block_hash = chain_hash
                if self._cached.setdefault(chain_hash, block) is not block:
                    self._twins.setdefault(chain_hash, []).append(block)

    def _drop_hash(self, block: GhostBlock) -> bytes | None:
        """Take a block's hash away; return it when no other block has it."""
        chain_hash = block.block_hash
        if chain_hash is None:
            return None
        block.block_hash = None
        twins = self._twins.get(chain_hash)
        if twins is None:
            del self._cached[chain_hash]
            return chain_hash
        if self._cached[chain_hash] is block:
            self._cached[chain_hash] = twins.pop(0)
        else:
            twins.remove(block)
        if not twins:
            del self._twins[chain_hash]
        return None

    def _remember_fate(self, chain_hash: bytes, fate: Fate) -> None:
        # What nobody wanted is what everything else is taken for.
        self._fates.pop(chain_hash, None)
        if fate is not Fate.UNWANTED:
            self._fates[chain_hash] = fate
        if len(self._fates) > self._max_fates:
            self._fates.popitem(last=False)

    def _release(self, grant: Grant) -> None:
        first: list[GhostBlock] = []
        last: list[GhostBlock] = []
        for block in reversed(grant.blocks):
            block.users -= 1
            if not block.users:
                (first if block.block_hash is None else last).append(block)
        self._queue.prepend_n(first)
        self._queue.append_n(last)

    def _apply(self, effect: Effect, fate: Fate) -> None:
        """Move blocks to their class, and note why those that are let go are."""
        if not effect.changed:
            return
        self._note_fates(effect.changed, fate)
        self._queue.reclassify(effect.changed, effect.dead)
        self._ranking_is_old = True

    def _note_fates(self, changed: Iterable[int], fate: Fate) -> None:
        epoch = self._ledger.epoch
        for block_id in changed:
            block = self._blocks[block_id]
            if self.table.wants(block_id, epoch[block_id]):
                block.fate = Fate.EVICTED
            elif block.fate is Fate.EVICTED or fate is Fate.OVER_BUDGET:
                block.fate = fate
