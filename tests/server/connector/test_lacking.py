"""Calls that wait for their prompt to be prefilled again: whom they peek at, and until when."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.server.connector.peer_fakes import (
    FakeBlock,
    FakePeers,
    FakeRequest,
    compatible,
    holds,
)
from turncache.errors import EngineFault
from turncache.protocol import EngineHints, Reason
from turncache_server.connector.costs import PullCosts
from turncache_server.connector.lacking import (
    GREETING_S,
    MAX_LOCAL_BLOCKS,
    MAX_WAIT_S,
    PEEK_EVERY_S,
    UNHEARD_S,
    LackingCalls,
    Patience,
    patience_of,
)
from turncache_server.connector.peers import PeerState
from turncache_server.connector.pull import PEEK_WAIT_S, PEER_REST_S, PullBook

SIZE = 4
HASHES = [bytes([i]) * 4 for i in range(6)]
R, CALL = "r1", "call-1"
PATIENCE = Patience(call=CALL, wait_s=30.0, above_tokens=0, prompt_tokens=6 * SIZE + 1)


class Desk:
    """A pull book of a decode engine whose call has a router that repeats prefill legs."""

    def __init__(self) -> None:
        self.peers = FakePeers()
        self.lacking = LackingCalls()
        self.book = PullBook(
            self.peers,  # type: ignore[arg-type]  # stands for PeerBook
            block_size=SIZE,
            threshold_tokens=0,
            timeout_s=5.0,
            costs=PullCosts(),
            lacking=self.lacking,
        )
        self.now_s = 100.0

    def start(self, request_id: str = R) -> Reason | None:
        patience = replace(PATIENCE, call=CALL if request_id == R else request_id)
        return self.book.start(request_id, "s", "decode-0", HASHES, self.now_s, patience=patience)

    def answer(self, reply: Any) -> None:
        future = self.peers.peeks[-1][2]
        if isinstance(reply, BaseException):
            future.set_exception(reply)
        else:
            future.set_result(reply)

    def look(self, request_id: str = R) -> int | None:
        return self.book.look(request_id, 0, self.now_s)

    def lack(self) -> None:
        """Go from arrival to a wait."""
        assert self.start() is None
        self.answer(holds(0, known=6))
        assert self.look() is None
        assert self.lacking.requests() == [CALL]


@pytest.fixture
def desk() -> Desk:
    """A desk with one compatible peer."""
    return Desk()


def test_a_call_is_named_until_somebody_says_who_has_computed_it(desk: Desk) -> None:
    """Then it is peeked at, once, and no look before asks anything."""
    desk.lack()
    for _ in range(3):
        assert desk.look() is None
    assert len(desk.peers.peeks) == 1
    desk.lacking.repeated(CALL, "decode-0")
    assert desk.lacking.requests() == []
    assert desk.look() is None
    assert len(desk.peers.peeks) == 2
    desk.answer(holds(6))
    assert desk.look() == 6 * SIZE
    assert len(desk.lacking) == 0


def test_the_wait_is_no_part_of_the_pull(desk: Desk) -> None:
    """Its deadline begins with the peek after the repeat."""
    desk.lack()
    desk.now_s += 20.0
    desk.lacking.repeated(CALL, "decode-0")
    assert desk.look() is None
    desk.now_s += PEEK_WAIT_S / 2
    assert desk.look() is None, "the peek is under way"
    desk.answer(holds(6))
    assert desk.look() == 6 * SIZE


def test_a_source_that_is_not_ready_is_tried_for_a_moment(desk: Desk) -> None:
    """It has just answered the router: a failed peek or a hello that is due passes."""
    desk.lack()
    desk.lacking.repeated(CALL, "decode-0")
    assert desk.look() is None
    desk.answer(holds(6, start_id="start-2"))
    assert desk.look() is None
    assert desk.peers.hurried == 1
    desk.peers.records["decode-0"] = compatible(start_id="start-2")
    assert desk.look() is None
    assert len(desk.peers.peeks) == 2, "not at every look"
    desk.now_s += PEEK_EVERY_S
    assert desk.look() is None
    desk.answer(holds(6, start_id="start-2"))
    assert desk.look() == 6 * SIZE


def test_a_source_that_does_not_get_ready_is_the_routers_matter_again(desk: Desk) -> None:
    """While it rests nothing is asked of it; then the call is named again."""
    desk.lack()
    desk.lacking.repeated(CALL, "decode-0")
    assert desk.look() is None
    desk.answer(EngineFault("decode-0", "no answer"))
    assert desk.look() is None
    desk.now_s += PEER_REST_S / 2
    assert desk.look() is None
    assert len(desk.peers.peeks) == 2
    assert desk.lacking.requests() == []
    desk.now_s += GREETING_S
    assert desk.look() is None
    assert desk.lacking.requests() == [CALL]


@pytest.mark.parametrize("state", [PeerState.GONE, PeerState.UNSEEN])
def test_a_source_that_is_gone_at_arrival_may_be_replaced(state: PeerState, desk: Desk) -> None:
    """The router has others; when nobody says so in time, the call computes."""
    desk.peers.become("decode-0", state=state)
    assert desk.start() is None
    assert not desk.peers.peeks
    assert desk.look() is None
    assert desk.look() is None
    assert (desk.lacking.requests(), desk.peers.hurried) == ([], 1)
    desk.now_s += UNHEARD_S
    assert desk.look() is None
    assert desk.lacking.requests() == [CALL]
    desk.now_s += PATIENCE.wait_s
    assert desk.look() == 0
    pull = desk.book.get(R)
    assert pull is not None
    assert pull.reason is Reason.SOURCE_GONE
    assert desk.lacking.ends["timeout"] == 1


def test_a_source_that_came_back_is_read_from_as_any_other(desk: Desk) -> None:
    """What was refused for want of a source was no attempt: one more is left for a preemption."""
    desk.peers.become("decode-0", state=PeerState.GONE)
    assert desk.start() is None
    assert desk.look() is None
    desk.peers.become("decode-0", state=PeerState.COMPATIBLE)
    desk.lacking.repeated(CALL, "decode-0")
    assert desk.look() is None
    desk.answer(holds(6))
    assert desk.look() == 6 * SIZE
    blocks = [FakeBlock(i) for i in range(6)]
    desk.book.allocated(FakeRequest(R), blocks, 6 * SIZE, object(), desk.now_s)
    (read,) = desk.book.take_reads()
    assert read.attempt == 1


def test_a_prompt_that_is_lost_once_more_is_named_once_more(desk: Desk) -> None:
    """A source that has answered is not asked again by itself."""
    desk.lack()
    desk.lacking.repeated(CALL, "decode-0")
    assert desk.look() is None
    desk.answer(holds(0, known=6))
    assert desk.look() is None
    assert desk.lacking.requests() == [CALL]
    desk.now_s += PEEK_EVERY_S
    assert desk.look() is None
    assert len(desk.peers.peeks) == 2


SILENT = EngineFault("decode-0", "no answer")


def test_a_source_that_has_not_answered_is_asked_once_more(desk: Desk) -> None:
    """The prompt is there, and nobody is told that it is lost."""
    assert desk.start() is None
    desk.answer(SILENT)
    assert desk.look() is None
    assert desk.lacking.requests() == []
    assert desk.look() is None
    assert len(desk.peers.peeks) == 2
    desk.answer(holds(6))
    assert desk.look() == 6 * SIZE
    assert (desk.lacking.ends["there"], desk.lacking.ends["again"]) == (1, 0)
    assert desk.start("next") is None
    assert len(desk.peers.peeks) == 3, "it does not rest any longer"


def test_a_source_that_answers_then_that_it_has_lost_the_prompt_is_believed(desk: Desk) -> None:
    """The call is named at once."""
    assert desk.start() is None
    desk.answer(SILENT)
    desk.look()
    desk.look()
    desk.answer(holds(0, known=6))
    assert desk.look() is None
    assert desk.lacking.requests() == [CALL]


@pytest.mark.parametrize("hangs", [False, True])
def test_a_source_that_stays_silent_has_lost_the_prompt(hangs: bool, desk: Desk) -> None:
    """After half a second, whether it refuses each question or lets them hang."""
    assert desk.start() is None
    desk.answer(SILENT)
    began_s = desk.now_s
    while not desk.lacking.requests():
        num_peeks = len(desk.peers.peeks)
        assert desk.look() is None
        if len(desk.peers.peeks) > num_peeks and not hangs:
            desk.answer(SILENT)
        desk.now_s += 0.01
        assert desk.now_s < began_s + UNHEARD_S + 0.05
    assert desk.now_s >= began_s + UNHEARD_S
    assert len(desk.peers.peeks) == (2 if hangs else 3)


def test_of_those_who_wait_for_a_silent_source_one_asks(desk: Desk) -> None:
    """A source that is gone keeps no threads; when it answers, everybody asks."""
    assert desk.start() is None
    desk.answer(SILENT)
    desk.look()
    names = ["a", "b", "c"]
    for name in names:
        assert desk.start(name) is None
        assert desk.look(name) is None
    for name in (R, *names):
        assert desk.look(name) is None
    assert len(desk.peers.peeks) == 2
    desk.answer(holds(6))
    assert desk.look() == 6 * SIZE
    for name in names:
        assert desk.look(name) is None
        desk.answer(holds(6))
        assert desk.look(name) == 6 * SIZE
    assert desk.lacking.ends["there"] == 4


def test_a_source_whose_reads_fail_rests_though_it_answers(desk: Desk) -> None:
    """What it holds may not arrive: its answer to a peek says nothing of that."""
    assert desk.start() is None
    desk.answer(holds(6))
    assert desk.look() == 6 * SIZE
    assert desk.start("peeks") is None
    late = desk.peers.peeks[-1][2]
    blocks = [FakeBlock(i) for i in range(6)]
    desk.book.allocated(FakeRequest(R), blocks, 6 * SIZE, object(), desk.now_s)
    desk.book.take_reads()
    desk.book.completed({R}, {R}, object(), desk.now_s)
    late.set_result(holds(6))
    assert desk.look("peeks") == 0
    pull = desk.book.get("peeks")
    assert pull is not None
    assert pull.reason is Reason.SOURCE_GONE


def test_an_incompatible_source_is_not_asked_again(desk: Desk) -> None:
    """It would change nothing: the call is named at once."""
    assert desk.start() is None
    desk.peers.become("decode-0", state=PeerState.INCOMPATIBLE)
    desk.answer(SILENT)
    assert desk.look() is None
    assert desk.lacking.requests() == [CALL]


def test_the_time_runs_on_over_several_repeats(desk: Desk) -> None:
    """A prompt that is lost again and again does not keep its call for ever."""
    desk.lack()
    for _ in range(3):
        desk.now_s += PATIENCE.wait_s / 3
        desk.lacking.repeated(CALL, "decode-0")
        if desk.look() == 0:
            break
        desk.answer(holds(0, known=6))
        assert desk.look() is None
    assert desk.look() == 0
    assert desk.lacking.ends["timeout"] == 1


def test_a_repeat_that_was_there_in_time_is_looked_for_however_late(desk: Desk) -> None:
    """While nothing is scheduled nobody looks; what prefill holds by then is not computed."""
    desk.lack()
    desk.lacking.repeated(CALL, "decode-0")
    desk.now_s += 2 * PATIENCE.wait_s
    assert desk.look() is None
    desk.answer(holds(6, known=6))
    assert desk.look() == 6 * SIZE
    assert desk.lacking.ends["timeout"] == 0


def test_what_the_lookups_of_those_who_wait_may_cost_is_bounded() -> None:
    """Decode looks up what it has of each in every step; one call alone may always wait."""
    waits = LackingCalls()
    much = MAX_LOCAL_BLOCKS - 1
    assert waits.begin("a", PATIENCE, 0.0, heard=True, local_blocks=2 * MAX_LOCAL_BLOCKS)
    waits.end("a", "left")
    assert waits.begin("b", PATIENCE, 0.0, heard=True, local_blocks=much)
    assert waits.begin("c", PATIENCE, 0.0, heard=True, local_blocks=1)
    assert not waits.begin("d", PATIENCE, 0.0, heard=True, local_blocks=1)
    assert waits.ends["full"] == 1


def test_an_offer_is_what_a_trusted_router_says() -> None:
    """Of a client, or of a router without an id for the call, nobody waits."""
    hints = EngineHints(session="s", source="prefill-0", request="r", repeat_s=1e6, repeat_above=7)
    assert patience_of(hints, 50) == Patience(
        call="r", wait_s=MAX_WAIT_S, above_tokens=7, prompt_tokens=50
    )
    read = EngineHints.from_xargs(hints.to_xargs(), trusted=False)
    assert read is not None
    assert patience_of(read, 50) is None
    for missing in ({"source": None}, {"request": None}, {"repeat_s": None}, {"repeat_s": 0.0}):
        other = {"session": "s", "source": "p", "request": "r", "repeat_s": 1.0} | missing
        assert patience_of(EngineHints(**other), 50) is None  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("have", "above", "threshold", "worth"),
    [(0, 0, 0, True), (20, 0, 0, True), (24, 0, 0, False), (0, 25, 0, False), (0, 24, 0, True),
     (0, 0, 25, False), (8, 0, 16, True), (9, 0, 16, False)],
)  # fmt: skip
def test_what_is_worth_a_wait(have: int, above: int, threshold: int, worth: bool) -> None:
    """What a repeat brings must be worth a pull, and what lacks more than decode may compute."""
    patience = Patience(call=CALL, wait_s=1.0, above_tokens=above, prompt_tokens=25)
    assert patience.is_worth_it(have_tokens=have, all_tokens=24, threshold_tokens=threshold) is (
        worth
    )
