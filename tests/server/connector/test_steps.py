"""Which blocks a step writes, against a model that keeps whole tables."""

from __future__ import annotations

import os
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from tests.server.connector.pool_fakes import step
from turncache_server.connector.steps import StepTracker


@pytest.mark.parametrize(
    ("start", "count", "writes"),
    [
        (0, 1, [(10, False)]),
        (0, 3, [(10, False)]),
        (0, 4, [(10, True)]),
        (0, 5, [(10, True), (11, False)]),
        (3, 1, [(10, True)]),
        (4, 8, [(11, True), (12, True)]),
        (2, 9, [(10, True), (11, True), (12, False)]),
        (11, 1, [(12, True)]),
    ],
)
def test_a_step_writes_the_blocks_of_its_tokens(
    start: int, count: int, writes: list[tuple[int, bool]]
) -> None:
    """A block is filled by the step that writes its last slot."""
    tracker = StepTracker(4)
    found = tracker.writes(step(new={"r": ([10, 11, 12], start, count)}))
    assert found == [("r", block, fills) for block, fills in writes]


def test_going_on_in_a_block_is_left_out() -> None:
    """Only where a request begins, fills or rewrites a block is there anything to note."""
    tracker = StepTracker(4)
    tracker.writes(step(new={"r": ([10], 0, 1)}))
    assert tracker.writes(step(cached={"r": ([], 1, 2)})) == []
    assert tracker.writes(step(cached={"r": ([], 2, 1)})) == [("r", 10, False)], "written again"
    assert tracker.writes(step(cached={"r": ([], 3, 1)})) == [("r", 10, True)]
    assert tracker.writes(step(cached={"r": ([11], 4, 1)})) == [("r", 11, False)]


def test_an_unknown_request_is_an_error() -> None:
    """A scheduler that works in another way than the tested one is noticed."""
    with pytest.raises(LookupError):
        StepTracker(4).writes(step(cached={"r": ([], 0, 1)}))


def test_a_table_that_is_too_short_is_an_error() -> None:
    """Blocks that were never announced are noticed."""
    tracker = StepTracker(4)
    tracker.writes(step(new={"r": ([10], 0, 4)}))
    with pytest.raises(LookupError):
        tracker.writes(step(cached={"r": ([], 4, 1)}))


def test_users_of_a_block() -> None:
    """All requests that have the block in their table, shared prefixes included."""
    tracker = StepTracker(4)
    tracker.writes(step(new={"a": ([1, 2], 0, 8), "b": ([1, 3], 4, 4), "c": ([4], 0, 1)}))
    assert tracker.users({1}) == {"a", "b"}
    assert tracker.users({3, 4}) == {"b", "c"}
    assert tracker.users(set()) == set()
    tracker.writes(step(finished=["a"]))
    assert tracker.users({1, 2}) == {"b"}


class TrackerMachine(RuleBasedStateMachine):
    """Requests start, go on, are preempted, resumed and ended, several in one step."""

    def __init__(self) -> None:
        super().__init__()
        self.tracker = StepTracker(4)
        self.next_block = 0
        self.tables: dict[str, list[int]] = {}
        self.computed: dict[str, int] = {}
        self.begun: dict[str, int] = {}
        self.preempted: set[str] = set()
        self.ended: set[str] = set()
        self.started = 0

    def _blocks(self, request_id: str, count: int) -> list[int]:
        """Allocate until ``count`` more tokens fit."""
        table = self.tables.setdefault(request_id, [])
        new: list[int] = []
        while (len(table) + len(new)) * 4 < self.computed[request_id] + count:
            new.append(self.next_block)
            self.next_block += 1
        table += new
        return new

    @rule(data=st.data(), starts=st.integers(0, 2), finish_some=st.booleans())
    def schedule(self, data: st.DataObject, starts: int, finish_some: bool) -> None:
        """One step over any of the live requests."""
        new: dict[str, Any] = {}
        cached: dict[str, Any] = {}
        resumed: list[str] = []
        before = dict(self.computed)
        live = [r for r in self.tables if r not in self.ended]
        for _ in range(starts):
            request_id = f"r{self.started}"
            self.started += 1
            hit = data.draw(st.integers(0, 2)) * 4
            count = data.draw(st.integers(1, 12))
            before[request_id] = self.computed[request_id] = hit
            new[request_id] = (self._blocks(request_id, count), hit, count)
        for request_id in data.draw(st.sets(st.sampled_from(live)) if live else st.just(set())):
            count = data.draw(st.integers(1, 12))
            if request_id in self.preempted:
                self.preempted.discard(request_id)
                self.tables[request_id] = []
                before[request_id] = self.computed[request_id] = 0
                resumed.append(request_id)
            cached[request_id] = (
                self._blocks(request_id, count),
                self.computed[request_id],
                count,
            )
        finished = set(self.ended) if finish_some else set()
        self._take(new, cached, before, resumed, finished)
        if finish_some:
            for request_id in self.ended:
                del self.tables[request_id], self.computed[request_id]
            self.ended.clear()
            assert len(self.tracker) == len(self.tables), "ended requests are forgotten"

    @rule(data=st.data(), num_steps=st.integers(1, 12))
    def decode(self, data: st.DataObject, num_steps: int) -> None:
        """The same requests write a token each; one may do so again, or have blocks ahead."""
        row = [r for r in self.tables if r not in self.ended and r not in self.preempted]
        for _ in range(num_steps if row else 0):
            before = dict(self.computed)
            ahead, back = data.draw(st.tuples(st.integers(0, 40), st.integers(0, 40)))
            if back < len(row) and before[row[back]] > 1:
                before[row[back]] -= 1
                self.computed[row[back]] -= 1
                self.begun.pop(row[back], None)
            cached = {
                r: (self._blocks(r, 1 + 4 * (at == ahead)), before[r], 1)
                for at, r in enumerate(row)
            }
            self._take({}, cached, before, [], set())

    def _take(
        self,
        new: dict[str, Any],
        cached: dict[str, Any],
        before: dict[str, int],
        resumed: list[str],
        finished: set[str],
    ) -> None:
        """Let the tracker see a step, and hold what it finds against the whole tables."""
        found = self.tracker.writes(step(new, cached, resumed, finished))
        expected = set()
        for request_id, (_, _, count) in {**new, **cached}.items():
            start = before[request_id]
            for position in range(start, start + count):
                block = self.tables[request_id][position // 4]
                last = (position // 4 + 1) * 4 <= start + count
                if last or self.begun.get(request_id) != block:
                    expected.add((request_id, block, last))
            self.begun[request_id] = self.tables[request_id][(start + count - 1) // 4]
            self.computed[request_id] = start + count
        assert set(found) == expected
        assert len(found) == len(expected), "each block once"

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), end=st.booleans())
    def leave(self, data: st.DataObject, end: bool) -> None:
        """A request is preempted, or ends."""
        request_id = data.draw(st.sampled_from(sorted(self.tables)))
        if end:
            self.preempted.discard(request_id)
            self.ended.add(request_id)
        elif request_id not in self.ended:
            self.preempted.add(request_id)


TrackerMachine.TestCase.settings = settings(
    max_examples=int(os.environ.get("TURNCACHE_TEST_EXAMPLES", "25")),
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
TestTracker = TrackerMachine.TestCase
