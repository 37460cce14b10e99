"""The extension's hooks over a fake pool: retention, records, modes, and harmless failure."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from tests.server.connector.pool_fakes import (
    BLOCK_SIZE,
    FakeBlock,
    FakePool,
    FakeQueue,
    facts,
    hash_of,
    request,
    step,
)
from turncache.protocol import Mode, Reason
from turncache_server.connector.config import Settings
from turncache_server.connector.extension import Extension
from turncache_server.connector.orders import MOST_PER_STEP
from turncache_server.connector.service import Service
from turncache_server.control.messages import (
    Call,
    CallReply,
    Hello,
    HelloReply,
    ModeReply,
    Peek,
    PeekReply,
    Refusal,
    Sessions,
    SessionsReply,
    SetDraining,
    SetMode,
    Signal,
    SignalReply,
    Stats,
    StatsReply,
    Verify,
    VerifyReply,
)
from turncache_server.retention.free_queue import FreeQueue
from turncache_server.retention.mailbox import HandedOver, SwitchMode

NUM_BLOCKS = 32
#: Blocks of a call behind its complete ones: that of its prompt's last token.
REST = 1


class Desk:
    """An extension bound to a fake pool, with a clock of the test's, and a little scheduler."""

    def __init__(self, *, pool_type: type[FakePool] = FakePool, **settings: Any) -> None:
        base: dict[str, Any] = {
            "trust_hints": True,
            "retain_budget": 1.0,
            "tenant_budget": 1.0,
            "policy": "deadline",
        }
        self.now_s = 1000.0
        self.extension = Extension(
            facts(**{"num_blocks": NUM_BLOCKS, **settings.pop("facts", {})}),
            Settings(**{**base, **settings}),
            answered=frozenset({"answered"}),
            clock=lambda: self.now_s,
        )
        self.pool = pool_type(NUM_BLOCKS, True, BLOCK_SIZE)
        self.extension.bind(self.pool)
        self.service = Service(self.extension, fingerprint={"vllm": "0.32.0"})

    def admit(self, call: Any, local_blocks: int = 0) -> list[FakeBlock]:
        """Let a request in: local hit, allocation, one step over its whole prompt."""
        held = [
            block
            for chain_hash in call.block_hashes[:local_blocks]
            if (block := self.pool.first_with(chain_hash)) is not None
        ]
        self.extension.looked_at(call, local_blocks * BLOCK_SIZE)
        self.pool.touch(held)
        blocks = held + self.pool.get_new_blocks(len(call.block_hashes) + 1 - local_blocks)
        self.extension.admitted(call, None)
        tokens = call.num_prompt_tokens - local_blocks * BLOCK_SIZE
        ids = [block.block_id for block in blocks]
        for block, chain_hash in zip(blocks, call.block_hashes, strict=False):
            if block.block_hash is None:
                self.pool.hash_block(block, chain_hash)
        self.extension.step_scheduled(
            step(new={call.request_id: (ids, local_blocks * BLOCK_SIZE, tokens)})
        )
        call.num_computed_tokens = call.num_prompt_tokens
        return blocks

    def answer(self, call: Any, blocks: list[FakeBlock], status: str = "answered") -> None:
        """End a request."""
        self.extension.step_processed()
        call.status = status
        self.extension.finished(call, [block.block_id for block in blocks])
        self.pool.free_blocks(reversed(blocks))

    def call(self, request_id: str = "r1", *, local_blocks: int = 0, **kwargs: Any) -> list[int]:
        """Serve a whole call, and return the blocks of its complete chain."""
        served = request(request_id, **kwargs)
        self.extension.arrived(served)
        blocks = self.admit(served, local_blocks)
        self.answer(served, blocks)
        return [block.block_id for block in blocks[: len(served.block_hashes)]]

    def flood(self, count: int) -> list[int]:
        """Pass ordinary blocks through the pool; returns those that were handed out."""
        blocks = self.pool.get_new_blocks(count)
        for block in blocks:
            self.pool.hash_block(block, hash_of(1000 + block.block_id))
        self.pool.free_blocks(blocks)
        return [block.block_id for block in blocks]

    def record(self, request_id: str = "call-1") -> CallReply:
        """Ask the control socket what became of a call."""
        reply = self.service(Call(request=request_id))
        assert isinstance(reply, CallReply)
        return reply

    def switch(self, mode: str) -> None:
        """Switch the mode as the control thread does, and let the engine thread step."""
        seen = self.service(SetMode())
        assert isinstance(seen, ModeReply)
        assert isinstance(self.service(SetMode(mode=mode, ticket=seen.ticket)), ModeReply)
        self.extension.step_scheduled(step())
        self.extension.step_processed()


@pytest.fixture
def desk() -> Desk:
    """An acting extension."""
    return Desk()


# --- retention -------------------------------------------------------------------------------


def test_a_session_survives_a_flood(desk: Desk) -> None:
    """The blocks of a call that is expected back are handed out last."""
    kept = desk.call(num_blocks=4)
    for _ in range(5):
        assert not set(desk.flood(NUM_BLOCKS - 6)) & set(kept)
    gauges = desk.extension.gauges()
    assert (gauges["retained_blocks"], gauges["sessions"]) == (4 + REST, 1)


def test_retained_blocks_can_always_be_had(desk: Desk) -> None:
    """Both classes count as free: an engine that needs every block gets every block."""
    kept = desk.call(num_blocks=4)
    assert desk.pool.get_num_free_blocks() == NUM_BLOCKS - 1
    assert set(desk.flood(NUM_BLOCKS - 1)) >= set(kept)
    assert desk.extension.counters()["evicted_wanted_blocks"] == 4 + REST


def test_time_makes_a_session_ordinary_again(desk: Desk) -> None:
    """After its retention a session is what it would be without us: the latest one used."""
    kept = desk.call(num_blocks=4, retain_s=10)
    desk.now_s += 11
    desk.extension.step_scheduled(step())
    desk.extension.step_processed()
    assert desk.extension.gauges()["retained_blocks"] == 0
    assert desk.flood(NUM_BLOCKS - 1)[-4:] == kept[::-1]


@pytest.mark.parametrize("status", ["aborted", "errored"])
def test_a_call_without_an_answer_keeps_nothing_new(status: str, desk: Desk) -> None:
    """Its blocks are ordinary; what the session had stays."""
    kept = desk.call("r1", num_blocks=2)
    call = request("r2", num_blocks=4)
    desk.extension.arrived(call)
    desk.answer(call, desk.admit(call, local_blocks=2), status=status)
    assert desk.extension.gauges()["retained_blocks"] == len(kept) + REST
    assert desk.extension.gauges()["calls_in_flight"] == 0


def test_an_incomplete_tail_is_no_part_of_the_chain(desk: Desk) -> None:
    """Nor is a block whose last slot holds no KV, whoever hashed it: it is kept as a rest."""
    call = request(num_blocks=3)
    desk.extension.arrived(call)
    blocks = desk.admit(call)
    call.num_computed_tokens = 3 * BLOCK_SIZE - 1
    desk.answer(call, blocks)
    assert desk.extension.table.known_blocks("s", call.block_hashes) == 2
    (rest,) = desk.extension.rests.after(hash_of(1))
    assert (rest.block_id, rest.num_tokens) == (blocks[2].block_id, BLOCK_SIZE - 1)
    assert desk.extension.rests.after(hash_of(2)) == ()
    assert desk.extension.gauges()["retained_blocks"] == 2 + REST


def test_a_reset_of_the_prefix_cache_ends_retention(desk: Desk) -> None:
    """What was wanted has no content any more; junk must not be kept from the engine."""
    desk.call(num_blocks=4)
    desk.pool.reset_prefix_cache()
    desk.extension.step_scheduled(step())
    assert desk.extension.gauges()["retained_blocks"] == 0


def test_a_reset_of_an_idle_engine_is_over_before_the_next_call(desk: Desk) -> None:
    """The call's session stays in flight: it has arrived after the reset."""
    desk.call(num_blocks=2)
    desk.pool.reset_prefix_cache()
    call = request("r2", num_blocks=4)
    desk.extension.arrived(call)
    desk.admit(call)
    assert [each.in_flight for each in desk.extension.table.kept(desk.now_s)] == [True]


def test_an_ordinary_request_leaves_no_trace(desk: Desk) -> None:
    """Without a session nothing is admitted, kept or recorded."""
    desk.call(session=None)
    assert desk.extension.gauges()["sessions"] == 0
    assert desk.extension.counters().get("calls", 0) == 0


def test_a_session_that_vllm_read_itself_counts(desk: Desk) -> None:
    """A client that only sends the header is served too, with the retention it asks for."""
    call = request(session=None)
    call.session_id = "from-the-header"
    call.sampling_params.extra_args = {"tc_retain_s": 7}
    hints = desk.extension.arrived(call)
    assert hints is not None
    assert (hints.session, hints.retain_s) == ("from-the-header", 7.0)


def test_a_request_without_sampling_parameters_is_ordinary(desk: Desk) -> None:
    """An embedding request has pooling parameters instead."""
    call = request()
    call.sampling_params = None
    assert desk.extension.arrived(call) is None
    assert desk.extension.broken is None


# --- records ---------------------------------------------------------------------------------


def test_a_first_call_is_a_new_session(desk: Desk) -> None:
    """Everything is computed and nothing is lost."""
    desk.call(num_blocks=3, request="call-1")
    assert desk.record() == CallReply(
        found=True, done=True, prompt=13, computed=13, reason="new_session"
    )


def test_reused_tokens_are_local(desk: Desk) -> None:
    """The next call of the session finds its history."""
    desk.call("r1", num_blocks=3)
    desk.call("r2", num_blocks=5, local_blocks=3, request="call-1")
    record = desk.record()
    assert (record.local, record.computed, record.lost, record.reason) == (12, 9, 0, "ok")


def test_what_was_known_and_is_computed_again_is_lost(desk: Desk) -> None:
    """The number that should be 0, with its reason."""
    desk.call("r1", num_blocks=4)
    desk.call("r2", num_blocks=5, local_blocks=1, request="call-1")
    record = desk.record()
    assert (record.local, record.lost, record.reason) == (4, 12, "evicted")


def test_an_edited_history_diverges_at_a_token(desk: Desk) -> None:
    """What follows the edit was never known; the place is said."""
    desk.call("r1", num_blocks=4)
    edited = request("r2", num_blocks=4, request="call-1")
    edited.block_hashes[2:] = [hash_of(70), hash_of(71)]
    desk.extension.arrived(edited)
    desk.answer(edited, desk.admit(edited, local_blocks=2))
    record = desk.record()
    assert (record.local, record.lost, record.reason, record.at) == (8, 0, "diverged", 8)


def test_the_record_is_there_from_admission_on(desk: Desk) -> None:
    """The router asks before the call has ended."""
    call = request(request="call-1")
    desk.extension.arrived(call)
    assert not desk.record().found
    desk.admit(call)
    assert (desk.record().found, desk.record().done) == (True, False)


def test_a_preempted_call_is_counted_once(desk: Desk) -> None:
    """Its record is that of its first admission: the counts must add up to one prompt."""
    desk.call("r1", num_blocks=4)
    call = request("r2", num_blocks=5, request="call-1")
    desk.extension.arrived(call)
    blocks = desk.admit(call, local_blocks=4)
    desk.pool.free_blocks(reversed(blocks))
    call.num_preemptions = 1
    pulled: Any = SimpleNamespace(returned_tokens=20, known_blocks=5, reason=None, pull_s=1.0)
    desk.extension.looked_at(call, 0)
    desk.extension.admitted(call, pulled)
    desk.extension.finished(call, [])
    record = desk.record()
    assert (record.prompt, record.local, record.returned, record.computed) == (21, 16, 0, 5)


@pytest.mark.parametrize(
    ("named", "found", "reason"),
    [
        pytest.param(True, 0, "source_gone", id="of a source that was named"),
        pytest.param(True, 4, "source_gone", id="nothing lost"),
        pytest.param(False, 0, "source_gone", id="of one that was looked for"),
        pytest.param(False, 4, "ok", id="looked for, and nothing lost"),
    ],
)
def test_a_refused_pull_is_the_reason_of_a_loss(
    named: bool, found: int, reason: str, desk: Desk
) -> None:
    """The client sees why nothing came back; of what may be nowhere only when it is missed."""
    desk.call("r1", num_blocks=4)
    call = request("r2", num_blocks=4, request="call-1")
    desk.extension.arrived(call)
    desk.extension.refused_pull("r2", Reason.SOURCE_GONE, named=named)
    desk.answer(call, desk.admit(call, found))
    assert desk.record().reason == reason


def test_a_call_that_leaves_before_it_was_let_in_counts_nowhere(desk: Desk) -> None:
    """Nothing of its prompt was computed: clients that give up in a queue lose no tokens."""
    desk.call("r1", num_blocks=4)
    before = desk.extension.counters()
    gone = request("r2", num_blocks=6, request="call-1")
    desk.extension.arrived(gone)
    desk.extension.looked_at(gone, 0)
    gone.status = "aborted"
    desk.extension.finished(gone, [])
    assert desk.extension.counters() == before
    assert not desk.record().found
    assert desk.extension.idle
    assert desk.extension.broken is None


# --- source ----------------------------------------------------------------------------------


def ask(desk: Desk, num_blocks: int = 4, first: int = 0) -> PeekReply:
    """Peek as a peer does."""
    hashes = [hash_of(first + i) for i in range(num_blocks)]
    reply = desk.service(Peek(session="s", hashes=hashes))
    assert isinstance(reply, PeekReply)
    return reply


def check(desk: Desk, reply: PeekReply) -> int:
    """Verify as a peer does."""
    answer = desk.service(
        Verify(
            start_id=reply.start_id,
            generation=reply.generation,
            block_ids=reply.block_ids,
            epochs=reply.epochs,
            hashes=[hash_of(i) for i in range(len(reply.block_ids))],
        )
    )
    assert isinstance(answer, VerifyReply)
    return answer.valid


def test_an_engine_names_what_its_steps_have_written(desk: Desk) -> None:
    """From the moment the step was processed, not from the moment it was scheduled."""
    call = request(num_blocks=4)
    desk.extension.arrived(call)
    blocks = desk.admit(call)
    assert ask(desk).block_ids == []
    desk.answer(call, blocks)
    reply = ask(desk)
    assert reply.block_ids == [block.block_id for block in blocks[:4]]
    assert check(desk, reply) == 4


def test_a_step_with_a_failed_load_marks_nothing_for_its_request(desk: Desk) -> None:
    """It computed on input that never came."""
    call, other = request("r1", num_blocks=2), request("r2", num_blocks=2, first=20)
    desk.extension.arrived(call)
    desk.extension.arrived(other)
    first = desk.admit(call)
    desk.extension.loads_failed({"r1"})
    desk.answer(call, first)
    assert ask(desk, 2).block_ids == []
    desk.answer(other, desk.admit(other))
    assert len(ask(desk, 2, first=20).block_ids) == 2


def test_a_step_on_blocks_that_a_sibling_failed_to_load_marks_nothing(desk: Desk) -> None:
    """Everybody who has such a block in the table computed on garbage, and computes again."""
    call = request("r1", num_blocks=3)
    desk.extension.arrived(call)
    blocks = desk.admit(call)
    desk.extension.blocks_invalid({blocks[0].block_id})
    desk.answer(call, blocks)
    assert ask(desk).block_ids == []


def test_pulled_blocks_are_named_after_one_further_step(desk: Desk) -> None:
    """The worker may still be rearranging what it received."""
    blocks = desk.pool.get_new_blocks(2)
    for i, block in enumerate(blocks):
        desk.pool.hash_block(block, hash_of(i))
    desk.extension.blocks_loaded([block.block_id for block in blocks])
    assert ask(desk).block_ids == []
    desk.extension.step_scheduled(step())
    assert ask(desk).block_ids == []
    desk.extension.step_processed()
    assert len(ask(desk).block_ids) == 2


def test_an_engine_whose_steps_come_back_out_of_order_is_no_source(
    desk: Desk, caplog: pytest.LogCaptureFixture
) -> None:
    """A step that is processed without having been scheduled ends it, with one line."""
    desk.call(num_blocks=4)
    assert len(ask(desk).block_ids) == 4
    for _ in range(3):
        desk.extension.step_processed()
    assert ask(desk).block_ids == []
    lines = [r for r in caplog.records if "out of order" in r.getMessage()]
    assert len(lines) == 1
    assert desk.extension.broken is None, "retention goes on"


def test_an_engine_with_a_sibling_that_loads_synchronously_is_no_source(
    desk: Desk, caplog: pytest.LogCaptureFixture
) -> None:
    """Such a sibling writes cached blocks outside of the steps; said once, retention goes on."""
    desk.call(num_blocks=4)
    for _ in range(2):
        desk.extension.step_scheduled(step(sync_loads=True))
        desk.extension.step_processed()
    assert ask(desk).block_ids == []
    assert len([r for r in caplog.records if "synchronously" in r.getMessage()]) == 1
    assert desk.extension.broken is None
    assert desk.extension.gauges()["retained_blocks"] == 4 + REST


# --- modes -----------------------------------------------------------------------------------


def test_off_and_on_at_run_time(desk: Desk) -> None:
    """Off gives everything back and is no source; on starts anew, without a restart."""
    desk.call(num_blocks=4)
    desk.switch("off")
    gauges = desk.extension.gauges()
    assert (gauges["retained_blocks"], desk.extension.acting) == (0, False)
    assert ask(desk).block_ids == []
    desk.call("r2", num_blocks=3, first=20, request="call-1")
    assert desk.record().reason == "disabled"
    assert desk.extension.gauges()["retained_blocks"] == 0
    desk.switch("on")
    assert len(ask(desk, 3, first=20).block_ids) == 3, "marks are kept in every mode"
    desk.call("r3", num_blocks=3, first=20)
    assert desk.extension.gauges()["retained_blocks"] == 3 + REST


def test_an_idle_engine_that_is_switched_off_is_no_source_at_once(desk: Desk) -> None:
    """It obeys with its next call, but nobody is given anything until then."""
    desk.call(num_blocks=4)
    reply = ask(desk)
    seen = desk.service(SetMode())
    assert isinstance(seen, ModeReply)
    desk.service(SetMode(mode="off", ticket=seen.ticket))
    assert ask(desk).block_ids == []
    assert check(desk, reply) == 0


def test_observe_counts_and_touches_nothing() -> None:
    """Blocks go as in a stock engine, and what was lost is known."""
    desk = Desk(mode=Mode.OBSERVE)
    kept = desk.call("r1", num_blocks=4)
    assert desk.extension.gauges()["retained_blocks"] == 0
    assert set(desk.flood(NUM_BLOCKS - 1)) >= set(kept)
    desk.call("r2", num_blocks=4, request="call-1")
    assert (desk.record().lost, desk.record().reason) == (16, "evicted")
    assert ask(desk).block_ids == []


def test_a_mode_that_is_switched_while_blocks_are_chosen(desk: Desk) -> None:
    """The mailbox is drained before the choice: the engine gets its blocks all the same."""
    kept = desk.call(num_blocks=4)
    heard: list[Mode] = []
    desk.extension.when_mode_changes(heard.append)
    desk.extension.mailbox.post(SwitchMode("off"))
    assert len(desk.flood(NUM_BLOCKS - 1)) == NUM_BLOCKS - 1
    assert heard == [Mode.OFF]
    assert set(kept) <= {b.block_id for b in desk.pool.free_block_queue.get_all_free_blocks()}


def test_modes_over_the_control_socket(desk: Desk) -> None:
    """An empty question only asks, an unknown word is refused with the legal ones."""
    seen = desk.service(SetMode())
    assert isinstance(seen, ModeReply)
    assert (seen.mode, seen.why) == ("on", "")
    changed = desk.service(SetMode(mode="observe", ticket=seen.ticket))
    assert isinstance(changed, ModeReply)
    assert changed.mode == "observe"
    assert desk.service(SetMode()) == changed
    refusal = desk.service(SetMode(mode="auto"))
    assert isinstance(refusal, Refusal)
    assert "'auto': expected one of off, observe, on" in refusal.why


def test_an_announced_return_outlives_an_unannounced_one() -> None:
    """Under the cost policy whoever says that it comes soon is kept instead of who is silent."""
    desk = Desk(policy="cost", retain_budget=1.0, tenant_budget=1.0)
    soon = desk.call("soon", session="soon", num_blocks=4)
    silent = desk.call("silent", session="silent", num_blocks=4, first=100)
    told = desk.service(Signal(session="soon", kind="wait", expect_s=2.0))
    assert told == SignalReply(accepted=True)
    desk.extension.step_scheduled(step())
    desk.extension.step_processed()
    taken = set(desk.flood(NUM_BLOCKS - 1 - 4))
    assert taken.isdisjoint(soon)
    assert taken >= set(silent)


def test_a_signal_is_answered_with_what_became_of_it(desk: Desk) -> None:
    """Accepted, clipped to what, or refused and why; an unknown kind is an error."""
    assert desk.service(Signal(session="nobody", kind="final")) == SignalReply(
        accepted=False, why="no call of this session is remembered"
    )
    desk.call("r1", session="s")
    clipped = desk.service(Signal(session="s", kind="wait", expect_s=1e6))
    assert clipped == SignalReply(accepted=True, clipped_s=3600.0)
    refusal = desk.service(Signal(session="s", kind="nap"))
    assert isinstance(refusal, Refusal)
    assert "'nap': expected one of wait, resume, final" in refusal.why
    desk.service(SetMode(mode="off"))
    assert desk.service(Signal(session="s", kind="wait")) == SignalReply(
        accepted=False, why="mode off"
    )


def test_a_final_signal_lets_everything_go(desk: Desk) -> None:
    """An agent whose run has ended without a last call keeps nothing."""
    kept = desk.call("r1", session="s")
    desk.service(Signal(session="s", kind="final"))
    assert set(desk.flood(NUM_BLOCKS - 1)) >= set(kept)
    assert desk.extension.gauges()["retained_blocks"] == 0


def test_a_change_of_mode_that_arrives_twice_changes_nothing(desk: Desk) -> None:
    """A recorded or delayed message finds its ticket used, by itself or by a later change."""
    seen = desk.service(SetMode())
    assert isinstance(seen, ModeReply)
    off = SetMode(mode="off", ticket=seen.ticket)
    changed = desk.service(off)
    assert isinstance(changed, ModeReply)
    desk.service(SetMode(mode="on", ticket=changed.ticket))
    again = desk.service(off)
    assert isinstance(again, Refusal)
    assert again.code == "stale"
    assert desk.extension.requested_mode is Mode.ON


def test_a_change_of_mode_is_good_for_one_start_of_the_engine(desk: Desk) -> None:
    """What was meant for the process before does not switch the one that came after."""
    before = Service(desk.extension, fingerprint={})
    seen = before(SetMode())
    assert isinstance(seen, ModeReply)
    late = desk.service(SetMode(mode="off", ticket=seen.ticket))
    assert isinstance(late, Refusal)
    assert late.code == "stale"
    assert desk.extension.requested_mode is Mode.ON


def test_other_parts_are_counted_with_the_extension(desk: Desk) -> None:
    """What the control socket has dropped is seen wherever the extension's totals are."""
    desk.extension.count_also(lambda: {"control_dropped_version": 3.0})
    assert desk.extension.counters()["control_dropped_version"] == 3.0


def test_a_full_mailbox_is_said(desk: Desk) -> None:
    """An engine that never steps cannot hear; the operator learns it."""
    while desk.extension.mailbox.post(SwitchMode("on")):
        pass
    reply = desk.service(SetMode(mode="off"))
    assert isinstance(reply, ModeReply)
    assert (reply.mode, "mailbox is full" in reply.why) == ("on", True)


def test_a_full_mailbox_is_obeyed_in_slices_and_in_order() -> None:
    """The first call of an idle engine does not wait for all of it, and nothing is lost."""
    desk = Desk(retain_default_s=2000)
    for number in range(10):
        desk.call(f"r{number}", num_blocks=1, session=f"s{number}", first=10 * number)
    while desk.service(Signal(session="s9", kind="wait", expect_s=1.0)).accepted:  # type: ignore[union-attr]
        pass
    full = len(desk.extension.mailbox)
    desk.extension.mailbox.commands.pop()
    # Behind all of it: what is obeyed last stands.
    desk.service(Signal(session="s0", kind="final"))
    assert full > 10 * MOST_PER_STEP
    obeyed = 0
    while desk.extension.mailbox.commands:
        before = len(desk.extension.mailbox)
        assert desk.extension.table.knows("s0")
        desk.extension.step_scheduled(step())
        desk.flood(2)
        desk.extension.step_processed()
        obeyed = before - len(desk.extension.mailbox)
        assert 0 < obeyed <= MOST_PER_STEP
    assert not desk.extension.table.knows("s0")
    assert desk.extension.table.knows("s9")


def test_a_switch_of_the_mode_waits_for_no_backlog() -> None:
    """It is obeyed in the step that finds it, after all that was posted before it."""
    desk = Desk()
    desk.call("r0", session="s", num_blocks=2)
    for _ in range(3 * MOST_PER_STEP):
        desk.service(Signal(session="s", kind="wait", expect_s=1.0))
    asked = desk.service(SetMode())
    assert isinstance(asked, ModeReply)
    desk.service(SetMode(mode="off", ticket=asked.ticket))
    assert len(desk.extension.mailbox) > 3 * MOST_PER_STEP
    desk.extension.step_scheduled(step())
    assert not desk.extension.acting


def test_a_call_hears_what_was_said_of_its_session_before() -> None:
    """Its session has ended and opens anew, however much is waiting in the mailbox."""
    desk = Desk()
    desk.call("r0", session="s", num_blocks=2)
    desk.call("r1", session="t", num_blocks=2, first=50)
    for _ in range(3 * MOST_PER_STEP):
        desk.service(Signal(session="t", kind="wait", expect_s=1.0))
    desk.service(Signal(session="s", kind="final"))
    desk.service(Signal(session="t", kind="wait", expect_s=7.0))
    desk.call("r2", session="s", num_blocks=3, request="call-1")
    assert desk.record().reason == "new_session"
    for _ in range(5):
        desk.extension.step_scheduled(step())
        desk.extension.step_processed()
    assert not desk.extension.mailbox.commands
    assert {each.key for each in desk.extension.kept_sessions()} == {"s", "t"}


# --- harmless failure ------------------------------------------------------------------------


def spoil_arrived(desk: Desk) -> Any:
    """Admit a request without a member that is read."""
    call = request("bad")
    del call.sampling_params
    return desk.extension.arrived(call)


def spoil_looked_at(desk: Desk) -> Any:
    """Look at a request without a member that is read."""
    desk.extension.arrived(request("bad"))
    return desk.extension.looked_at(SimpleNamespace(request_id="bad"), 0)


def spoil_admitted(desk: Desk) -> Any:
    """Likewise."""
    desk.extension.arrived(request("bad"))
    return desk.extension.admitted(SimpleNamespace(request_id="bad"), None)


def spoil_step_scheduled(desk: Desk) -> Any:
    """Schedule a request that was never announced."""
    return desk.extension.step_scheduled(step(cached={"unknown": ([], 0, 1)}))


def spoil_loads_failed(desk: Desk) -> Any:
    """Report something that is no set."""
    failed: Any = None
    return desk.extension.loads_failed(failed)


def spoil_blocks_loaded(desk: Desk) -> Any:
    """Announce a block beyond the pool."""
    return desk.extension.blocks_loaded([10**6])


def spoil_step_processed(desk: Desk) -> Any:
    """Process a step with a table that is gone."""
    desk.extension.ledger.schedule([("r", 1, True)])
    desk.extension.ledger.written = []
    return desk.extension.step_processed()


def spoil_finished(desk: Desk) -> Any:
    """End a call without its hashes."""
    call = request("bad")
    desk.extension.arrived(call)
    call.status, call.block_hashes, call.num_computed_tokens = "answered", None, 16
    return desk.extension.finished(call, [1, 2, 3])


def spoil_before_choice(desk: Desk) -> Any:
    """Choose blocks with a command in the mailbox that nobody understands."""
    desk.extension.mailbox.post(SwitchMode("sideways"))
    return desk.flood(NUM_BLOCKS - 1) and None


SPOILERS: list[Callable[[Desk], Any]] = [
    spoil_arrived,
    spoil_looked_at,
    spoil_admitted,
    spoil_step_scheduled,
    spoil_loads_failed,
    spoil_blocks_loaded,
    spoil_step_processed,
    spoil_finished,
    spoil_before_choice,
]


@pytest.mark.parametrize("spoil", SPOILERS, ids=lambda f: f.__name__.removeprefix("spoil_"))
def test_a_hook_that_fails_gives_the_engine_back(
    spoil: Callable[[Desk], Any], caplog: pytest.LogCaptureFixture
) -> None:
    """It switches the extension off once, the stock queue is back, and the engine goes on."""
    caplog.set_level(logging.ERROR)
    desk = Desk()
    desk.call(num_blocks=4)
    heard: list[Mode] = []
    desk.extension.when_mode_changes(heard.append)
    assert spoil(desk) is None, "nothing reaches vLLM"
    assert desk.extension.broken is not None
    assert type(desk.pool.free_block_queue) is FakeQueue
    assert desk.pool.get_num_free_blocks() == NUM_BLOCKS - 1, "every block is back"
    assert heard == [Mode.OFF]
    for other in SPOILERS:
        assert other(desk) is None
    assert len(desk.flood(NUM_BLOCKS - 1)) == NUM_BLOCKS - 1
    lines = [r for r in caplog.records if "the engine runs as stock" in r.getMessage()]
    assert len(lines) == 1
    assert ask(desk).block_ids == []
    reply = desk.service(SetMode(mode="on"))
    assert isinstance(reply, ModeReply)
    assert (reply.mode, reply.why, reply.pulls) == ("off", desk.extension.broken, False)
    hello = desk.service(Hello())
    assert isinstance(hello, HelloReply)
    assert (hello.mode, hello.missing) == ("off", [desk.extension.broken])


def test_an_unsupported_engine_stays_stock() -> None:
    """Nothing is replaced, and the reason is told to whoever asks."""
    why = "speculative decoding: rejected drafts rewrite blocks"
    desk = Desk(facts={"unsupported": (why,)})
    assert type(desk.pool.free_block_queue) is FakeQueue
    assert ask(desk) == PeekReply(start_id="", generation=0, block_ids=[], epochs=[])
    assert check(desk, ask(desk)) == 0
    hello = desk.service(Hello())
    assert isinstance(hello, HelloReply)
    assert hello.missing == [f"unsupported: {why}"]


def test_a_surprise_of_the_self_test_leaves_the_engine_stock() -> None:
    """Never half on."""

    class Renamed(FakePool):
        touch = None  # type: ignore[assignment]  # a vLLM that has renamed it

    desk = Desk(pool_type=Renamed)
    assert desk.extension.broken == "the self-test found: Renamed has no touch"
    assert type(desk.pool.free_block_queue) is FakeQueue


def test_a_pool_of_another_size_leaves_the_engine_stock() -> None:
    """The real queue is looked at before anything is taken from it."""
    desk = Desk(facts={"num_blocks": NUM_BLOCKS - 1})
    assert desk.extension.broken is not None
    assert "cannot be taken over" in desk.extension.broken
    assert type(desk.pool.free_block_queue) is FakeQueue
    assert desk.pool.get_num_free_blocks() == NUM_BLOCKS - 1


# --- service ---------------------------------------------------------------------------------


def test_hello_says_what_a_peer_needs(desk: Desk) -> None:
    """Identity, generation, fingerprint and what an operator would want to switch on."""
    desk = Desk(facts={"missing": ("tool parser off",)})
    service = Service(desk.extension, fingerprint={"a": "b"}, endpoint=("127.0.0.1", 5600))
    reply = service(Hello())
    assert isinstance(reply, HelloReply)
    assert desk.extension.source is not None
    assert reply.start_id == desk.extension.source.start_id
    assert (reply.engine_id, reply.side, reply.mode) == ("single-0", "single", "on")
    assert (reply.nixl_host, reply.nixl_port) == ("127.0.0.1", 5600)
    assert (reply.fingerprint, reply.missing) == ({"a": "b"}, ["tool parser off"])
    desk.pool.reset_prefix_cache()
    again = service(Hello())
    assert isinstance(again, HelloReply)
    assert again.generation == reply.generation + 1


def test_stats_are_numbers(desk: Desk) -> None:
    """Counters and gauges of extension and pulls in one answer."""
    desk.call()
    service = Service(desk.extension, fingerprint={}, more_stats=lambda: {"pulled_blocks": 7.0})
    reply = service(Stats())
    assert isinstance(reply, StatsReply)
    assert (reply.counters["calls"], reply.counters["pulled_blocks"]) == (1.0, 7.0)
    assert reply.gauges["blocks"] == NUM_BLOCKS
    assert isinstance(desk.pool.free_block_queue, FreeQueue)


# --- draining -----------------------------------------------------------------------------------


def listed(desk: Desk, limit: int = 10) -> SessionsReply:
    """Ask for the sessions."""
    reply = desk.service(Sessions(limit=limit))
    assert isinstance(reply, SessionsReply)
    return reply


def test_sessions_that_are_kept_or_served_are_listed_by_digest(desk: Desk) -> None:
    """The largest first, with when they are expected; one that nothing is kept for is not."""
    desk.call("r1", session="small", num_blocks=2)
    desk.call("r2", session="large", num_blocks=5, first=100, retain_s=60.0, expect_s=20.0)
    desk.call("r3", session="nothing", num_blocks=3, first=200, retain_s=0.0)
    desk.now_s += 5
    seen = listed(desk)
    assert (seen.num_sessions, seen.num_calls, seen.num_handovers) == (2, 0, 0)
    assert [(row.kept_blocks, row.state) for row in seen.rows] == [
        (5 + REST, "waiting"),
        (2 + REST, "waiting"),
    ]
    assert (seen.rows[0].expected_s, seen.rows[0].kept_s) == (15.0, 55.0)
    assert seen.rows[0].session == hashlib.blake2b(b"large", digest_size=6).hexdigest()
    assert len(listed(desk, limit=1).rows) == 1
    asked = desk.service(Sessions(limit=1, session=seen.rows[1].session))
    assert isinstance(asked, SessionsReply)
    assert ([row.kept_blocks for row in asked.rows], asked.num_sessions) == ([2 + REST], 2)
    desk.extension.arrived(request("r4", session="large", num_blocks=5, first=100))
    seen = listed(desk)
    assert (seen.rows[0].state, seen.rows[0].kept_s, seen.num_calls) == ("serving", None, 1)


def test_a_session_that_was_taken_over_or_expired_is_left_no_longer(desk: Desk) -> None:
    """By what the router signals, and by time: then nothing keeps a drain waiting."""
    desk.call("r1", session="taken", num_blocks=2)
    desk.call("r2", session="idle", num_blocks=2, first=100, retain_s=30.0)
    desk.service(Signal(session="taken", kind="final"))
    desk.extension.step_scheduled(step())
    desk.extension.step_processed()
    assert listed(desk).num_sessions == 1
    desk.now_s += 31
    desk.extension.step_scheduled(step())
    desk.extension.step_processed()
    assert listed(desk).num_sessions == 0


def test_an_idle_engine_that_obeys_later_is_said_to_be_empty(desk: Desk) -> None:
    """Without a call it does not step: what it was told and what is due counts as done."""
    desk.call("r1", session="taken", num_blocks=2)
    desk.call("r2", session="idle", num_blocks=2, first=100, retain_s=30.0)
    desk.service(Signal(session="taken", kind="final"))
    assert listed(desk).num_sessions == 1
    desk.now_s += 31
    assert listed(desk).num_sessions == 0


def test_an_idle_engine_hears_of_every_session_that_leaves_it(desk: Desk) -> None:
    """While it is drained others take from it and it steps no more: its mailbox must have room."""
    for number in range(10):
        desk.call(f"r{number}", session=f"s{number}", num_blocks=2, first=10 * number)
    for number in range(2000):
        hashes = [hash_of(10 * (number % 10) + place) for place in range(2)]
        seen = desk.service(Peek(session="s", hashes=hashes))
        assert isinstance(seen, PeekReply)
        answer = desk.service(
            Verify(
                start_id=seen.start_id,
                generation=seen.generation,
                block_ids=seen.block_ids,
                epochs=seen.epochs,
                hashes=hashes,
            )
        )
        assert isinstance(answer, VerifyReply)
        assert answer.valid == 2
    for number in range(10):
        reply = desk.service(Signal(session=f"s{number}", kind="final"))
        assert isinstance(reply, SignalReply)
        assert reply.accepted, reply.why
    assert listed(desk).num_sessions == 0


def test_a_prompt_that_was_verified_or_is_due_is_left_no_longer(desk: Desk) -> None:
    """Of an idle engine too; and others stay."""
    for number, first in enumerate((0, 100, 200)):
        desk.call(f"r{number}", num_blocks=3, first=first, handover=True, retain_s=0.0)
        desk.now_s += 1
    assert listed(desk).num_handovers == 3
    desk.extension.mailbox.post(HandedOver(hash_of(102)))
    assert listed(desk).num_handovers == 2
    desk.now_s += desk.extension.settings.handover_s - 2
    assert listed(desk).num_handovers == 1


def test_draining_is_told_to_routers_until_the_engine_ends(desk: Desk) -> None:
    """With a ticket, as a mode; it changes nothing of what the engine does."""
    seen = desk.service(SetMode())
    assert isinstance(seen, ModeReply)
    assert not seen.draining
    drains = desk.service(SetDraining(draining=True, ticket=seen.ticket))
    assert isinstance(drains, ModeReply)
    assert (drains.draining, drains.mode, drains.pulls) == (True, "on", True)
    assert listed(desk).draining
    late = desk.service(SetDraining(draining=False, ticket=seen.ticket))
    assert isinstance(late, Refusal)
    assert late.code == "stale"
    again = desk.service(SetDraining(draining=False, ticket=drains.ticket))
    assert isinstance(again, ModeReply)
    assert not again.draining
