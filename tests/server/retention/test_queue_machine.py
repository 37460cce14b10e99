"""Queue, ledger and table together under a small model of vLLM's block pool.

The model holds reference counts, hashes and the ordinary list; it allocates, frees, hits and
reclassifies as vLLM and the connector do, and after every event compares what it counts with
what the queue says.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import hypothesis.strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.fakes.blocks import Block, StockQueue
from tests.server.retention.support import MACHINE, hashes
from turncache_server.retention.free_queue import FreeQueue
from turncache_server.retention.ledger import Ledger
from turncache_server.retention.lineages import (
    Admission,
    ChainBlock,
    Effect,
    Limits,
    LineageTable,
    Signal,
)
from turncache_server.retention.policy import Cost

NUM_BLOCKS = 24
SESSIONS = st.sampled_from(["r", "s", "t"])
TEXT = st.text(alphabet="ab", min_size=1, max_size=6).map(lambda tail: "sy" + tail)


@dataclass
class Call:
    """A request that is being served; its last block is never full."""

    admission: Admission
    text: str
    blocks: list[int] = field(default_factory=list)


class QueueMachine(RuleBasedStateMachine):
    """Every rule is something that an engine or its extension does."""

    @initialize(in_use=st.integers(0, 6), budget=st.sampled_from([0.25, 1.0]))
    def adopt(self, in_use: int, budget: float) -> None:
        """Take the queue over, with some blocks in use."""
        self.blocks = [Block(block_id) for block_id in range(NUM_BLOCKS)]
        stock = StockQueue(self.blocks)
        stock.popleft()
        self.foreign = [block.block_id for block in stock.popleft_n(in_use)]
        self.ledger = Ledger(NUM_BLOCKS)
        limits = Limits(
            num_blocks=NUM_BLOCKS, retain_budget=budget, tenant_budget=budget, handover_s=15
        )
        self.table = LineageTable(limits, Cost())
        self.queue = FreeQueue.adopt(
            stock, num_blocks=NUM_BLOCKS, ledger=self.ledger, table=self.table
        )
        self.ordinary = list(range(1 + in_use, NUM_BLOCKS))
        self.retained: set[int] = set()
        self.references = [0] * NUM_BLOCKS
        self.hash_of: dict[int, str] = {}
        self.calls: list[Call] = []
        self.now_s = 0.0
        self.ranked: list[int] = []

    # --- what vLLM's pool does ---------------------------------------------------------------

    @property
    def free(self) -> set[int]:
        """All free blocks by the model's count."""
        return {*self.ordinary, *self.retained}

    def is_wanted(self, block_id: int) -> bool:
        """Whether the block would be retained if it were free."""
        epoch = self.ledger.epoch[block_id]
        return self.queue.retaining and self.table.wants(block_id, epoch)

    def pop(self, count: int) -> list[int]:
        """Allocate; checks order, classes and epochs of what comes out."""
        before = list(self.ledger.epoch)
        wanters = {b: self.table.board.wanters(b) for b in self.retained}
        place = {b: self.table.board.index[b] for b in self.retained}
        evicted = self.table.stats().evicted_wanted_blocks_total
        unretained = {b for b in self.ordinary if self.table.wants(b, before[b])}
        popped = [block.block_id for block in self.queue.popleft_n(count)]
        assert len(set(popped)) == count
        from_ordinary = min(count, len(self.ordinary))
        assert popped[:from_ordinary] == self.ordinary[:from_ordinary]
        victims = popped[from_ordinary:]
        assert set(victims) <= self.retained
        self.victims_are_the_least_valuable(victims, wanters, place)
        for block_id in range(NUM_BLOCKS):
            assert (self.ledger.epoch[block_id] > before[block_id]) == (block_id in popped)
        lost = len(victims) + len(unretained & set(popped))
        assert self.table.stats().evicted_wanted_blocks_total == evicted + lost
        self.ordinary = self.ordinary[from_ordinary:]
        self.retained -= set(victims)
        for block_id in popped:
            assert self.references[block_id] == 0
            self.references[block_id] = 1
            self.hash_of.pop(block_id, None)
            self.blocks[block_id].block_hash = None
        return popped

    def victims_are_the_least_valuable(
        self, victims: list[int], wanters: dict[int, list[int]], place: dict[int, int]
    ) -> None:
        """Each victim's best lineage is the worst of those left, and the tail of its blocks."""

        def worth(block_id: int) -> int:
            return max(self.ranked.index(number) for number in wanters[block_id])

        left = set(self.retained)
        for victim in victims:
            left.remove(victim)
            assert all(worth(victim) <= worth(other) for other in left)
            same = [other for other in left if worth(other) == worth(victim)]
            assert all(place[victim] >= place[other] for other in same)

    def release(self, block_ids: list[int]) -> None:
        """Free a request's blocks, tail first, unhashed ones that are not wanted to the front."""
        first: list[int] = []
        last: list[int] = []
        for block_id in reversed(block_ids):
            self.references[block_id] -= 1
            if not self.references[block_id]:
                (last if block_id in self.hash_of else first).append(block_id)
        self.queue.prepend_n([self.blocks[block_id] for block_id in first])
        rests = {block_id for block_id in first if self.is_wanted(block_id)}
        self.retained |= rests
        self.ordinary = [*(b for b in first if b not in rests), *self.ordinary]
        self.queue.append_n([self.blocks[block_id] for block_id in last])
        for block_id in last:
            if self.is_wanted(block_id):
                self.retained.add(block_id)
            else:
                self.ordinary.append(block_id)

    def apply(self, effect: Effect) -> None:
        """Reclassify as the shell does, and follow it in the model."""
        self.queue.reclassify(effect.changed, effect.dead)
        demoted = {b for b in self.retained if not self.is_wanted(b)}
        dead = {b for b in demoted if b in effect.dead or b not in self.hash_of}
        kept = {b for b in self.ordinary if self.is_wanted(b)}
        self.retained = (self.retained - demoted) | kept
        order = [block.block_id for block in self.queue.get_all_free_blocks()]
        front = order[: len(dead)]
        assert set(front) == dead
        others = [b for b in self.ordinary if b not in kept]
        end = len(front) + len(others)
        back = order[end : end + len(demoted) - len(dead)]
        assert set(back) == demoted - dead
        self.ordinary = [*front, *others, *back]
        self.rank()

    def rank(self) -> None:
        """Give the queue the order of victims, as the shell does from time to time."""
        self.ranked = self.table.victims(self.now_s)
        self.queue.rank(self.ranked)

    # --- rules -------------------------------------------------------------------------------

    @rule(session=SESSIONS, text=TEXT)
    def start(self, session: str, text: str) -> None:
        """Admit a call, touch its hits and allocate the rest."""
        hits = []
        holder = {held: block_id for block_id, held in self.hash_of.items()}
        for end in range(1, len(text)):
            if text[:end] not in holder:
                break
            hits.append(holder[text[:end]])
        new = len(text) + 1 - len(hits)
        if new > self.queue.num_free_blocks - sum(not self.references[b] for b in hits):
            return
        admission = self.table.admit(
            session=session, tenant=None, hashes=hashes(text), now_s=self.now_s
        )
        self.apply(self.table.expire(self.now_s))
        for block_id in hits:
            if not self.references[block_id]:
                self.queue.remove(self.blocks[block_id])
                self.retained.discard(block_id)
                if block_id in self.ordinary:
                    self.ordinary.remove(block_id)
            self.references[block_id] += 1
        self.rank()
        blocks = [*hits, *self.pop(new)]
        for end in range(len(hits), len(text)):
            self.hash_of[blocks[end]] = text[: end + 1]
            self.blocks[blocks[end]].block_hash = text[: end + 1].encode()
        self.calls.append(Call(admission, text, blocks))

    @precondition(lambda self: self.calls)
    @rule(
        data=st.data(),
        retain_s=st.sampled_from([None, 0.0, 10.0]),
        final=st.sampled_from([False, False, True]),
        handover=st.sampled_from([False, False, True]),
        freed_before=st.booleans(),
        begun=st.booleans(),
    )
    def finish(
        self,
        *,
        data: st.DataObject,
        retain_s: float | None,
        final: bool,
        handover: bool,
        freed_before: bool,
        begun: bool,
    ) -> None:
        """End a call, with or without a rest in its last block.

        Its blocks are freed before or after the table hears of it.
        """
        call = self.calls.pop(data.draw(st.integers(0, len(self.calls) - 1)))
        chain = [
            ChainBlock(block_id, self.ledger.epoch[block_id], chain_hash)
            for block_id, chain_hash in zip(call.blocks, hashes(call.text), strict=False)
        ]
        last = call.blocks[len(call.text)]
        rest = ChainBlock(last, self.ledger.epoch[last], b"rest of " + call.text.encode())
        if freed_before:
            self.release(call.blocks)
        effect = self.table.finish(
            call.admission,
            chain,
            retain_s=retain_s,
            expect_s=None,
            priority=50,
            final=final,
            compaction=False,
            handover=handover,
            now_s=self.now_s,
            rest=rest if begun else None,
        )
        self.apply(effect)
        if not freed_before:
            self.release(call.blocks)

    @precondition(lambda self: self.calls)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        call = self.calls.pop(data.draw(st.integers(0, len(self.calls) - 1)))
        self.apply(self.table.cancel(call.admission, now_s=self.now_s))
        self.release(call.blocks)

    @precondition(lambda self: self.foreign)
    @rule()
    def free_a_block_from_before_the_adoption(self) -> None:
        block_id = self.foreign.pop()
        self.references[block_id] = 1
        self.release([block_id])

    @rule(seconds=st.sampled_from([1.0, 20.0, 200.0]))
    def pass_time(self, seconds: float) -> None:
        self.now_s += seconds
        self.apply(self.table.expire(self.now_s))

    @rule(session=SESSIONS, kind=st.sampled_from(list(Signal)))
    def signal(self, session: str, kind: Signal) -> None:
        self.apply(self.table.signal(session, kind, expect_s=None, now_s=self.now_s))

    @rule(text=TEXT)
    def verified(self, text: str) -> None:
        self.apply(self.table.handed_over(text.encode(), now_s=self.now_s))

    @rule()
    def switch(self) -> None:
        """Change the mode; the order in which blocks go stays."""
        before = [block.block_id for block in self.queue.get_all_free_blocks()]
        self.queue.retaining = not self.queue.retaining
        if self.queue.retaining:
            self.retained = {b for b in self.ordinary if self.is_wanted(b)}
            self.ordinary = [b for b in self.ordinary if b not in self.retained]
            self.rank()
        else:
            self.ordinary, self.retained = before, set()

    @rule()
    def take_everything(self) -> None:
        """Every counted free block can be had, at any time."""
        self.rank()
        taken = self.pop(self.queue.num_free_blocks)
        assert self.queue.num_free_blocks == 0
        self.release(taken)

    @precondition(lambda self: not self.calls and not self.foreign)
    @rule()
    def reset(self) -> None:
        """Reset the prefix cache, which needs all blocks to be free."""
        self.hash_of.clear()
        for block in self.blocks:
            block.block_hash = None
        self.ledger.reset()
        self.apply(self.table.clear())

    # --- what always holds ---------------------------------------------------------------------

    @invariant()
    def counts_are_exact(self) -> None:
        assert self.queue.num_free_blocks == len(self.free)
        assert self.queue.num_retained == len(self.retained)
        for block_id in range(NUM_BLOCKS):
            assert self.queue.is_free(block_id) == (block_id in self.free)
            assert self.queue.is_retained(block_id) == (block_id in self.retained)

    @invariant()
    def free_blocks_are_walked_once_ordinary_first(self) -> None:
        order = [block.block_id for block in self.queue.get_all_free_blocks()]
        assert order[: len(self.ordinary)] == self.ordinary
        assert sorted(order[len(self.ordinary) :]) == sorted(self.retained)

    @invariant()
    def exactly_the_wanted_free_blocks_are_retained(self) -> None:
        assert self.retained == {b for b in self.free if self.is_wanted(b)}

    @invariant()
    def links_say_where_a_block_is(self) -> None:
        ordinary = set(self.ordinary)
        for block in self.blocks:
            assert (block.next_free_block is not None) == (block.block_id in ordinary)
            assert (block.prev_free_block is not None) == (block.block_id in self.free)

    def teardown(self) -> None:
        """A stock queue gets all of it back."""
        if hasattr(self, "queue"):
            released = self.queue.release_to(StockQueue)
            assert {b.block_id for b in released.get_all_free_blocks()} == self.free


TestQueueMachine = QueueMachine.TestCase
TestQueueMachine.settings = MACHINE
