"""One request's verified pull, seen from the engine thread: cases one by one."""

from __future__ import annotations

from concurrent.futures import CancelledError
from typing import Any

import pytest

from tests.server.connector.peer_fakes import (
    FakeBlock,
    FakePeers,
    FakeRequest,
    compatible,
    confirms,
    holds,
)
from turncache.errors import EngineFault
from turncache.protocol import Reason
from turncache_server.connector import pull as pull_module
from turncache_server.connector.costs import PullCosts
from turncache_server.connector.peers import PeerState
from turncache_server.connector.pull import (
    PEEK_AGE_S,
    PEEK_WAIT_S,
    PEER_REST_S,
    PullBook,
)
from turncache_server.connector.pull_state import HandBack, PullState
from turncache_server.control.messages import MAX_HASHES, Verify

SIZE = 4
HASHES = [bytes([i]) * 4 for i in range(6)]
MAP = object()
R = "r1"


class Desk:
    """A pull book with a fake peer, and the steps that the scheduler takes with it."""

    def __init__(
        self,
        *,
        threshold_tokens: int = 0,
        timeout_s: float | None = 5.0,
        costs: PullCosts | None = None,
    ) -> None:
        self.peers = FakePeers()
        self.book = PullBook(
            self.peers,  # type: ignore[arg-type]  # stands for PeerBook
            block_size=SIZE,
            threshold_tokens=threshold_tokens,
            timeout_s=timeout_s,
            costs=costs or PullCosts(),
        )
        self.request = FakeRequest(R)
        self.now_s = 100.0

    def start(self, source: str = "decode-0", hashes: list[bytes] | None = None) -> Reason | None:
        return self.book.start(R, "s", source, HASHES if hashes is None else hashes, self.now_s)

    def answer(self, reply: Any) -> None:
        future = self.peers.peeks[-1][2]
        if isinstance(reply, BaseException):
            future.set_exception(reply)
        else:
            future.set_result(reply)

    def look(self, local_blocks: int = 0) -> int | None:
        return self.book.look(R, local_blocks * SIZE, self.now_s)

    def allocate(self, local_blocks: int, tokens: int) -> list[FakeBlock]:
        blocks = [FakeBlock(10 + i) for i in range(local_blocks + tokens // SIZE)]
        self.book.allocated(self.request, blocks, tokens, MAP, self.now_s)
        return blocks

    def read_all(self, local_blocks: int = 0, held: int = 6) -> None:
        """Go from arrival to a read that all ranks have finished."""
        assert self.start() is None
        self.answer(holds(held))
        tokens = self.look(local_blocks)
        assert tokens
        self.allocate(local_blocks, tokens)
        assert len(self.book.take_reads()) == 1

    def step(
        self, finished: tuple[str, ...] = (), failed: tuple[str, ...] = (), block_map: Any = MAP
    ) -> HandBack:
        return self.book.completed(finished, failed, block_map, self.now_s)

    @property
    def reason(self) -> Reason | None:
        pull = self.book.get(R)
        assert pull is not None
        return pull.reason


@pytest.fixture
def desk() -> Desk:
    """A pull book in front of one compatible peer."""
    return Desk()


def test_a_confirmed_read_is_handed_back_once(desk: Desk) -> None:
    """The id is held until the source has confirmed, then it goes back with its blocks."""
    desk.read_all()
    assert desk.step((R,)) == HandBack(hold={R})
    assert desk.book.holding
    assert desk.step() == HandBack()
    desk.peers.verifies[0][1].set_result(confirms(6))
    back = desk.step()
    assert (back.add, back.hold, back.num_verified) == ({R}, set(), 1)
    assert (back.loaded_blocks, len(back.transfer_s)) == ([10, 11, 12, 13, 14, 15], 1)
    assert desk.request.num_computed_tokens == 6 * SIZE
    assert desk.reason is None
    assert desk.step() == HandBack()
    assert not desk.book.holding


def test_the_read_names_what_lies_beyond_the_local_hit(desk: Desk) -> None:
    """Local and remote blocks are paired by position; the deadline counts from the first look."""
    assert desk.start() is None
    desk.answer(holds(6))
    assert desk.look(2) == 4 * SIZE
    desk.now_s += 2.0
    assert desk.look(2) == 4 * SIZE, "a second look changes nothing"
    desk.allocate(2, 4 * SIZE)
    (read,) = desk.book.take_reads()
    assert (read.local_blocks, read.remote_blocks) == ([12, 13, 14, 15], [102, 103, 104, 105])
    assert (read.num_local_hit_blocks, read.num_tokens) == (2, 4 * SIZE)
    assert (read.engine_id, read.host, read.port) == ("decode-0", "127.0.0.1", 5600)
    assert read.deadline_s == pytest.approx(3.0)
    desk.step((R,))
    assert desk.peers.verifies[0][0] == Verify(
        start_id="start-1",
        generation=1,
        block_ids=[102, 103, 104, 105],
        epochs=[1002, 1003, 1004, 1005],
        hashes=HASHES[2:],
    )


@pytest.mark.parametrize("local_blocks", [0, 2])
@pytest.mark.parametrize("valid", [1, 3, 4])
def test_a_confirmed_prefix_is_used_and_the_rest_recomputed(
    local_blocks: int, valid: int, desk: Desk
) -> None:
    """The computed count is cut to the local hit and the confirmed prefix."""
    desk.read_all(local_blocks, held=local_blocks + 4)
    desk.step((R,))
    desk.peers.verifies[0][1].set_result(confirms(valid))
    back = desk.step()
    assert back.add == {R}
    assert len(back.loaded_blocks) == back.num_blocks == valid
    assert desk.request.num_computed_tokens == (local_blocks + valid) * SIZE
    assert desk.reason is (None if valid == 4 else Reason.EVICTED)
    pull = desk.book.get(R)
    assert pull is not None
    assert pull.returned_tokens == valid * SIZE


@pytest.mark.parametrize(
    ("outcome", "reason"),
    [
        pytest.param(confirms(0), Reason.EVICTED, id="nothing-is-left"),
        pytest.param(confirms(-1), Reason.EVICTED, id="nonsense"),
        pytest.param(EngineFault("decode-0", "no answer"), Reason.SOURCE_GONE, id="no-answer"),
        pytest.param(CancelledError(), Reason.SOURCE_GONE, id="shut-down"),
    ],
)
def test_an_unconfirmed_read_is_failed_by_the_workers(
    outcome: Any, reason: Reason, desk: Desk
) -> None:
    """Without a confirmed block the workers report the request as finished and failed."""
    desk.read_all()
    desk.step((R,))
    future = desk.peers.verifies[0][1]
    if isinstance(outcome, BaseException):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)
    assert desk.step() == HandBack()
    assert desk.book.holding
    assert desk.book.take_failures() == {R}
    assert desk.book.take_failures() == set()
    assert desk.step((R,), (R,)) == HandBack()
    assert desk.reason is reason
    assert desk.request.num_computed_tokens == 0, "nothing was cut: the scheduler recomputes"


def test_a_source_cannot_confirm_more_than_was_read(desk: Desk) -> None:
    """A count beyond the blocks is cut: the scheduler would compute with nobody's KV."""
    desk.read_all(held=3)
    desk.step((R,))
    desk.peers.verifies[0][1].set_result(confirms(99))
    desk.step()
    assert desk.request.num_computed_tokens == 3 * SIZE


def test_an_own_reset_in_between_uses_nothing(desk: Desk) -> None:
    """KV that was read before the own prefix cache was reset is not used, confirmed or not."""
    desk.read_all()
    desk.step((R,))
    desk.peers.verifies[0][1].set_result(confirms(6))
    assert desk.step(block_map=object()) == HandBack()
    assert desk.book.take_failures() == {R}


@pytest.mark.parametrize("refused", [False, True], ids=["failed", "unconfirmed"])
def test_a_failed_read_is_not_tried_again(refused: bool, desk: Desk) -> None:
    """Blocks stay reserved for its load: a second one could wait for itself for ever."""
    desk.read_all()
    if refused:
        desk.step((R,))
        desk.peers.verifies[0][1].set_result(confirms(0))
        desk.step()
    assert desk.step((R,), (R,)) == HandBack()
    desk.now_s += PEER_REST_S + 1
    assert desk.look() == 0
    assert len(desk.peers.peeks) == 1


def test_what_came_before_the_offer_does_not_count_against_it(desk: Desk) -> None:
    """A step may take longer than a pull: the first look and the answer lie a step apart."""
    desk.start()
    assert desk.look() is None
    desk.answer(holds(6))
    desk.now_s += 60.0
    assert desk.look() == 6 * SIZE


@pytest.mark.parametrize(("local_blocks", "held"), [(6, 6), (0, 0)])
def test_where_there_is_nothing_to_pull_no_time_is_over(
    local_blocks: int, held: int, desk: Desk
) -> None:
    """A request that waits for room with all it needs has no reason to give."""
    desk.start()
    desk.answer(holds(held))
    for _ in range(3):
        assert desk.look(local_blocks) == 0
        desk.now_s += 60.0
    assert desk.reason is None


def test_a_peer_that_has_just_failed_another_read_is_not_read_from(desk: Desk) -> None:
    """An offer that waited for room is dropped when its source stops delivering."""
    desk.start()
    desk.answer(holds(6))
    assert desk.look() == 6 * SIZE
    desk.book.start("r2", "s", "decode-0", HASHES, desk.now_s)
    desk.answer(holds(6))
    tokens = desk.book.look("r2", 0, desk.now_s)
    assert tokens
    blocks = [FakeBlock(30 + i) for i in range(6)]
    desk.book.allocated(FakeRequest("r2"), blocks, tokens, MAP, desk.now_s)
    desk.step(("r2",), ("r2",))
    assert desk.look() == 0
    assert desk.reason is Reason.SOURCE_GONE


def test_an_offer_without_room_is_withdrawn(desk: Desk) -> None:
    """Loads are admitted by stricter rules than computing: after the deadline it computes."""
    desk.start()
    desk.answer(holds(6))
    assert desk.look() == 6 * SIZE
    desk.now_s += 4.9
    assert desk.look() == 6 * SIZE
    desk.now_s += 0.1
    assert desk.look() == 0
    assert desk.reason is Reason.TIMEOUT


def test_after_a_failed_read_its_peer_rests(desk: Desk) -> None:
    """A peer whose read timed out is asked again only later, and greeted anew soon."""
    desk.read_all()
    desk.step((R,), (R,))
    assert desk.peers.hurried == 1
    assert desk.look() == 0, "the same request computes"
    assert desk.book.start("r2", "s", "decode-0", HASHES, desk.now_s) is Reason.SOURCE_GONE
    desk.now_s += PEER_REST_S
    assert desk.book.start("r3", "s", "decode-0", HASHES, desk.now_s) is None


def test_a_preempted_request_may_pull_once_more(desk: Desk) -> None:
    """Its first pull was used up; a fresh peek decides about the second."""
    desk.read_all()
    desk.step((R,))
    desk.peers.verifies[0][1].set_result(confirms(6))
    desk.step()
    assert desk.look() is None, "preempted: a new peek is under way"
    desk.answer(holds(2))
    assert desk.look() == 2 * SIZE
    desk.allocate(0, 2 * SIZE)
    desk.step((R,))
    desk.peers.verifies[1][1].set_result(confirms(2))
    desk.step()
    assert desk.look() == 0, "preempted again: it computes"


@pytest.mark.parametrize("state", ["reading", "verifying", "failing"])
def test_an_aborted_request_stays_until_its_id_is_handed_back(state: str, desk: Desk) -> None:
    """Its blocks may still be written, so the scheduler keeps them until the id is back."""
    desk.read_all()
    if state != "reading":
        desk.step((R,))
    if state == "failing":
        desk.peers.verifies[0][1].set_result(confirms(0))
        desk.step()
    pull = desk.book.ended(R)
    assert pull is not None
    assert len(desk.book) == 1
    if state == "reading":
        assert desk.step((R,)) == HandBack(), "the workers' id passes"
    elif state == "verifying":
        assert desk.step() == HandBack(add={R}), "nobody waits for the answer"
    else:
        assert desk.book.take_failures() == {R}
        assert desk.step((R,), (R,)) == HandBack()
    assert len(desk.book) == 0
    assert not desk.book.holding


@pytest.mark.parametrize("answered", [False, True])
def test_an_abort_before_the_read_leaves_nothing(answered: bool, desk: Desk) -> None:
    """A request that was never taken over is forgotten at once, its peek cancelled."""
    desk.start()
    if answered:
        desk.answer(holds(6))
        assert desk.look() == 6 * SIZE
    desk.book.ended(R)
    assert len(desk.book) == 0
    assert answered or desk.peers.peeks[0][2].cancelled()


def test_an_offer_that_is_never_allocated_is_not_a_load(desk: Desk) -> None:
    """The scheduler may not find room, and ask again, with another local hit."""
    desk.start()
    desk.answer(holds(6))
    assert desk.look(0) == 6 * SIZE
    assert desk.step((R,)) == HandBack(), "a sibling connector's id is not ours"
    assert desk.look(3) == 3 * SIZE
    assert desk.look(6) == 0
    assert desk.book.take_reads() == []


def test_a_switch_of_mode_between_offer_and_allocation_fails_the_request(desk: Desk) -> None:
    """Allocating blocks drains the mailbox, so a mode may change under the scheduler's hands.

    The scheduler waits for an id from then on: the request fails like a read and computes.
    """
    desk.start()
    desk.answer(holds(6))
    tokens = desk.look()
    assert tokens
    desk.book.give_up()
    desk.allocate(0, tokens)
    assert desk.book.take_reads() == []
    assert desk.book.take_failures() == {R}
    assert desk.step((R,), (R,)) == HandBack()
    assert desk.look() == 0
    assert desk.reason is Reason.DISABLED


def test_giving_up_lets_reads_run_to_their_end(desk: Desk) -> None:
    """A switch to off closes offers and keeps what is being read."""
    desk.read_all()
    desk.book.start("r2", "s", "decode-0", HASHES, desk.now_s)
    desk.book.give_up()
    assert desk.book.look("r2", 0, desk.now_s) == 0
    desk.step((R,))
    desk.peers.verifies[0][1].set_result(confirms(6))
    assert desk.step().add == {R}


def test_a_hook_that_failed_itself_has_everything_unconfirmed_recomputed(desk: Desk) -> None:
    """Finished but unconfirmed reads are failed by the workers, in whatever state they are."""
    desk.read_all()
    desk.book.start("r2", "s", "decode-0", HASHES, desk.now_s)
    desk.answer(holds(6))
    desk.book.look("r2", 0, desk.now_s)
    blocks = [FakeBlock(i) for i in range(6)]
    desk.book.allocated(FakeRequest("r2"), blocks, 24, MAP, desk.now_s)
    desk.step((R,))
    desk.book.fail_unverified({"r2", "failed"}, {"failed"})
    assert desk.book.take_failures() == {R, "r2"}
    assert desk.step((R, "r2"), (R, "r2")) == HandBack()
    assert not desk.book.holding


@pytest.mark.parametrize(
    ("prepare", "reason"),
    [
        (lambda d: d.peers.become("decode-0", state=PeerState.INCOMPATIBLE), Reason.INCOMPATIBLE),
        (lambda d: d.peers.become("decode-0", state=PeerState.UNSEEN), Reason.SOURCE_GONE),
        (lambda d: d.peers.become("decode-0", state=PeerState.GONE), Reason.SOURCE_GONE),
        (lambda d: d.peers.records.clear(), Reason.SOURCE_UNKNOWN),
    ],
    ids=["incompatible", "unseen", "gone", "unknown"],
)
def test_only_compatible_peers_of_the_allow_list_are_asked(
    prepare: Any, reason: Reason, desk: Desk
) -> None:
    """Any other source is a reason, and leaves no trace."""
    prepare(desk)
    assert desk.start() is reason
    assert len(desk.book) == 0
    assert desk.look() == 0
    assert desk.peers.peeks == []


def test_a_prompt_without_a_full_block_is_not_asked_about(desk: Desk) -> None:
    """Nothing of it could be pulled."""
    assert desk.start(hashes=[]) is Reason.BELOW_THRESHOLD


def test_a_very_long_prompt_is_asked_about_as_far_as_a_question_goes(desk: Desk) -> None:
    """A question above the bound would be refused, and its peer blamed."""
    assert desk.start(hashes=[b"h"] * (MAX_HASHES + 1)) is None
    assert len(desk.peers.peeks[0][1]) == MAX_HASHES


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param(holds(6, start_id="another"), id="restarted"),
        pytest.param(holds(6, generation=2), id="reset"),
        pytest.param(holds(7), id="more-blocks-than-hashes"),
        pytest.param(holds(3, epochs=[1]), id="uneven"),
        pytest.param(EngineFault("decode-0", "gone"), id="no-answer"),
        pytest.param(CancelledError(), id="shut-down"),
    ],
)
def test_an_answer_that_does_not_fit_is_not_used(answer: Any, desk: Desk) -> None:
    """Restarts, resets and nonsense end in computing, and in a new hello soon."""
    desk.start()
    desk.answer(answer)
    assert desk.look() == 0
    assert desk.reason is Reason.SOURCE_GONE
    assert desk.peers.hurried == 1
    assert desk.look() == 0


def test_a_source_that_was_greeted_meanwhile_is_read_as_its_new_hello_says(desk: Desk) -> None:
    """Its new start has another NIXL id: reading by the old one would fail, or worse."""
    desk.start()
    again = {"start_id": "another", "generation": 4}
    desk.peers.records["decode-0"] = compatible(engine_id="anew", nixl_port=77, **again)
    desk.answer(holds(6, **again))
    tokens = desk.look()
    assert tokens
    desk.allocate(0, tokens)
    (read,) = desk.book.take_reads()
    assert (read.engine_id, read.port) == ("anew", 77)


@pytest.mark.parametrize("state", [PeerState.INCOMPATIBLE, PeerState.GONE])
def test_a_source_whose_new_hello_does_not_fit_is_not_read_from(
    state: PeerState, desk: Desk
) -> None:
    """Its weights may be others since its reset."""
    desk.start()
    desk.peers.become("decode-0", state=state)
    desk.answer(holds(6))
    assert desk.look() == 0
    assert desk.reason is Reason.SOURCE_GONE


def test_a_source_that_holds_nothing_any_more_says_evicted(desk: Desk) -> None:
    """Known once and held no longer is a loss; never known is none."""
    desk.start()
    desk.answer(holds(0, known=5))
    assert desk.look() == 0
    assert desk.reason is Reason.EVICTED
    pull = desk.book.get(R)
    assert pull is not None
    assert pull.known_blocks == 5


def test_too_little_to_be_worth_it_is_computed() -> None:
    """Below the threshold nothing is offered; with a smaller local hit it may be."""
    desk = Desk(threshold_tokens=3 * SIZE)
    desk.start()
    desk.answer(holds(6))
    assert desk.look(4) == 0
    assert desk.reason is Reason.BELOW_THRESHOLD
    assert desk.look(3) == 3 * SIZE


def test_an_old_peek_is_repeated_at_the_first_look(desk: Desk) -> None:
    """A request that has queued for long asks again: the source may have moved on."""
    desk.start()
    desk.answer(holds(6))
    desk.now_s += PEEK_AGE_S + 0.1
    assert desk.look() is None
    desk.answer(holds(2))
    assert desk.look() == 2 * SIZE
    assert len(desk.peers.peeks) == 2


def test_nobody_waits_for_a_peek_for_long(desk: Desk) -> None:
    """A question that is stuck behind others ends in computing, from the first look on."""
    desk.start()
    assert desk.look() is None
    desk.now_s += PEEK_WAIT_S
    assert desk.look() == 0
    assert desk.reason is Reason.TIMEOUT
    assert desk.peers.peeks[0][2].cancelled()


def test_one_failed_question_frees_everybody_who_waits_for_the_same_peer(desk: Desk) -> None:
    """A dead peer costs one deadline, not one per request."""
    for i in range(3):
        desk.book.start(f"w{i}", "s", "decode-0", HASHES, desk.now_s)
        assert desk.book.look(f"w{i}", 0, desk.now_s) is None
    desk.peers.peeks[0][2].set_exception(EngineFault("decode-0", "no answer"))
    assert [desk.book.look(f"w{i}", 0, desk.now_s) for i in range(3)] == [0, 0, 0]


def test_without_a_setting_the_deadline_follows_the_length() -> None:
    """A second and a millisecond per token."""
    assert Desk(timeout_s=None).book.timeout_s(0, 1000) == pytest.approx(1.0 + 0.001 * 1000)
    assert Desk(timeout_s=0.3).book.timeout_s(0, 1000) == 0.3


def test_a_read_is_given_a_moment_even_when_its_time_is_nearly_over(desk: Desk) -> None:
    """A request that had to wait for room still tries."""
    desk.start()
    desk.answer(holds(6))
    desk.look()
    desk.now_s += 4.99
    desk.allocate(0, desk.look() or 0)
    assert desk.book.take_reads()[0].deadline_s == pytest.approx(0.1)


def test_a_second_pull_asks_the_peer_as_it_is_then(desk: Desk) -> None:
    """A peer that has restarted meanwhile answers with its new start."""
    desk.read_all()
    desk.step((R,))
    desk.peers.verifies[0][1].set_result(confirms(6))
    desk.step()
    desk.peers.records["decode-0"] = compatible(start_id="start-2", engine_id="decode-0")
    assert desk.look() is None, "preempted"
    desk.answer(holds(4, start_id="start-2"))
    assert desk.look() == 4 * SIZE


def test_states_are_the_documented_ones() -> None:
    """The picture in the module's docstring names every state."""
    text = pull_module.__doc__ or ""
    assert all(state.name in text for state in PullState)
