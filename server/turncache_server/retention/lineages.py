"""Sessions and their lineages: who wants which block until when.

States of a session: *in flight* (a call is being served), *waiting*, and gone. It is made by
an admission, and ends with ``final`` or when it is the least recently used of too many; its
generation ends with it. States of a lineage: *wanted* (it wants blocks) and *known* (only
its hashes are remembered, to tell what had been computed before).

Rules:

* A call supersedes every lineage of its session of which it continues at least 90 %; what
  only those used becomes unwanted. Otherwise it makes another lineage. A session id alone
  never makes anything unwanted.
* A call whose generation has ended changes nothing of its session.
* Time makes a lineage unwanted, except while its session has a call in flight.
* A hand-over is a lineage of its own: above all others, without a session, charged to
  nobody, and gone when a peer has verified it or its time is over.

Nothing here looks at whether a block is free, and nothing reads a clock. Only the engine
thread calls these methods, except those that are said to be for any thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from turncache_server.retention.budgets import Budgets
from turncache_server.retention.chains import common_prefix
from turncache_server.retention.deadlines import Deadlines
from turncache_server.retention.handovers import Handovers
from turncache_server.retention.policy import Policy
from turncache_server.retention.ranking import least_valuable_first
from turncache_server.retention.registry import Registry, continues, longest, superseded
from turncache_server.retention.sessions import KeptSession, Lineage, Session, view_of
from turncache_server.retention.values import (
    NO_EFFECT,
    Admission,
    ChainBlock,
    Effect,
    Limits,
    Signal,
    TableStats,
)
from turncache_server.retention.wants import WantBoard

__all__ = [
    "Admission",
    "ChainBlock",
    "Effect",
    "Limits",
    "LineageTable",
    "Signal",
    "TableStats",
]

#: Hashes are remembered of at most this many pools.
KNOWN_POOLS: Final = 8
#: Without ``retain_s``, a lineage is retained for so many times its expected wait.
EXPECT_FACTOR: Final = 2.0


@dataclass(slots=True)
class _Totals:
    evicted_wanted_blocks: int = 0
    superseded: int = 0
    clipped: int = 0
    clipped_blocks: int = 0
    expired: int = 0
    finals: int = 0
    handed_over: int = 0
    handovers_expired: int = 0
    sessions_forgotten: int = 0


@dataclass(slots=True)
class _Change:
    """An effect in the making."""

    blocks: list[int] = field(default_factory=list)
    dead: list[int] = field(default_factory=list)
    clipped: list[str] = field(default_factory=list)
    clipped_blocks: int = 0
    superseded: bool = False


class LineageTable:
    """All sessions of one engine.

    Args:
        limits: bounds.
        policy: which lineage is worth most.

    Attributes:
        board: the wants; read by the free queue.
    """

    def __init__(self, limits: Limits, policy: Policy) -> None:
        self.board = WantBoard(limits.num_blocks)
        self._limits = limits
        self._policy = policy
        self._budgets = Budgets(
            num_blocks=limits.num_blocks,
            pool_blocks=int(limits.num_blocks * limits.retain_budget),
            tenant_blocks=int(limits.num_blocks * limits.tenant_budget),
            lend_after_s=limits.lend_after_s,
        )
        self._registry = Registry(
            max_sessions=limits.max_sessions, max_known=KNOWN_POOLS * limits.num_blocks
        )
        self._handovers = Handovers()
        self._deadlines = Deadlines()
        self._totals = _Totals()
        # Changes by admissions, which have no effect to report them in.
        self._owed: list[int] = []

    # --- calls ------------------------------------------------------------------------------

    def known_blocks(self, session: str, hashes: Sequence[bytes]) -> int:
        """Return how many leading blocks an earlier call of the session had; for any thread."""
        record = self._registry.sessions.get(session)
        lineages = [] if record is None else list(record.lineages.values())
        return max((common_prefix(each.known, hashes) for each in lineages), default=0)

    def knows(self, session: str) -> bool:
        """Whether calls of the session are remembered; for any thread."""
        return session in self._registry.sessions

    def kept(self, now_s: float) -> list[KeptSession]:
        """List the sessions that want blocks or have a call in flight; for any thread.

        What is due at ``now_s`` counts as let go, whether :meth:`expire` has been called or not.
        """
        # Copied at once, each: the engine thread may be changing them.
        wanting = list(self.board.wanting.values())
        records = [record for record in list(self._registry.sessions.values()) if record.in_flight]
        records += [
            lineage.session
            for lineage in wanting
            if lineage.session is not None and lineage.retain_until_s > now_s
        ]
        return [view_of(record, now_s) for record in dict.fromkeys(records)]

    def num_handovers(self, now_s: float, verified: Iterable[bytes] = ()) -> int:
        """Count the prompts that wait for a peer; for any thread.

        Args:
            now_s: the time; those that are due count no more, as in :meth:`kept`.
            verified: tail hashes that are about to be :meth:`handed_over`.
        """
        over = {number for tail in verified for number in self._handovers.ending_in(tail)}
        waiting = (self._registry.lineages.get(number) for number in self._handovers.numbers())
        return sum(
            lineage is not None and lineage.number not in over and lineage.retain_until_s > now_s
            for lineage in waiting
        )

    def awaits(self, tail_hash: bytes) -> bool:
        """Whether a hand-over waits for a peer to verify this tail; for any thread."""
        return self._handovers.awaits(tail_hash)

    def admit(
        self, *, session: str, tenant: str | None, hashes: Sequence[bytes], now_s: float
    ) -> Admission:
        """Let a call in: its session is in flight until ``finish`` or ``cancel``.

        Args:
            session: the caller's name for the session.
            tenant: whose budget it is charged to.
            hashes: chain hashes of the prompt's full blocks.
            now_s: the time.
        """
        record, new = self._registry.open(session)
        known, continued = longest(record.lineages.values(), hashes)
        ratio = None
        diverged_at = None
        if continued is not None:
            if known < min(len(continued.known), len(hashes)):
                diverged_at = known
            ratio = _expectation_ratio(continued, now_s)
            if ratio is not None and not record.in_flight:
                record.score(ratio)
            self._registry.use(continued)
        number = self._registry.number()
        record.in_flight[number] = now_s
        if continued is not None and continues(known, continued):
            record.continuing[number] = continued
        self._forget_sessions(keep=record)
        return Admission(
            session=session,
            tenant=tenant,
            generation=record.generation,
            known_blocks=known,
            diverged_at=diverged_at,
            new_session=new,
            number=number,
            expectation_ratio=ratio,
        )

    def finish(
        self,
        admission: Admission,
        chain: Sequence[ChainBlock],
        *,
        retain_s: float | None,
        expect_s: float | None,
        priority: int,
        final: bool,
        compaction: bool,
        handover: bool,
        now_s: float,
        rest: ChainBlock | None = None,
    ) -> Effect:
        """End a call that was answered.

        Args:
            admission: of the call.
            chain: its complete blocks, from the first.
            retain_s: how long to retain them; 0 wants nothing and only remembers the
                hashes, None takes the default, or twice ``expect_s`` when that is longer.
            expect_s: seconds until the session is expected back, None for unknown.
            priority: orders lineages within the tenant.
            final: nothing follows: ends the generation.
            compaction: supersedes what it continues, however little that is.
            handover: also keep the chain above everything until ``handed_over``.
            now_s: the time.
            rest: the block after them that the call has begun, to be kept with them.
        """
        change = _Change()
        kept = chain if rest is None or not chain else [*chain, rest]
        record = self._registry.in_generation(admission.session, admission.generation)
        if record is not None:
            record.ended(admission.number)
            if final:
                self._close(record, change)
            else:
                if chain:
                    lineage, replaced = self._place(
                        record, admission.tenant, chain, compaction=compaction, change=change
                    )
                    lineage.priority = priority
                    lineage.finished_at_s = now_s
                    lineage.hinted_at_s = None if expect_s is None else now_s + expect_s
                    lineage.retain_s = self._granted_s(retain_s, expect_s, change)
                    start = len(change.blocks)
                    self._retain(lineage, kept, change)
                    # Only now: what both chains use stays wanted throughout.
                    for each in replaced:
                        self._drop_lineage(each, change)
                    if lineage.retain_s:
                        # What only the superseded chains used has no future.
                        change.dead += change.blocks[start:]
                    else:
                        self._budgets.ordinary(len(chain), now_s)
                    self._forget_sessions(keep=record)
                self._rest(record)
        if handover and chain and self._limits.handover_s > 0:
            self._hand_over(chain, kept, now_s, change)
        return self._settle(change, now_s)

    def ordinary(self, num_blocks: int, *, now_s: float) -> None:
        """Hear that a call without a session has ended, and how many blocks it had."""
        self._budgets.ordinary(num_blocks, now_s)

    def cancel(self, admission: Admission, *, now_s: float) -> Effect:
        """End a call without a result.

        It was a sign of life all the same: what the session wants is retained for as long
        as after its latest finished call, because a retry is likely.
        """
        record = self._registry.in_generation(admission.session, admission.generation)
        if record is not None:
            record.ended(admission.number)
            latest = record.latest()
            if latest is not None:
                latest.retain_until_s = max(latest.retain_until_s, now_s + latest.retain_s)
            self._rest(record)
        return self._settle(_Change(), now_s)

    def handed_over(self, tail_hash: bytes, *, now_s: float) -> Effect:
        """End the hand-overs whose prompt ends in ``tail_hash``, or one block later.

        A peer computes at least the prompt's last token, so of a prompt that fills its last
        block it verifies one block less.
        """
        change = _Change()
        for number in self._handovers.ending_in(tail_hash):
            self._drop_lineage(self._registry.lineages[number], change)
            self._totals.handed_over += 1
        return self._settle(change, now_s)

    def signal(self, session: str, kind: Signal, *, expect_s: float | None, now_s: float) -> Effect:
        """Hear what the world outside a request says; an unknown session is ignored."""
        change = _Change()
        if session not in self._registry.sessions:
            return self._settle(change, now_s)
        record, _ = self._registry.open(session)
        if kind is Signal.FINAL:
            self._close(record, change)
        elif kind is Signal.CANCEL:
            self.board.drop_all(record.lineages.values(), change.blocks)
        elif kind is Signal.COMPACTION:
            record.compaction_announced = True
        else:
            self._expect(record, 0.0 if kind is Signal.RESUME else expect_s, now_s, change)
        return self._settle(change, now_s)

    # --- time and pressure --------------------------------------------------------------------

    def expire(self, now_s: float) -> Effect:
        """Let go what is due; next to nothing when nothing is wanted or waited for."""
        if not (self.board.num_wanted or self._deadlines or self._owed):
            return NO_EFFECT
        return self._settle(_Change(), now_s)

    def wants(self, block_id: int, epoch: int) -> bool:
        """Whether any lineage wants this block at this epoch."""
        return self.board.epoch[block_id] == epoch

    def keeper(self, block_id: int) -> int | None:
        """Return the lineage on whose shelf the block belongs, None when it is unwanted."""
        number = self.board.keeper[block_id]
        return None if number < 0 else number

    def victims(self, now_s: float) -> list[int]:
        """Return the lineages that want blocks, least valuable first."""
        return [each.number for each in self._ranked(now_s)]

    def evicted(self, block_id: int) -> None:
        """Hear that a wanted block was handed out: no chain has it any more."""
        if self.board.forget(block_id):
            self._totals.evicted_wanted_blocks += 1

    def lost(self, block_ids: Iterable[int]) -> Effect:
        """Hear that blocks have left the prefix cache: who wants them would not find them."""
        change = _Change()
        change.blocks += [block_id for block_id in block_ids if self.board.forget(block_id)]
        change.dead += change.blocks
        return self._effect(change)

    def clear(self) -> Effect:
        """Want nothing any more and end all hand-overs; what is known stays."""
        change = _Change()
        for number in self._handovers.numbers():
            self._drop_lineage(self._registry.lineages[number], change)
        for record in self._registry.sessions.values():
            record.in_flight.clear()
            record.continuing.clear()
            self.board.drop_all(record.lineages.values(), change.blocks)
        return self._effect(change)

    def stats(self) -> TableStats:
        """Return the present numbers; for any thread."""
        totals = self._totals
        return TableStats(
            sessions=len(self._registry.sessions),
            lineages=len(self._registry.lineages) - len(self._handovers),
            handovers=len(self._handovers),
            known_blocks=self._registry.num_known,
            wanted_blocks=self.board.num_wanted,
            evicted_wanted_blocks_total=totals.evicted_wanted_blocks,
            superseded_total=totals.superseded,
            clipped_total=totals.clipped,
            clipped_blocks_total=totals.clipped_blocks,
            expired_total=totals.expired,
            finals_total=totals.finals,
            handed_over_total=totals.handed_over,
            handovers_expired_total=totals.handovers_expired,
            sessions_forgotten_total=totals.sessions_forgotten,
        )

    # --- inside ----------------------------------------------------------------------------

    def _ranked(self, now_s: float) -> list[Lineage]:
        return least_valuable_first(self.board.wanting.values(), self._policy, now_s)

    def _place(
        self,
        record: Session,
        tenant: str | None,
        chain: Sequence[ChainBlock],
        *,
        compaction: bool,
        change: _Change,
    ) -> tuple[Lineage, list[Lineage]]:
        """Find or make the lineage of a finished chain; also return those that it replaces."""
        hashes = [block.hash for block in chain]
        compaction = compaction or record.compaction_announced
        record.compaction_announced = False
        replaced = superseded(record.lineages.values(), hashes, compaction=compaction)
        if replaced:
            change.superseded = True
            self._totals.superseded += len(replaced)
            lineage = replaced.pop()
            if lineage.tenant != tenant:
                # Charges follow the tenant: none may be left with the former one.
                self.board.drop_all([lineage], change.blocks)
                lineage.tenant = tenant
        else:
            if len(record.lineages) >= self._limits.max_lineages:
                self._drop_lineage(next(iter(record.lineages.values())), change)
            lineage = self._registry.add(record, tenant)
        self._registry.remember(lineage, hashes)
        self._registry.use(lineage)
        return lineage, replaced

    def _granted_s(self, retain_s: float | None, expect_s: float | None, change: _Change) -> float:
        longest_s = self._limits.retain_max_s
        if retain_s is None:
            return self._wait_s(expect_s)
        if retain_s > longest_s:
            change.clipped.append(f"retention of {retain_s:g} s cut to {longest_s:g} s")
            return longest_s
        return max(0.0, retain_s)

    def _retain(self, lineage: Lineage, chain: Sequence[ChainBlock], change: _Change) -> None:
        lineage.retain_until_s = lineage.finished_at_s + lineage.retain_s
        if lineage.retain_s:
            self.board.want(lineage, chain, change.blocks)
            self._deadlines.set(lineage.number, lineage.retain_until_s)
        else:
            self.board.drop_all([lineage], change.blocks)
            self._deadlines.discard(lineage.number)

    def _wait_s(self, expect_s: float | None) -> float:
        """Return for how long to retain for a wait that nobody gave a time for."""
        expected_s = 0.0 if expect_s is None else expect_s * EXPECT_FACTOR
        return min(max(self._limits.retain_default_s, expected_s), self._limits.retain_max_s)

    def _expect(
        self, record: Session, expect_s: float | None, now_s: float, change: _Change
    ) -> None:
        lineage = record.latest()
        if lineage is None:
            return
        lineage.finished_at_s = now_s
        if expect_s is not None:
            lineage.hinted_at_s = now_s + expect_s
            if expect_s >= self._limits.retain_max_s and not record.in_flight:
                # Nothing is retained for so long: what is kept meanwhile is kept in vain.
                self.board.drop_all(record.lineages.values(), change.blocks)
        if lineage.wanted_blocks:
            until_s = now_s + self._wait_s(expect_s)
            lineage.retain_until_s = max(lineage.retain_until_s, until_s)
            self._deadlines.set(lineage.number, lineage.retain_until_s)

    def _rest(self, record: Session) -> None:
        """Let time count again for a session without a call in flight."""
        if record.in_flight:
            return
        for lineage in record.lineages.values():
            if lineage.wanted_blocks:
                self._deadlines.set(lineage.number, lineage.retain_until_s)

    def _hand_over(
        self,
        chain: Sequence[ChainBlock],
        kept: Sequence[ChainBlock],
        now_s: float,
        change: _Change,
    ) -> None:
        lineage = self._registry.add(None, None)
        lineage.finished_at_s = now_s
        lineage.retain_s = self._limits.handover_s
        self._handovers.add(lineage.number, chain)
        self._retain(lineage, kept, change)

    def _drop_lineage(self, lineage: Lineage, change: _Change) -> None:
        self.board.drop_all([lineage], change.blocks)
        self._deadlines.discard(lineage.number)
        self._registry.remove(lineage)
        if lineage.handover:
            self._handovers.remove(lineage.number)

    def _close(self, record: Session, change: _Change) -> None:
        start = len(change.blocks)
        self._remove_session(record, change)
        change.dead += change.blocks[start:]
        self._totals.finals += 1

    def _remove_session(self, record: Session, change: _Change) -> None:
        for lineage in list(record.lineages.values()):
            self._drop_lineage(lineage, change)
        self._registry.close(record)

    def _forget_sessions(self, *, keep: Session) -> None:
        """Hold the bounds on memory: the least recently used sessions go."""
        while (victim := self._registry.excess(keep)) is not None:
            change = _Change()
            self._remove_session(victim, change)
            self._owed += change.blocks
            self._totals.sessions_forgotten += 1

    def _expire_due(self, now_s: float, change: _Change) -> None:
        while (number := self._deadlines.pop_due(now_s)) is not None:
            lineage = self._registry.lineages[number]
            record = lineage.session
            if record is None:
                self._drop_lineage(lineage, change)
                self._totals.handovers_expired += 1
            elif lineage.retain_until_s > now_s:
                self._deadlines.set(number, lineage.retain_until_s)
            elif (bound_s := self._in_flight_until_s(record, now_s)) is not None:
                self._deadlines.set(number, bound_s)
            else:
                self.board.drop_all([lineage], change.blocks)
                self._totals.expired += 1

    def _in_flight_until_s(self, record: Session, now_s: float) -> float | None:
        """Return when the session stops counting as in flight, whatever its calls do."""
        longest_s = self._limits.retain_max_s
        for number, admitted_at_s in list(record.in_flight.items()):
            # Nobody ended it: the call is lost, and must not keep its session for ever.
            if admitted_at_s + longest_s <= now_s:
                record.ended(number)
        return max(record.in_flight.values()) + longest_s if record.in_flight else None

    def _settle(self, change: _Change, now_s: float) -> Effect:
        self._expire_due(now_s, change)
        clip = self._budgets.enforce(self.board, lambda: self._ranked(now_s), change.blocks, now_s)
        if clip is not None:
            budget, num_blocks = clip
            change.clipped.append(f"{num_blocks} wanted blocks given up for {budget}")
            change.clipped_blocks = num_blocks
            self._totals.clipped_blocks += num_blocks
        self._totals.clipped += bool(change.clipped)
        return self._effect(change)

    def _effect(self, change: _Change) -> Effect:
        owed, self._owed = self._owed, []
        return Effect(
            changed=(*owed, *change.blocks),
            dead=tuple(change.dead),
            clipped="; ".join(change.clipped) or None,
            clipped_blocks=change.clipped_blocks,
            superseded=change.superseded,
        )


def _expectation_ratio(lineage: Lineage, now_s: float) -> float | None:
    if lineage.hinted_at_s is None:
        return None
    expected_s = lineage.hinted_at_s - lineage.finished_at_s
    return (now_s - lineage.finished_at_s) / expected_s if expected_s > 0 else None
