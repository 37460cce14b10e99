"""Epochs and written marks."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.server.retention.support import MACHINE
from turncache_server.retention.ledger import MAX_STEPS_IN_FLIGHT, Ledger


def test_a_block_is_marked_when_the_step_that_fills_it_has_been_processed() -> None:
    """Scheduling a step marks nothing, processing it marks what it has filled."""
    ledger = Ledger(4)
    ledger.schedule([("r", 1, True), ("r", 2, False)])
    assert [ledger.readable_epoch(i) for i in (1, 2)] == [None, None]
    ledger.processed()
    assert [ledger.readable_epoch(i) for i in (1, 2)] == [ledger.epoch[1], None]


def test_a_marked_block_that_will_be_written_again_gets_a_new_epoch_before_the_step() -> None:
    """A reader that has seen the mark finds another epoch when it verifies."""
    ledger = Ledger(4)
    ledger.schedule([("r", 1, True)])
    ledger.processed()
    seen = ledger.readable_epoch(1)
    ledger.schedule([("r", 1, True)])
    assert seen is not None
    assert ledger.epoch[1] > seen
    assert ledger.readable_epoch(1) is None
    ledger.processed()
    assert ledger.readable_epoch(1) == ledger.epoch[1]


def test_a_second_write_before_the_first_is_processed_keeps_the_first_from_marking() -> None:
    """With two steps in flight the mark never rises under a write that is still to run."""
    ledger = Ledger(4)
    ledger.schedule([("r", 1, True)])
    ledger.schedule([("r", 1, False)])
    ledger.processed()
    assert ledger.readable_epoch(1) is None
    ledger.processed()
    assert ledger.readable_epoch(1) is None


def test_a_step_marks_nothing_for_requests_whose_loads_failed() -> None:
    """What was computed on invalid input is never named to a peer."""
    ledger = Ledger(4)
    ledger.schedule([("bad", 1, True), ("good", 2, True)])
    ledger.processed(failed={"bad"})
    assert ledger.readable_epoch(1) is None
    assert ledger.readable_epoch(2) is not None


def test_a_pulled_block_is_marked_with_the_next_scheduled_step() -> None:
    """A pull that is announced while a step is in flight waits for one more step."""
    ledger = Ledger(4)
    ledger.schedule([])
    ledger.loaded([3])
    ledger.processed()
    assert ledger.readable_epoch(3) is None
    ledger.schedule([])
    ledger.processed()
    assert ledger.readable_epoch(3) == ledger.epoch[3]


def test_a_pulled_block_that_moved_on_is_not_marked() -> None:
    """The epoch of the announcement counts, not the one of the next step."""
    ledger = Ledger(4)
    ledger.loaded([3])
    ledger.last_epoch += 1
    ledger.epoch[3] = ledger.last_epoch  # handed out
    ledger.schedule([])
    ledger.processed()
    assert ledger.readable_epoch(3) is None


def test_a_pull_into_a_marked_block_ends_its_epoch() -> None:
    """The content that was named to peers is gone."""
    ledger = Ledger(4)
    ledger.schedule([("r", 1, True)])
    ledger.processed()
    seen = ledger.readable_epoch(1)
    ledger.loaded([1])
    assert ledger.epoch[1] != seen


def test_a_processed_step_without_a_note_ends_the_order_for_ever() -> None:
    """The engine is no source any more, whatever was marked before."""
    ledger = Ledger(4)
    ledger.schedule([("r", 1, True)])
    ledger.processed()
    ledger.processed()
    assert not ledger.in_order
    assert ledger.readable_epoch(1) is None
    ledger.schedule([("r", 2, True)])
    ledger.processed()
    assert not ledger.in_order
    assert ledger.readable_epoch(2) is None


def test_steps_that_are_never_processed_end_the_order() -> None:
    """The notes are bounded."""
    ledger = Ledger(1)
    for _ in range(MAX_STEPS_IN_FLIGHT):
        ledger.schedule([])
    assert ledger.in_order
    ledger.schedule([])
    assert not ledger.in_order


@pytest.mark.parametrize("processed_before", [True, False], ids=["marked", "in flight"])
def test_a_reset_unmarks_everything(processed_before: bool) -> None:
    """Steps in flight at the reset mark nothing, and the lists stay the same objects."""
    ledger = Ledger(2)
    lists = ledger.epoch, ledger.written
    ledger.schedule([("r", 1, True)])
    if processed_before:
        ledger.processed()
    before = list(ledger.epoch)
    ledger.reset()
    if not processed_before:
        ledger.processed()
    assert ledger.readable_epoch(1) is None
    assert all(new > old for new, old in zip(ledger.epoch, before, strict=True))
    assert (ledger.epoch, ledger.written) == lists
    assert ledger.epoch is lists[0]


NUM_BLOCKS = 5
BLOCK = st.integers(0, NUM_BLOCKS - 1)


class LedgerMachine(RuleBasedStateMachine):
    """Steps are scheduled, run and processed in order, several in flight, as an engine does.

    The model writes a new number into a block's content when a step that writes it *runs*,
    which is at any moment between its scheduling and its processing.
    """

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger(NUM_BLOCKS)
        self.content = [0] * NUM_BLOCKS
        self.complete = [False] * NUM_BLOCKS
        self.writes = 0
        self.to_run: list[list[tuple[str, int, bool]]] = []
        self.to_process = 0
        # Content that a reader saw in a marked block, by block and epoch.
        self.seen: dict[tuple[int, int], int] = {}
        self.highest = [0] * NUM_BLOCKS

    @rule(
        writes=st.lists(
            st.tuples(st.sampled_from("ab"), BLOCK, st.booleans()),
            max_size=4,
            unique_by=lambda each: each[1],
        )
    )
    def schedule(self, writes: list[tuple[str, int, bool]]) -> None:
        self.ledger.schedule(writes)
        self.to_run.append(writes)
        self.to_process += 1

    @precondition(lambda self: self.to_run)
    @rule()
    def run_step(self) -> None:
        for _, block_id, fills in self.to_run.pop(0):
            self.writes += 1
            self.content[block_id] = self.writes
            self.complete[block_id] = fills

    @precondition(lambda self: self.to_process > len(self.to_run))
    @rule(failed=st.sets(st.sampled_from("ab")))
    def process(self, failed: set[str]) -> None:
        self.to_process -= 1
        self.ledger.processed(failed=failed)

    @rule(blocks=st.sets(BLOCK))
    def hand_out(self, blocks: set[int]) -> None:
        self.ledger.last_epoch += 1
        for block_id in blocks:
            self.ledger.epoch[block_id] = self.ledger.last_epoch
            # The new owner has written nothing yet.
            self.complete[block_id] = False

    @rule(block_id=BLOCK)
    def pull(self, block_id: int) -> None:
        """A pull goes into a block that was handed out for it."""
        self.hand_out({block_id})
        if not any(write[1] == block_id for step in self.to_run for write in step):
            self.writes += 1
            self.content[block_id] = self.writes
            self.complete[block_id] = True
            self.ledger.loaded([block_id])

    @rule()
    def reset(self) -> None:
        self.ledger.reset()

    @invariant()
    def content_never_changes_within_an_epoch(self) -> None:
        for block_id in range(NUM_BLOCKS):
            epoch = self.ledger.readable_epoch(block_id)
            if epoch is not None:
                content = self.seen.setdefault((block_id, epoch), self.content[block_id])
                assert content == self.content[block_id]

    @invariant()
    def a_marked_block_is_complete(self) -> None:
        for block_id in range(NUM_BLOCKS):
            if self.ledger.readable_epoch(block_id) is not None:
                assert self.complete[block_id]

    @invariant()
    def what_a_reader_saw_is_there_while_the_epoch_is(self) -> None:
        for (block_id, epoch), content in self.seen.items():
            if self.ledger.epoch[block_id] == epoch:
                assert self.content[block_id] == content

    @invariant()
    def epochs_never_fall(self) -> None:
        assert self.ledger.in_order
        for block_id, epoch in enumerate(self.ledger.epoch):
            assert epoch >= self.highest[block_id]
            self.highest[block_id] = epoch


TestLedgerMachine = LedgerMachine.TestCase
TestLedgerMachine.settings = MACHINE
