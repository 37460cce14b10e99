"""A source is looked for: who is asked, who is waited for, and what ends without one."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any, cast

import pytest

from tests.fakes.directory import SlowDirectory
from tests.server.connector.peer_fakes import FakeBlock, FakePeers, FakeRequest, compatible, holds
from turncache.errors import EngineFault
from turncache.protocol import Reason
from turncache_server.connector.costs import PullCosts
from turncache_server.connector.finding import MAX_CANDIDATES, AllPeers, Directory, Finder
from turncache_server.connector.peers import PeerBook, PeerState
from turncache_server.connector.pull import (
    GRACE_S,
    PEEK_AGE_S,
    PEEK_WAIT_S,
    PEER_REST_S,
    PullBook,
)
from turncache_server.connector.pull_state import PullState

SIZE = 4
HASHES = [bytes([i]) * 4 for i in range(6)]
R = "r1"
NAMES = ("decode-0", "decode-1", "decode-2")


class Desk:
    """A pull book with three peers and a directory."""

    def __init__(self, directory: Directory | None = None) -> None:
        self.peers = FakePeers({name: compatible(name, engine_id=name) for name in NAMES})
        self.directory = SlowDirectory()
        book = cast(PeerBook, self.peers)
        self.book = PullBook(
            book,
            block_size=SIZE,
            threshold_tokens=0,
            timeout_s=5.0,
            costs=PullCosts(),
            finder=Finder(directory or self.directory, book),
        )
        self.now_s = 100.0

    def search(self, hashes: list[bytes] | None = None) -> Reason | None:
        return self.book.search(R, "s", HASHES if hashes is None else hashes, self.now_s)

    def look(self, local_blocks: int = 0) -> int | None:
        return self.book.look(R, local_blocks * SIZE, self.now_s)

    def answer(self, number: int, reply: Any) -> None:
        """Have the candidate that was asked as such answer."""
        future = self.peers.peeks[number][2]
        if isinstance(reply, BaseException):
            future.set_exception(reply)
        else:
            future.set_result(reply)

    @property
    def pull(self) -> Any:
        pull = self.book.get(R)
        assert pull is not None
        return pull


@pytest.fixture
def desk() -> Desk:
    """A pull book with three peers and a directory."""
    return Desk()


def test_the_candidate_that_holds_most_is_read_from(desk: Desk) -> None:
    """All are asked at once; of equals the one that was named first."""
    assert desk.search() is None
    assert desk.look() is None
    assert desk.pull.state is PullState.FINDING
    desk.directory.answer(["decode-2", "decode-0", "decode-1", "decode-0"])
    assert desk.look() is None
    assert len(desk.peers.peeks) == 3
    for number, blocks in enumerate((2, 5, 5)):
        desk.answer(number, holds(blocks, known=6))
    assert desk.look(1) == 4 * SIZE
    assert desk.pull.peer.name == "decode-0"
    blocks = [FakeBlock(i) for i in range(5)]
    desk.book.allocated(FakeRequest(R), blocks, 4 * SIZE, object(), desk.now_s)
    (read,) = desk.book.take_reads()
    assert (read.engine_id, len(read.remote_blocks)) == ("decode-0", 4)
    assert desk.book.finds == {"found": 1, "nothing": 0, "failed": 0}


def test_one_that_does_not_answer_holds_nobody_up(desk: Desk) -> None:
    """Once somebody holds something the others have a moment; who fails then rests."""
    desk.search()
    desk.directory.answer(["decode-0", "decode-1"])
    desk.peers.peeks[0][2].set_running_or_notify_cancel()  # its thread waits for the answer
    desk.answer(1, holds(3))
    assert desk.look() is None
    desk.now_s += 2 * GRACE_S
    assert desk.look() == 3 * SIZE
    assert desk.pull.peer.name == "decode-1"
    desk.answer(0, EngineFault("decode-0", "no answer"))
    assert desk.book.start("r2", "s", "decode-0", HASHES, desk.now_s) is Reason.SOURCE_GONE
    desk.now_s += PEER_REST_S
    assert desk.book.start("r3", "s", "decode-0", HASHES, desk.now_s) is None


def test_while_nobody_holds_anything_all_are_waited_for(desk: Desk) -> None:
    """But not for ever."""
    desk.search()
    desk.directory.answer(["decode-0", "decode-1"])
    desk.answer(0, holds(0, known=4))
    assert desk.look() is None
    desk.now_s += PEEK_WAIT_S / 2
    assert desk.look() is None
    desk.now_s += PEEK_WAIT_S / 2
    assert desk.look() == 0
    assert desk.pull.reason is Reason.EVICTED
    assert desk.book.finds["nothing"] == 1


@pytest.mark.parametrize("late", ["directory", "peers"])
def test_nobody_is_waited_for_for_long(late: str, desk: Desk) -> None:
    """From the first look on; then the call is computed, and what comes later is for nobody."""
    desk.search()
    if late == "peers":
        desk.directory.answer(NAMES)
    assert desk.look() is None
    desk.now_s += PEEK_WAIT_S
    assert desk.look() == 0
    expected = Reason.SOURCE_UNKNOWN if late == "directory" else Reason.TIMEOUT
    assert desk.pull.reason is expected
    assert desk.book.finds["failed"] == 1
    asked = len(desk.peers.peeks)
    if late == "directory":
        desk.directory.answer(NAMES)
    assert len(desk.peers.peeks) == asked
    assert all(future.cancelled() for _, _, future in desk.peers.peeks)
    assert desk.look() == 0


@pytest.mark.parametrize(
    ("answer", "reason", "counted"),
    [
        ([], None, "nothing"),
        (["stranger", ""], Reason.SOURCE_UNKNOWN, "failed"),
        (EngineFault("redis", "no answer"), Reason.SOURCE_UNKNOWN, "failed"),
        (ZeroDivisionError(), Reason.SOURCE_UNKNOWN, "failed"),
        (["decode-1"], Reason.SOURCE_GONE, "failed"),
        (["decode-2"], Reason.INCOMPATIBLE, "failed"),
    ],
)
def test_without_a_candidate_the_call_is_computed(
    answer: Any, reason: Reason | None, counted: str, desk: Desk
) -> None:
    """With the reason, where there is one: a session that nobody knows is no failure."""
    desk.peers.become("decode-1", state=PeerState.GONE)
    desk.peers.become("decode-2", state=PeerState.INCOMPATIBLE)
    desk.search()
    desk.directory.answer(answer)
    assert desk.look() == 0
    assert desk.look() == 0
    assert desk.pull.reason is reason
    assert desk.peers.peeks == []
    assert desk.book.finds[counted] == sum(desk.book.finds.values()) == 1


def test_a_candidate_that_has_just_failed_is_not_waited_for(desk: Desk) -> None:
    """It rests."""
    desk.book.start("r0", "s", "decode-0", HASHES, desk.now_s)
    desk.answer(0, EngineFault("decode-0", "no answer"))
    desk.book.look("r0", 0, desk.now_s)
    desk.search()
    desk.directory.answer(["decode-0"])
    assert desk.look() == 0
    assert desk.pull.reason is Reason.SOURCE_GONE


def test_a_candidate_that_rests_is_not_asked(desk: Desk) -> None:
    """Its questions would hold up the threads that verify what others have sent."""
    desk.book.start("r0", "s", "decode-0", HASHES, desk.now_s)
    desk.answer(0, EngineFault("decode-0", "no answer"))
    desk.book.look("r0", 0, desk.now_s)
    desk.search()
    desk.directory.answer(NAMES)
    found = desk.pull.found.result(timeout=0)
    assert [ask.peer.name for ask in found.asks] == ["decode-1", "decode-2"]


def test_a_failure_that_is_heard_late_is_an_old_one(desk: Desk) -> None:
    """Whoever failed a minute ago and was not asked since may be well."""
    desk.search()
    desk.directory.answer(["decode-0", "decode-1"])
    desk.peers.peeks[0][2].set_running_or_notify_cancel()
    desk.answer(1, holds(3))
    desk.look()
    desk.now_s += 2 * GRACE_S
    assert desk.look() == 3 * SIZE
    desk.answer(0, EngineFault("decode-0", "no answer"))
    desk.now_s += 60
    assert desk.book.start("r2", "s", "decode-0", HASHES, desk.now_s) is None


def test_an_answer_that_does_not_fit_leaves_the_others(desk: Desk) -> None:
    """One was started anew, one names more than it was asked: the third is read from."""
    desk.search()
    desk.directory.answer(NAMES)
    desk.answer(0, holds(6, start_id="another"))
    desk.answer(1, holds(7))
    desk.answer(2, holds(2))
    assert desk.look() == 2 * SIZE
    assert desk.peers.hurried == 2


def test_old_answers_are_asked_for_anew(desk: Desk) -> None:
    """Of the same candidates: a call that has queued for long does not start over."""
    desk.search()
    desk.directory.answer(["decode-1"])
    desk.answer(0, holds(6))
    desk.now_s += PEEK_AGE_S + 0.1
    assert desk.look() is None
    desk.answer(1, holds(2))
    assert desk.look() == 2 * SIZE
    assert desk.pull.peer.name == "decode-1"
    assert desk.directory.open == []


@pytest.mark.parametrize("stage", ["finding", "found", "peeking"])
def test_a_client_that_leaves_or_a_switch_ends_the_search(stage: str, desk: Desk) -> None:
    """Nothing is left, and nobody is asked for it any more."""
    for end in (lambda: desk.book.ended(R), desk.book.give_up):
        desk.search()
        asked = len(desk.peers.peeks)
        if stage != "finding":
            desk.directory.answer(NAMES)
        if stage == "peeking":
            assert desk.look() is None
        end()
        if stage == "finding":
            desk.directory.answer(NAMES)
            assert len(desk.peers.peeks) == asked
        assert all(future.cancelled() for _, _, future in desk.peers.peeks[asked:])
        assert desk.look() == 0
        desk.book.ended(R)
        assert len(desk.book) == 0


def test_a_switch_while_peeks_are_being_sent_waits_for_nobody() -> None:
    """The engine thread takes what is there, and goes on."""
    desk = Desk()
    desk.search()
    assert desk.pull.found.set_running_or_notify_cancel()
    desk.book.give_up()
    assert desk.look() == 0
    assert desk.pull.reason is Reason.DISABLED


def test_all_peers_are_named_for_any_session() -> None:
    """No state, no wait: the peeks are on their way at once, and at most so many."""
    names = [*NAMES, *(f"more-{i}" for i in range(9))]
    desk = Desk(AllPeers(names))
    for name in names:
        desk.peers.records[name] = compatible(name)
    desk.search()
    assert len(desk.peers.peeks) == MAX_CANDIDATES
    AllPeers(names).keeps("s", 5.0)
    AllPeers(names).close()


def test_a_prompt_without_a_full_block_is_not_looked_for(desk: Desk) -> None:
    """There is nothing to ask for."""
    assert desk.search([]) is Reason.BELOW_THRESHOLD
    assert desk.directory.open == []


def test_a_closed_engine_asks_nobody() -> None:
    """An answer that comes while it shuts down ends the search."""

    class Closed(FakePeers):
        def peek(self, peer: Any, session: str, hashes: list[bytes]) -> Future[Any]:
            raise RuntimeError("cannot schedule new futures after shutdown")

    directory = SlowDirectory()
    finder = Finder(directory, cast(PeerBook, Closed()))
    found = finder.find("s", HASHES, ())
    directory.answer(["decode-0"])
    assert found.result(timeout=0).reason is Reason.SOURCE_GONE


def test_without_a_finder_nothing_is_looked_for() -> None:
    """Calls without a hint are computed, without a reason of their own."""
    peers = FakePeers()
    book = PullBook(
        cast(PeerBook, peers), block_size=SIZE, threshold_tokens=0, timeout_s=1, costs=PullCosts()
    )
    assert book.search(R, "s", HASHES, 0.0) is None
    assert book.look(R, 0, 0.0) == 0
