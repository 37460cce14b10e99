"""How much may be wanted, for the pool and per tenant, and what gives way above it."""

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
        pool_blocks: for all sessions together.
        tenant_blocks: for each named tenant; sessions without a tenant share the pool's.
    """

    def __init__(self, *, pool_blocks: int, tenant_blocks: int) -> None:
        self._pool_blocks = pool_blocks
        self._tenant_blocks = tenant_blocks

    def enforce(
        self, board: WantBoard, order: Callable[[], Sequence[Lineage]], changed: list[int]
    ) -> tuple[str, int] | None:
        """Let the least valuable lineages' tails become unwanted until all budgets hold.

        Args:
            board: the wants.
            order: computes the lineages, least valuable first; called when needed only.
            changed: receives the blocks whose class may have changed.

        Returns:
            (the first budget that did not hold, blocks that became unwanted), or None.
        """
        breach = self._breach(board)
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
            breach = self._breach(board)
        return first, wanted_before - board.num_wanted

    def _breach(self, board: WantBoard) -> _Breach | None:
        for tenant, blocks in board.charged.items():
            if tenant is not None and blocks > self._tenant_blocks:
                return _Breach(tenant, self._tenant_blocks)
        if board.num_charged > self._pool_blocks:
            return _Breach(None, self._pool_blocks)
        return None


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
