"""How much may be wanted, for the pool and per tenant, and what gives way above it.

Room that nobody else needs is lent, because kept blocks are better given up in the order of
their value than in the order of their use. The pool's budget grows by what calls that want
nothing have left unused of the rest, and a tenant's by what the others leave of the pool's.
Both shrink to what was configured as soon as somebody else has a use for the room.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from turncache_server.retention.sessions import Lineage
from turncache_server.retention.wants import WantBoard


@dataclass(frozen=True, slots=True)
class _Breach:
    """A budget that does not hold; ``whose`` is a tenant, None for the pool."""

    whose: str | None
    limit: int


class Budgets:
    """Limits in blocks on what sessions want; hand-overs are bounded by time instead.

    Args:
        num_blocks: blocks in the pool.
        pool_blocks: for all sessions together.
        tenant_blocks: for each named tenant; sessions without a tenant share the pool's.
        lend_after_s: for how long what calls that want nothing have used is theirs; 0 lends
            nothing.
    """

    def __init__(
        self, *, num_blocks: int, pool_blocks: int, tenant_blocks: int, lend_after_s: float
    ) -> None:
        self._num_blocks = num_blocks
        self._pool_blocks = pool_blocks
        self._tenant_blocks = tenant_blocks
        self._lend_after_s = lend_after_s
        # Blocks that calls that want nothing have used since, and in as long before.
        self._since_s = float("-inf")
        self._used = 0
        self._used_before = 0

    def ordinary(self, num_blocks: int, now_s: float) -> None:
        """Hear that a call that wants nothing has used so many blocks."""
        self._turn(now_s)
        self._used += num_blocks

    def _turn(self, now_s: float) -> None:
        passed_s = now_s - self._since_s
        if passed_s >= self._lend_after_s:
            self._used_before = self._used if passed_s < 2 * self._lend_after_s else 0
            self._used = 0
            self._since_s = now_s

    def _limit(self, now_s: float) -> int:
        """Return how many blocks the pool's budget has at this moment."""
        if not self._lend_after_s:
            return self._pool_blocks
        self._turn(now_s)
        left = self._num_blocks - self._used - self._used_before
        return max(self._pool_blocks, left)

    def enforce(
        self,
        board: WantBoard,
        order: Callable[[], Sequence[Lineage]],
        changed: list[int],
        now_s: float,
    ) -> tuple[str, int] | None:
        """Let the least valuable lineages' tails become unwanted until all budgets hold.

        Args:
            board: the wants.
            order: computes the lineages, least valuable first; called when needed only.
            changed: receives the blocks whose class may have changed.
            now_s: the time.

        Returns:
            (the first budget that did not hold, blocks that became unwanted), or None.
        """
        pool_limit = self._limit(now_s)
        breach = self._breach(board, pool_limit)
        if breach is None:
            return None
        name = "pool" if breach.whose is None else "tenant"
        first = f"the {name}'s budget of {breach.limit} blocks"
        wanted_before = board.num_wanted
        ranked = [each for each in order() if not each.handover]
        # Letting go can make another tenant's lineage the keeper, hence the loop. It ends:
        # whoever is over budget keeps a block, so each round drops a want.
        while breach is not None:
            whose = breach.whose
            theirs = ranked if whose is None else [x for x in ranked if x.tenant == whose]
            # Some slack below the limit, or every call over it would sort all lineages.
            _clip(board, theirs, whose, breach.limit - breach.limit // 64, changed)
            breach = self._breach(board, pool_limit)
        return first, wanted_before - board.num_wanted

    def _breach(self, board: WantBoard, pool_limit: int) -> _Breach | None:
        excess = board.num_charged - pool_limit
        if excess <= 0 and self._lend_after_s:
            return None
        for tenant, blocks in board.charged.items():
            if tenant is not None and blocks > self._tenant_blocks:
                limit = self._tenant_blocks
                if self._lend_after_s:
                    # What the others leave of the pool's budget is lent.
                    limit = max(limit, blocks - excess)
                return _Breach(tenant, limit)
        return _Breach(None, pool_limit) if excess > 0 else None


def _clip(
    board: WantBoard,
    lineages: Iterable[Lineage],
    whose: str | None,
    goal: int,
    changed: list[int],
) -> None:
    # First what only one lineage wants: giving up a shared block frees nothing, and the
    # blocks before it in the chain are shared as well.
    for shared_too in (False, True):
        for lineage in lineages:
            for block_id in lineage.wanted_tail_first():
                charged = board.num_charged if whose is None else board.charged.get(whose, 0)
                if charged <= goal:
                    return
                if board.wanting[board.keeper[block_id]].handover:
                    continue  # charged to nobody
                if not shared_too and block_id in board.others:
                    break
                board.drop(lineage, block_id, changed)
