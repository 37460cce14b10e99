"""One engine's pool under the rules of mode ``on``, or as stock. Pure.

The real lineage table, free queue, budgets and policy, through the ghost's pool; here are the
settings that an engine would have, and when it ranks.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any, Final

from turncache_server.connector.config import Settings
from turncache_server.retention.events import Ended
from turncache_server.retention.ghost import RANK_EVERY_S
from turncache_server.retention.ghost_pool import GhostPool, Grant
from turncache_server.retention.policy import policy_named
from turncache_server.retention.values import Admission, Limits

#: Settings as an engine has them when nobody sets anything.
DEFAULTS: Final = Settings()


class EnginePool:
    """The pool of one engine.

    Args:
        num_blocks: blocks of the pool, of any size that its caller reckons in.
        retaining: sessions are kept by the rules of mode ``on``; else it is vLLM's LRU.
        settings: of the extension.

    Hashes are anything that can be compared: equal ones at one place are equal prefixes.
    """

    def __init__(self, num_blocks: int, *, retaining: bool, settings: Settings = DEFAULTS) -> None:
        limits = Limits(
            # One of them is vLLM's null block.
            num_blocks=num_blocks + 1,
            retain_budget=settings.retain_budget,
            tenant_budget=settings.tenant_budget,
            lend_after_s=settings.lend_after_s,
            retain_default_s=settings.retain_default_s,
            retain_max_s=settings.retain_max_s,
        )
        self._pool = GhostPool(limits, policy_named(settings.policy))
        self._retaining = retaining
        self._ranked_at_s = float("-inf")

    def __contains__(self, block_hash: Any) -> bool:
        return block_hash in self._pool

    @property
    def num_free(self) -> int:
        """Blocks that can be had."""
        return self._pool.num_free

    @property
    def num_used(self) -> int:
        """Blocks that a call holds."""
        return self._pool.num_used

    def leading(self, hashes: Sequence[Any]) -> int:
        """Return how many leading blocks are here."""
        for place, block_hash in enumerate(hashes):
            if block_hash not in self._pool:
                return place
        return len(hashes)

    def arrive(self, session: str | None, hashes: Sequence[Any], now_s: float) -> Admission | None:
        """Let a call in; None where sessions are not kept."""
        if not self._retaining:
            return None
        due = now_s - self._ranked_at_s >= RANK_EVERY_S
        if due:
            self._ranked_at_s = now_s
        self._pool.tick(now_s, rank=due)
        if session is None:
            return None
        return self._pool.table.admit(session=session, tenant=None, hashes=hashes, now_s=now_s)

    def start(self, hashes: Sequence[Any], num_blocks: int, reusable: int) -> Grant:
        """Give a call its blocks; see :meth:`GhostPool.start`."""
        return self._pool.start(hashes, num_blocks, reusable)

    def end(
        self,
        grant: Grant,
        admission: Admission | None,
        hashes: Sequence[Any],
        ended: Ended,
    ) -> None:
        """End a call; see :meth:`GhostPool.end`."""
        self._pool.end(grant, admission, hashes, ended)


def ended_call(
    num_blocks: int,
    now_s: float,
    *,
    expect_s: float | None = None,
    final: bool = False,
    compaction: bool = False,
) -> Ended:
    """Return how a call ended that was answered and filled all of its blocks."""
    return Ended(
        request="",
        now_s=now_s,
        tokens=0,
        num_blocks=num_blocks,
        complete=num_blocks,
        more_hashes=(),
        answered=True,
        expect_s=expect_s,
        final=final,
        compaction=compaction,
    )


def wrong_by(wait_s: float, factor: float, *, seed: int, place: object) -> float:
    """Return a wait as somebody expects it who is wrong by up to ``factor`` either way.

    Log-uniform, and the same for the same seed and place.
    """
    draw = random.Random(f"{seed}:{place}")  # noqa: S311 - reproducible, not secret
    return max(0.5, wait_s) * math.exp(draw.uniform(-1, 1) * math.log(factor))
