"""What goes into the lineage table and what comes out: values only."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Final, NamedTuple


class ChainBlock(NamedTuple):
    """One complete block of a call's chain.

    Attributes:
        block_id: the physical block.
        epoch: its epoch while it holds this content.
        hash: chain hash, which covers the block and all before it.
    """

    block_id: int
    epoch: int
    hash: bytes


class Signal(enum.StrEnum):
    """What the world outside a request may say about a session.

    ``wait``: a wait begins, perhaps of a known length; nothing is wanted during one that
    outlasts every retention. ``resume``: the next call comes now. ``final``: nothing follows.
    ``compaction``: the next call replaces what it continues. ``cancel``: the wait was given
    up; nothing is wanted until the next call ends.
    """

    WAIT = "wait"
    RESUME = "resume"
    FINAL = "final"
    COMPACTION = "compaction"
    CANCEL = "cancel"


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds on what is wanted and remembered.

    Attributes:
        num_blocks: blocks in the pool.
        retain_budget: share of the pool that sessions may want together.
        tenant_budget: share of the pool that one named tenant may want.
        lend_after_s: room beyond the budgets is lent to sessions, except for what calls that
            want nothing have used in this time, and tenants' room to each other; 0 lends
            nothing.
        retain_max_s: longest retention that a call may ask for.
        retain_default_s: retention of a call that asks for none.
        handover_s: how long a prompt is kept for a peer that has not verified it.
        max_lineages: lineages per session.
        max_sessions: sessions that are remembered.
    """

    num_blocks: int
    retain_budget: float = 0.5
    tenant_budget: float = 0.25
    lend_after_s: float = 0.0
    retain_max_s: float = 3600.0
    retain_default_s: float = 120.0
    handover_s: float = 30.0
    max_lineages: int = 8
    max_sessions: int = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """A call that has been let in; given back when it ends.

    Attributes:
        session: the caller's name for the session.
        tenant: whose budget it is charged to.
        generation: generation of the session that the call belongs to.
        known_blocks: longest common prefix with any chain of the session, in blocks.
        diverged_at: place at which the call leaves the lineage that it shares most with;
            None when it continues it whole, ends inside it, or shares nothing.
        new_session: no earlier call of this generation is remembered.
        number: unique over all admissions.
        expectation_ratio: the wait before this call in multiples of the expected one, None
            when none was expected.
    """

    session: str
    tenant: str | None
    generation: int
    known_blocks: int
    diverged_at: int | None
    new_session: bool
    number: int
    expectation_ratio: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Effect:
    """What a change did.

    Attributes:
        changed: blocks whose class may have changed; unwanted ones tail first.
        dead: those among them that nobody will ask for again if they are unwanted now: of a
            chain that was superseded, or of a session that has ended.
        clipped: what was cut to what, in words; None when nothing was.
        clipped_blocks: blocks given up because a budget did not hold.
        superseded: a chain was superseded.
    """

    changed: tuple[int, ...] = ()
    dead: tuple[int, ...] = ()
    clipped: str | None = None
    clipped_blocks: int = 0
    superseded: bool = False


NO_EFFECT: Final = Effect()


@dataclass(frozen=True, slots=True, kw_only=True)
class TableStats:
    """Gauges, and totals since the start."""

    sessions: int
    lineages: int
    handovers: int
    known_blocks: int
    wanted_blocks: int
    evicted_wanted_blocks_total: int
    superseded_total: int
    clipped_total: int
    clipped_blocks_total: int
    expired_total: int
    finals_total: int
    handed_over_total: int
    handovers_expired_total: int
    sessions_forgotten_total: int
