"""Lent room comes back: sessions and calls without sessions in one pool, over an hour.

With the real table, queue, budgets and policy (the ghost's pool is made of them), and the
default settings.
"""

from __future__ import annotations

from itertools import count
from typing import Any

from turncache_server.connector.config import Settings
from turncache_server.retention.events import Ended
from turncache_server.retention.ghost_pool import GhostPool
from turncache_server.retention.policy import policy_named
from turncache_server.retention.values import Limits

SETTINGS = Settings()
NUM_BLOCKS = 400
#: What calls without a session are guaranteed.
SHARE = round(NUM_BLOCKS * (1 - SETTINGS.retain_budget))
STEP_S = 2.0
NUM_SESSIONS, SESSION_BLOCKS = 20, 30
NUM_PROMPTS, PROMPT_BLOCKS = 4, 20


class Mixed:
    """A pool, and the calls that come to it one after another.

    Args:
        retaining: sessions are kept, as in mode ``on``; otherwise the pool is vLLM's LRU.
    """

    def __init__(self, *, retaining: bool) -> None:
        limits = Limits(
            num_blocks=NUM_BLOCKS + 1,
            retain_budget=SETTINGS.retain_budget,
            tenant_budget=SETTINGS.tenant_budget,
            lend_after_s=SETTINGS.lend_after_s,
            retain_default_s=SETTINGS.retain_default_s,
            retain_max_s=SETTINGS.retain_max_s,
        )
        self.pool = GhostPool(limits, policy_named(SETTINGS.policy))
        self.now_s = 0.0
        self._retaining = retaining
        self._turn = count()

    @property
    def wanted(self) -> int:
        """Blocks that sessions keep."""
        return self.pool.table.stats().wanted_blocks

    def sessions_only(self, seconds: float) -> None:
        """Let agents work alone: together they need half as much again as there is."""
        end_s = self.now_s + seconds
        while self.now_s < end_s:
            self._session()

    def both(self, num_rounds: int) -> list[float]:
        """Let others come too; return the share of their prompts found, by round."""
        found = []
        for _ in range(num_rounds):
            hits = 0
            for number in range(NUM_PROMPTS):
                self._session()
                first = 1_000_000 + 1000 * number
                hits += self._serve(list(range(first, first + PROMPT_BLOCKS)), None)
            found.append(hits / (NUM_PROMPTS * PROMPT_BLOCKS))
        return found

    def _session(self) -> None:
        number = next(self._turn) % NUM_SESSIONS
        first = 1000 * number
        self._serve(list(range(first, first + SESSION_BLOCKS)), f"s{number}")

    def _serve(self, hashes: Any, session: str | None) -> int:
        self.now_s += STEP_S
        self.pool.tick(self.now_s, rank=True)
        admission = None
        if session is not None and self._retaining:
            admission = self.pool.table.admit(
                session=session, tenant=None, hashes=hashes, now_s=self.now_s
            )
        grant = self.pool.start(hashes, len(hashes), len(hashes))
        ended = Ended(
            request=str(self.now_s),
            now_s=self.now_s,
            tokens=0,
            num_blocks=len(hashes),
            complete=len(hashes),
            more_hashes=(),
            answered=True,
        )
        self.pool.end(grant, admission, hashes, ended)
        return grant.num_hits


def test_calls_without_sessions_get_their_share_back() -> None:
    """Agents alone are lent the whole pool. As soon as others have used their share once, they
    have it, for as long as they come.
    """
    mixed = Mixed(retaining=True)
    mixed.sessions_only(2 * SETTINGS.lend_after_s)
    assert mixed.wanted > 0.9 * NUM_BLOCKS, "the whole pool is lent"
    rounds = -(-SHARE // (NUM_PROMPTS * PROMPT_BLOCKS))
    mixed.both(rounds)
    assert mixed.wanted <= NUM_BLOCKS - SHARE
    for _ in range(100):
        mixed.both(1)
        assert mixed.wanted <= NUM_BLOCKS - SHARE, f"at {mixed.now_s} s"


def test_calls_without_sessions_are_served_as_by_vllm() -> None:
    """What they use again is found as in a pool without us, from the second time on."""
    found = {}
    for retaining in (True, False):
        mixed = Mixed(retaining=retaining)
        mixed.sessions_only(2 * SETTINGS.lend_after_s)
        found[retaining] = mixed.both(60)
    assert found[False][2:] == [1.0] * 58, "LRU has them all"
    assert found[True][0] == 0
    settled = found[True][3:]
    assert sum(settled) >= 0.95 * len(settled)


def test_room_is_lent_again_when_nobody_else_comes() -> None:
    """After twice the time without other calls agents have the pool to themselves."""
    mixed = Mixed(retaining=True)
    mixed.sessions_only(2 * SETTINGS.lend_after_s)
    mixed.both(10)
    mixed.sessions_only(2 * SETTINGS.lend_after_s + NUM_SESSIONS * STEP_S)
    assert mixed.wanted > 0.9 * NUM_BLOCKS
