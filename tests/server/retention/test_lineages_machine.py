"""The lineage table against a model that is written from the rules, without its data structures."""

from __future__ import annotations

from dataclasses import dataclass, field

import hypothesis.strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.server.retention.support import MACHINE, hashes
from turncache_server.retention.lineages import Admission, ChainBlock, Limits, LineageTable, Signal
from turncache_server.retention.policy import POLICY_NAMES, policy_named

NUM_BLOCKS = 64
MAX_LINEAGES = 3
DEFAULT_S, MAX_S, HANDOVER_S = 20.0, 100.0, 10.0
SESSIONS = st.sampled_from(["r", "s", "t"])
TENANTS = st.sampled_from([None, "one", "two"])
TEXT = st.text(alphabet="ab", max_size=7).map(lambda tail: "system" + tail)
SHORT = st.text(alphabet="ab", min_size=1, max_size=4)
RETAIN = st.sampled_from([None, 0.0, 5.0, 500.0])


@dataclass
class ModelLineage:
    """One chain, what it wants by (block, epoch), and until when."""

    text: str
    wants: set[tuple[int, int]]
    until_s: float
    retain_s: float
    used: int


@dataclass
class ModelSession:
    lineages: list[ModelLineage] = field(default_factory=list)
    calls: dict[int, float] = field(default_factory=dict)
    compaction: bool = False


def common(left: str, right: str) -> int:
    """Length of the common prefix."""
    return next(
        (at for at, (a, b) in enumerate(zip(left, right, strict=False)) if a != b),
        min(len(left), len(right)),
    )


class LineageMachine(RuleBasedStateMachine):
    """Calls, signals, time and evictions in any order, with budgets that never bind."""

    budgets = (1.0, 1.0)

    def __init__(self) -> None:
        super().__init__()
        self.table = self.make_table()
        self.now_s = 0.0
        self.uses = 0
        self.last_epoch = 1
        self.sessions: dict[str, ModelSession] = {}
        self.running: list[tuple[Admission, ModelSession, str]] = []
        self.handovers: list[tuple[str, set[tuple[int, int]], float]] = []
        # Which block holds which prefix, as a prefix cache would say.
        self.holder: dict[str, int] = {}
        self.epoch = [1] * NUM_BLOCKS
        self.next_block = 0

    @initialize(policy=st.sampled_from(POLICY_NAMES))
    def choose_policy(self, policy: str) -> None:
        self.table = self.make_table(policy)

    def make_table(self, policy: str = "deadline") -> LineageTable:
        """A table with the machine's limits."""
        pool, tenant = self.budgets
        return LineageTable(
            Limits(
                num_blocks=NUM_BLOCKS,
                retain_budget=pool,
                tenant_budget=tenant,
                retain_max_s=MAX_S,
                retain_default_s=DEFAULT_S,
                handover_s=HANDOVER_S,
                max_lineages=MAX_LINEAGES,
            ),
            policy_named(policy),
        )

    def use(self) -> int:
        """A number that rises."""
        self.uses += 1
        return self.uses

    def blocks_of(self, text: str) -> list[ChainBlock]:
        """Compute or find the blocks of a chain; computing takes blocks away from others."""
        out = []
        for end, chain_hash in enumerate(hashes(text), start=1):
            prefix = text[:end]
            if prefix not in self.holder:
                block_id = self.next_block % NUM_BLOCKS
                self.next_block += 1
                self.evict_block(block_id)
                self.holder[prefix] = block_id
            block_id = self.holder[prefix]
            out.append(ChainBlock(block_id, self.epoch[block_id], chain_hash))
        return out

    def evict_block(self, block_id: int) -> None:
        """Hand a block out: the table hears of it, the model forgets its wants."""
        self.table.evicted(block_id)
        self.last_epoch += 1
        self.epoch[block_id] = self.last_epoch
        self.holder = {text: held for text, held in self.holder.items() if held != block_id}
        for wants in self.all_wants():
            wants -= {want for want in wants if want[0] == block_id}

    def all_wants(self) -> list[set[tuple[int, int]]]:
        """Every want of every lineage and hand-over."""
        return [
            *(each.wants for session in self.sessions.values() for each in session.lineages),
            *(wants for _, wants, _ in self.handovers),
        ]

    def settle(self) -> None:
        """Let the model's time pass."""
        self.handovers = [each for each in self.handovers if each[2] > self.now_s]
        for session in self.sessions.values():
            session.calls = {
                number: at_s
                for number, at_s in session.calls.items()
                if at_s + MAX_S > self.now_s or session_is_fresh(session, self.now_s)
            }
            if not session.calls:
                for lineage in session.lineages:
                    if lineage.until_s <= self.now_s:
                        lineage.wants.clear()

    @rule(key=SESSIONS, tenant=TENANTS, text=TEXT)
    def admit(self, key: str, tenant: str | None, text: str) -> None:
        admission = self.table.admit(
            session=key, tenant=tenant, hashes=hashes(text), now_s=self.now_s
        )
        session = self.sessions.get(key)
        assert admission.new_session == (session is None)
        session = self.sessions.setdefault(key, ModelSession())
        shares = [(common(each.text, text), each.used, each) for each in session.lineages]
        known, _, continued = max(shares, default=(0, 0, None), key=lambda each: each[:2])
        assert admission.known_blocks == known
        left = continued is not None and 0 < known < min(len(continued.text), len(text))
        assert admission.diverged_at == (known if left else None)
        if continued is not None and known:
            continued.used = self.use()
        session.calls[admission.number] = self.now_s
        self.running.append((admission, session, text))

    @precondition(lambda self: self.running)
    @rule(
        data=st.data(),
        answer=SHORT,
        retain_s=RETAIN,
        final=st.sampled_from([False, False, False, True]),
        compaction=st.sampled_from([False, False, True]),
        handover=st.booleans(),
        priority=st.sampled_from([50, 10, 90]),
    )
    def finish(
        self,
        *,
        data: st.DataObject,
        answer: str,
        retain_s: float | None,
        final: bool,
        compaction: bool,
        handover: bool,
        priority: int,
    ) -> None:
        admission, session, prompt = self.running.pop(
            data.draw(st.integers(0, len(self.running) - 1))
        )
        text = prompt + answer
        chain = self.blocks_of(text)
        before = self.wanted()
        effect = self.table.finish(
            admission,
            chain,
            retain_s=retain_s,
            expect_s=None,
            priority=priority,
            final=final,
            compaction=compaction,
            handover=handover,
            now_s=self.now_s,
        )
        wants = {(block.block_id, block.epoch) for block in chain}
        if self.sessions.get(admission.session) is session:
            session.calls.pop(admission.number, None)
            if final:
                del self.sessions[admission.session]
            else:
                superseded = self.model_finish(session, text, wants, retain_s, compaction)
                assert effect.superseded == superseded
        if handover:
            self.handovers.append((text, set(wants), self.now_s + HANDOVER_S))
        self.settle()
        if retain_s is not None and retain_s > MAX_S and not final:
            assert effect.clipped is None or "retention of 500 s" in effect.clipped
        self.changes_are_reported(before, effect.changed)

    def model_finish(
        self,
        session: ModelSession,
        text: str,
        wants: set[tuple[int, int]],
        retain_s: float | None,
        compaction: bool,
    ) -> bool:
        """Supersede by content, else add a lineage in place of the least recently used."""
        compaction, session.compaction = compaction or session.compaction, False
        replaced = [
            each for each in session.lineages if 10 * common(each.text, text) >= 9 * len(each.text)
        ]
        if compaction and session.lineages:
            best = max(session.lineages, key=lambda each: (common(each.text, text), each.used))
            if best not in replaced:
                replaced.append(best)
        for each in replaced:
            session.lineages.remove(each)
        if not replaced and len(session.lineages) == MAX_LINEAGES:
            session.lineages.remove(min(session.lineages, key=lambda each: each.used))
        granted_s = DEFAULT_S if retain_s is None else min(retain_s, MAX_S)
        session.lineages.append(
            ModelLineage(
                text=text,
                wants=set(wants) if granted_s else set(),
                until_s=self.now_s + granted_s,
                retain_s=granted_s,
                used=self.use(),
            )
        )
        return bool(replaced)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        admission, session, _ = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        before = self.wanted()
        effect = self.table.cancel(admission, now_s=self.now_s)
        if self.sessions.get(admission.session) is session:
            session.calls.pop(admission.number, None)
            if session.lineages:
                latest = max(session.lineages, key=lambda each: each.used)
                latest.until_s = max(latest.until_s, self.now_s + latest.retain_s)
        self.settle()
        self.changes_are_reported(before, effect.changed)

    @rule(key=SESSIONS, kind=st.sampled_from(list(Signal)))
    def signal(self, key: str, kind: Signal) -> None:
        before = self.wanted()
        effect = self.table.signal(key, kind, expect_s=None, now_s=self.now_s)
        session = self.sessions.get(key)
        if session is not None:
            if kind is Signal.FINAL:
                del self.sessions[key]
            elif kind is Signal.CANCEL:
                for each in session.lineages:
                    each.wants.clear()
            elif kind is Signal.COMPACTION:
                session.compaction = True
            elif session.lineages:
                latest = max(session.lineages, key=lambda each: each.used)
                if latest.wants:
                    latest.until_s = max(latest.until_s, self.now_s + DEFAULT_S)
        self.settle()
        self.changes_are_reported(before, effect.changed)

    @precondition(lambda self: self.handovers)
    @rule(data=st.data())
    def verified(self, data: st.DataObject) -> None:
        text = data.draw(st.sampled_from([each[0] for each in self.handovers]))
        self.table.handed_over(text.encode(), now_s=self.now_s)
        self.handovers = [each for each in self.handovers if each[0] != text]
        self.settle()

    @rule(seconds=st.sampled_from([0.0, 1.0, 7.0, 30.0, 120.0]))
    def pass_time(self, seconds: float) -> None:
        self.now_s += seconds
        before = self.wanted()
        effect = self.table.expire(self.now_s)
        self.settle()
        self.changes_are_reported(before, effect.changed)

    @rule(block_id=st.integers(0, NUM_BLOCKS - 1))
    def evict(self, block_id: int) -> None:
        self.evict_block(block_id)

    @rule()
    def clear(self) -> None:
        before = self.wanted()
        effect = self.table.clear()
        self.handovers.clear()
        for session in self.sessions.values():
            session.calls.clear()
            for each in session.lineages:
                each.wants.clear()
        self.changes_are_reported(before, effect.changed)

    def wanted(self) -> set[int]:
        """The blocks that the table wants at present."""
        return {b for b in range(NUM_BLOCKS) if self.table.wants(b, self.epoch[b])}

    def changes_are_reported(self, before: set[int], changed: tuple[int, ...]) -> None:
        """Whatever is wanted now and was not, or the reverse, is named in the effect."""
        assert before ^ self.wanted() <= set(changed)

    @invariant()
    def exactly_what_the_rules_want_is_wanted(self) -> None:
        expected = {block_id for wants in self.all_wants() for block_id, _ in wants}
        assert self.wanted() == expected
        assert self.table.stats().wanted_blocks == len(expected)

    @invariant()
    def the_keeper_wants_what_it_keeps(self) -> None:
        board = self.table.board
        for block_id in range(NUM_BLOCKS):
            keeper = self.table.keeper(block_id)
            assert (keeper is not None) == self.table.wants(block_id, self.epoch[block_id])
            if keeper is not None:
                assert block_id in board.wanting[keeper].blocks
                assert keeper in self.table.victims(self.now_s)
                for other in board.wanters(block_id):
                    assert board.wanting[other].blocks.count(block_id) == 1

    @invariant()
    def counts_and_charges_add_up(self) -> None:
        board = self.table.board
        charged: dict[str | None, int] = {}
        for block_id in range(NUM_BLOCKS):
            keeper = self.table.keeper(block_id)
            if keeper is not None and not board.wanting[keeper].handover:
                tenant = board.wanting[keeper].tenant
                charged[tenant] = charged.get(tenant, 0) + 1
        assert board.charged == charged
        assert board.num_charged == sum(charged.values())
        for lineage in board.wanting.values():
            assert lineage.wanted_blocks == sum(block_id >= 0 for block_id in lineage.blocks) > 0

    @invariant()
    def sessions_and_lineages_are_those_of_the_model(self) -> None:
        stats = self.table.stats()
        assert stats.sessions == len(self.sessions)
        assert stats.lineages == sum(len(each.lineages) for each in self.sessions.values())
        assert stats.handovers == len(self.handovers)
        assert stats.known_blocks == sum(
            len(each.text) for session in self.sessions.values() for each in session.lineages
        )


def session_is_fresh(session: ModelSession, now_s: float) -> bool:
    """Lost calls are noticed when a lineage of their session is due, not before."""
    return not any(each.wants and each.until_s <= now_s for each in session.lineages)


class BudgetMachine(LineageMachine):
    """The same events under budgets that bind: then only the bounds are checked."""

    budgets = (0.25, 0.125)

    @invariant()
    def exactly_what_the_rules_want_is_wanted(self) -> None:
        """Clipping makes less wanted than the rules alone."""
        allowed = {block_id for wants in self.all_wants() for block_id, _ in wants}
        assert self.wanted() <= allowed

    @invariant()
    def budgets_hold(self) -> None:
        board = self.table.board
        assert board.num_charged <= NUM_BLOCKS // 4
        for tenant, blocks in board.charged.items():
            assert tenant is None or blocks <= NUM_BLOCKS // 8


TestLineageMachine = LineageMachine.TestCase
TestLineageMachine.settings = MACHINE
TestBudgetMachine = BudgetMachine.TestCase
TestBudgetMachine.settings = MACHINE
