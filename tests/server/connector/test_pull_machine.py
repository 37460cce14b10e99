"""Any order of events: a request that was taken over comes back exactly once, and is never lost.

The machine plays the scheduler (which keeps its own books, independent of ours), two ranks
that read, a directory that is late or wrong, and a source that confirms or does not, the rest
behind its full blocks included.
"""

from __future__ import annotations

import os
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, cast

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from tests.fakes.directory import SlowDirectory
from tests.server.connector.peer_fakes import (
    FakeBlock,
    FakePeers,
    compatible,
    confirms,
    holds,
)
from turncache.errors import EngineFault
from turncache_server.connector.costs import PullCosts
from turncache_server.connector.finding import Finder
from turncache_server.connector.lacking import LackingCalls, Patience
from turncache_server.connector.peers import PeerBook, PeerState
from turncache_server.connector.pull import MAX_ATTEMPTS, PullBook
from turncache_server.connector.pull_state import PullState, Read
from turncache_server.control.messages import PeekReply, RestBlock, Verify, VerifyReply
from turncache_server.retention.rests import rest_key

SIZE = 4
NUM_HASHES = 5
HASHES = [bytes([i]) for i in range(NUM_HASHES)]
#: A prompt with two tokens behind its full blocks.
TOKENS = list(range(100, 102 + NUM_HASHES * SIZE))
NUM_RANKS = 2
#: Weighted draws: a machine that mostly fails early never reaches what comes later.
RARELY = st.integers(0, 9).map(lambda n: n == 9)
SOMETIMES_NOT = st.integers(0, 4).map(lambda n: n != 4)
NAMES = st.sampled_from([["decode-0"]] * 6 + [[], ["stranger"], ["", "decode-0"], None])
#: Whom the router names after a repeat.
SAID = st.sampled_from(["decode-0"] * 5 + ["", "stranger"])
#: Rests behind the named blocks: their tokens, and whether these are the prompt's.
RESTS = st.lists(st.tuples(st.integers(1, SIZE - 1), st.integers(0, 3).map(bool)), max_size=3)
ANSWERS = st.sampled_from(["ok"] * 12 + ["fault", "generation", "restart", "too_many"])


@dataclass(eq=False)
class Request:
    """The scheduler's own view of a request.

    Attributes:
        status: ``waiting``, ``parked`` (until its id comes), ``running`` or ``ended``.
        computed: where our code cuts the computed count.
        reads: reads that were started for it.
        reading: ranks that still read for it; None when nobody does.
        confirmed: tokens beyond the local hit that the source has confirmed for the present read.
    """

    request_id: str
    status: str = "waiting"
    num_computed_tokens: int = 0
    local_blocks: int = 0
    blocks: list[FakeBlock] = field(default_factory=list)
    reads: int = 0
    reading: set[int] | None = None
    failed_ranks: bool = False
    confirmed: int | None = None
    ordered_to_fail: bool = False


class PullMachine(RuleBasedStateMachine):
    """Events in any order."""

    @initialize(threshold_blocks=st.integers(0, 2))
    def build(self, threshold_blocks: int) -> None:
        self.peers = FakePeers()
        self.directory = SlowDirectory()
        self.lacking = LackingCalls(max_waiting=3)
        self.book = PullBook(
            self.peers,  # type: ignore[arg-type]  # stands for PeerBook
            block_size=SIZE,
            threshold_tokens=threshold_blocks * SIZE,
            timeout_s=5.0,
            costs=PullCosts(),
            finder=Finder(self.directory, cast(PeerBook, self.peers)),
            lacking=self.lacking,
        )
        self.now_s = 1000.0
        self.map: object = object()
        # How many tokens of the prompt each rest holds that was ever named.
        self.rests: dict[int, int] = {}
        self.requests: dict[str, Request] = {}

    def _some(self, data: st.DataObject, *statuses: str) -> Request:
        return data.draw(
            st.sampled_from([r for r in self.requests.values() if r.status in statuses])
        )

    def _any(self, *statuses: str) -> bool:
        return any(r.status in statuses for r in self.requests.values())

    # --- arrival and admission -------------------------------------------------------------------

    @rule(
        data=st.data(),
        stage=st.integers(0, 4),
        kind=ANSWERS,
        mode_off_between=RARELY,
        patient=st.booleans(),
    )
    def arrive(
        self, data: st.DataObject, stage: int, kind: str, mode_off_between: bool, patient: bool
    ) -> None:
        """A request with a source arrives, and goes a part of the usual way at once."""
        request_id = f"r{len(self.requests)}"
        request = self.requests[request_id] = Request(request_id)
        questions = len(self.peers.peeks)
        patience = Patience(
            call=request_id,
            wait_s=5.0,
            above_tokens=SIZE,
            prompt_tokens=len(TOKENS),
        )
        reason = self.book.start(
            request_id,
            "s",
            "decode-0",
            HASHES,
            self.now_s,
            tokens=TOKENS,
            patience=patience if patient else None,
        )
        record = self.peers.records["decode-0"]
        rests = self.book._rests(record, self.now_s)
        able = record.state is PeerState.COMPATIBLE and not rests
        assert (reason is None) == (able or patient)
        assert len(self.peers.peeks) == questions + able
        if able:
            self._advance(data, request, stage, kind, mode_off_between=mode_off_between)

    @rule(data=st.data(), stage=st.integers(0, 5), kind=ANSWERS, names=NAMES)
    def arrive_without_a_source(
        self, data: st.DataObject, stage: int, kind: str, names: list[str] | None
    ) -> None:
        """A request whose source has to be found arrives, and goes a part of the way at once."""
        request_id = f"r{len(self.requests)}"
        request = self.requests[request_id] = Request(request_id)
        assert self.book.search(request_id, "s", HASHES, self.now_s, tokens=TOKENS) is None
        questions = len(self.peers.peeks)
        if stage:
            self.directory.open.insert(0, self.directory.open.pop())
            self._find(names)
        if len(self.peers.peeks) > questions:
            self._advance(data, request, stage - 1, kind)

    @precondition(lambda self: self.lacking.requests())
    @rule(data=st.data(), source=SAID, stage=st.integers(0, 3), kind=ANSWERS)
    def the_prefill_leg_is_repeated(
        self, data: st.DataObject, source: str, stage: int, kind: str
    ) -> None:
        """A call that waits hears who has computed its prompt, or that nobody will."""
        request_id = data.draw(st.sampled_from(self.lacking.requests()))
        self.lacking.repeated(request_id, source)
        questions = len(self.peers.peeks)
        if stage:
            self._look(self.requests[request_id], 0, mode_off_between=False)
        if len(self.peers.peeks) > questions:
            self._advance(data, self.requests[request_id], stage, kind)

    @precondition(lambda self: self.directory.open)
    @rule(names=NAMES)
    def the_directory_answers(self, names: list[str] | None) -> None:
        """One of the searches ends, well or badly."""
        self._find(names)

    def _find(self, names: list[str] | None) -> None:
        self.directory.answer(EngineFault("redis", "no answer") if names is None else names)

    @precondition(lambda self: self._any("running"))
    @rule(data=st.data(), stage=st.integers(0, 4), kind=ANSWERS)
    def preempt(self, data: st.DataObject, stage: int, kind: str) -> None:
        """A running request loses its blocks, waits again, and goes a part of the way again."""
        request = self._some(data, "running")
        request.status = "waiting"
        request.num_computed_tokens = 0
        questions = len(self.peers.peeks)
        if stage and self.book.look(request.request_id, 0, self.now_s) is None:
            assert len(self.peers.peeks) == questions + 1
            self._advance(data, request, stage, kind)

    def _advance(
        self,
        data: st.DataObject,
        request: Request,
        stage: int,
        kind: str,
        *,
        mode_off_between: bool = False,
    ) -> None:
        """Go through the stages asked, answered, allocated, read by both ranks, answered.

        Left to single rules alone, hardly a request would get further than an answer.
        """
        held = data.draw(st.integers(1, NUM_HASHES))
        if stage >= 1:
            self._answer_peek(self.peers.peeks[-1][2], held, kind, data.draw(RESTS))
        if stage >= 2:
            local_blocks = data.draw(st.integers(0, 3))
            self._look(request, local_blocks, mode_off_between=mode_off_between)
        if stage >= 3 and request.reading:
            request.reading = None
            self._step({request.request_id}, set())
            if stage >= 4:
                valid = data.draw(st.integers(0, NUM_HASHES))
                self._answer_verify(self.peers.verifies[-1], valid, rest=data.draw(SOMETIMES_NOT))

    @precondition(lambda self: any(not f.done() for _, _, f in self.peers.peeks))
    @rule(data=st.data(), held=st.integers(0, NUM_HASHES), kind=ANSWERS)
    def answer_a_peek(self, data: st.DataObject, held: int, kind: str) -> None:
        """The source answers one open question, well or badly."""
        future = data.draw(st.sampled_from([f for _, _, f in self.peers.peeks if not f.done()]))
        self._answer_peek(future, held, kind, data.draw(RESTS))

    def _answer_peek(
        self, future: Future[PeekReply], held: int, kind: str, rests: list[tuple[int, bool]]
    ) -> None:
        if kind == "fault":
            future.set_exception(EngineFault("decode-0", "no answer"))
            return
        hello = self.peers.records["decode-0"].hello
        assert hello is not None
        changes: dict[str, Any] = {"start_id": hello.start_id, "generation": hello.generation}
        if kind == "generation":
            changes["generation"] += 1
        elif kind == "restart":
            changes["start_id"] = "another"
        count = NUM_HASHES + 2 if kind == "too_many" else held
        named = [self._rest(held, *rest) for rest in rests] if held else []
        future.set_result(holds(count, known=NUM_HASHES, rests=named, **changes))

    def _rest(self, held: int, num_tokens: int, ours: bool) -> RestBlock:
        """Return a rest behind so many blocks, of the prompt's tokens or of others."""
        block_id = 500 + len(self.rests)
        tokens = TOKENS[held * SIZE : held * SIZE + num_tokens]
        fits = ours and len(tokens) == num_tokens
        self.rests[block_id] = num_tokens if fits else 0
        key = rest_key(HASHES[held - 1], tokens) if fits else b"of others"
        return RestBlock(block_id=block_id, epoch=7, num_tokens=num_tokens, key=key)

    @precondition(lambda self: self._any("waiting"))
    @rule(
        data=st.data(),
        local_blocks=st.integers(0, NUM_HASHES - 1),
        room=SOMETIMES_NOT,
        mode_off_between=RARELY,
    )
    def look(
        self, data: st.DataObject, local_blocks: int, room: bool, mode_off_between: bool
    ) -> None:
        """The scheduler looks at a waiting request and allocates when there is room."""
        request = self._some(data, "waiting")
        if room:
            self._look(request, local_blocks, mode_off_between=mode_off_between)
        else:
            self.book.look(request.request_id, local_blocks * SIZE, self.now_s)

    def _look(self, request: Request, local_blocks: int, *, mode_off_between: bool) -> None:
        request_id = request.request_id
        tokens = self.book.look(request_id, local_blocks * SIZE, self.now_s)
        if tokens is None:
            return
        assert 0 <= tokens < len(TOKENS) - local_blocks * SIZE, "never the prompt's last token"
        assert self.book.look(request_id, local_blocks * SIZE, self.now_s) == tokens
        if tokens == 0:
            request.status = "running"
            return
        if mode_off_between:
            self.book.give_up()
        request.local_blocks = local_blocks
        request.num_computed_tokens = local_blocks * SIZE + tokens
        request.blocks = [FakeBlock(i) for i in range(-(-request.num_computed_tokens // SIZE))]
        request.status = "parked"
        self.book.allocated(request, request.blocks, tokens, self.map, self.now_s)
        self._take_orders()

    def _take_orders(self) -> None:
        """Every parked request is read for, or ordered to fail: nothing is left waiting."""
        for read in self.book.take_reads():
            self._start(read)
        for request_id in self.book.take_failures():
            self.requests[request_id].ordered_to_fail = True

    def _start(self, read: Read) -> None:
        request = self.requests[read.request_id]
        assert request.status == "parked"
        assert request.reading is None, "one read at a time"
        destination = [block.block_id for block in request.blocks[request.local_blocks :]]
        assert read.local_blocks == destination
        assert len(read.remote_blocks) == len(destination)
        request.reads += 1
        assert request.reads <= MAX_ATTEMPTS
        request.reading = set(range(NUM_RANKS))
        request.failed_ranks = False
        request.confirmed = None

    # --- workers and source ----------------------------------------------------------------------

    @precondition(lambda self: any(r.reading for r in self.requests.values()))
    @rule(data=st.data(), fails=RARELY)
    def a_rank_ends(self, data: st.DataObject, fails: bool) -> None:
        """One rank finishes its part of a read, or gives it up."""
        reading = [r for r in self.requests.values() if r.reading]
        request = data.draw(st.sampled_from(reading))
        assert request.reading is not None
        request.reading.pop()
        request.failed_ranks |= fails
        if not request.reading:
            request.reading = None
            failed = {request.request_id} if request.failed_ranks else set()
            self._step({request.request_id}, failed)

    @precondition(lambda self: any(r.ordered_to_fail for r in self.requests.values()))
    @rule()
    def the_workers_report_a_failure(self) -> None:
        """All ranks report the ordered failures as finished and failed."""
        ids = {r.request_id for r in self.requests.values() if r.ordered_to_fail}
        for request_id in ids:
            self.requests[request_id].ordered_to_fail = False
        self._step(ids, ids)

    @precondition(lambda self: any(not f.done() for _, f in self.peers.verifies))
    @rule(data=st.data(), valid=st.integers(-1, NUM_HASHES + 1), rest=st.booleans(), fault=RARELY)
    def answer_a_verify(self, data: st.DataObject, valid: int, rest: bool, fault: bool) -> None:
        """The source confirms a prefix, everything, nothing, or does not answer."""
        asked = [(q, f) for q, f in self.peers.verifies if not f.done()]
        self._answer_verify(data.draw(st.sampled_from(asked)), None if fault else valid, rest=rest)

    def _answer_verify(
        self, asked: tuple[Verify, Future[VerifyReply]], valid: int | None, *, rest: bool
    ) -> None:
        question, future = asked
        if valid is None:
            future.set_exception(EngineFault("decode-0", "no answer"))
        else:
            future.set_result(confirms(valid, rest=rest))
        full = max(0, min(valid or 0, len(question.hashes)))
        confirmed = full * SIZE
        if valid is not None and rest and question.rest and full == len(question.hashes):
            confirmed += self.rests[question.rest[0]]
        for request in self.requests.values():
            pull = self.book.get(request.request_id)
            if pull is not None and pull.verify is future:
                most = len(TOKENS) - 1 - request.local_blocks * SIZE
                request.confirmed = min(confirmed, most)

    @rule()
    def step(self) -> None:
        """A quiet step: the hook runs because something may be pending."""
        self._step(set(), set())

    def _step(self, finished: set[str], failed: set[str]) -> None:
        for request_id in failed:  # the scheduler's part, before the hook
            if self.requests[request_id].status == "parked":
                self.requests[request_id].num_computed_tokens = 0
        back = self.book.completed(finished, failed, self.map, self.now_s)
        assert back.hold <= finished
        assert not back.add & finished
        for request_id in (finished - back.hold) | back.add:
            self._handed(request_id, failed=request_id in failed)
        self._take_orders()

    def _handed(self, request_id: str, *, failed: bool) -> None:
        request = self.requests[request_id]
        assert request.status in ("parked", "ended"), "handed back once, and only when taken over"
        assert request.reading is None, "never before its reads are over"
        if request.status == "ended":
            request.status = "gone"
        elif failed:
            request.status = "waiting"  # the scheduler recomputes it
        else:
            assert request.confirmed, "never without a confirmed token"
            expected = request.local_blocks * SIZE + request.confirmed
            assert request.num_computed_tokens == expected
            request.status = "running"

    # --- the world -------------------------------------------------------------------------------

    @precondition(lambda self: self._any("waiting", "parked", "running"))
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        """The client leaves, or the call is answered."""
        request = self._some(data, "waiting", "parked", "running")
        self.book.ended(request.request_id)
        request.status = "ended" if request.status == "parked" else "gone"

    @rule(seconds=st.sampled_from([0.1, 0.9, 1.1, 2.5]))
    def time_passes(self, seconds: float) -> None:
        """Peeks age and peers have rested."""
        self.now_s += seconds

    @rule(really=RARELY)
    def mode_off(self, really: bool) -> None:
        """The operator switches off."""
        if really:
            self.book.give_up()

    @rule(really=RARELY)
    def reset_own_cache(self, really: bool) -> None:
        """The own prefix cache is replaced; with anything parked vLLM would refuse to."""
        if really and not self._any("parked", "ended"):
            self.map = object()

    @rule(really=RARELY, state=st.sampled_from([PeerState.COMPATIBLE, PeerState.GONE]))
    def peer_changes(self, really: bool, state: PeerState) -> None:
        """The peer restarts, or goes and comes back."""
        if really:
            self.peers.records["decode-0"] = compatible(start_id=f"start-{self.now_s}")
            self.peers.become("decode-0", state=state)

    # --- what always holds -----------------------------------------------------------------------

    @invariant()
    def parked_requests_are_under_way(self) -> None:
        """Whoever waits for an id is being read for, confirmed, or ordered to fail."""
        for request in self.requests.values():
            if request.status != "parked" or request.reading or request.ordered_to_fail:
                continue
            pull = self.book.get(request.request_id)
            assert pull is not None
            assert self.book.holding, "the hook must run in every step for it"

    @invariant()
    def those_that_wait_for_a_repeat_are_known(self) -> None:
        """Each of them is a request that waits; who is no longer in its way, is not named."""
        named = self.lacking.requests()
        for request in self.requests.values():
            pull = self.book.get(request.request_id)
            if pull is not None and pull.state is PullState.LACKING:
                assert request.status == "waiting"
            elif pull is None or pull.state is not PullState.PEEKING:
                assert request.request_id not in named
        assert len(self.lacking) <= 3

    @invariant()
    def no_pull_survives_its_request(self) -> None:
        """A pull is kept for requests that live, or that still wait for their id."""
        for request in self.requests.values():
            if request.status == "gone":
                assert self.book.get(request.request_id) is None

    def teardown(self) -> None:
        """Whatever happened, everything comes to an end."""
        if not hasattr(self, "requests"):
            return
        for request in self.requests.values():
            if request.status not in ("ended", "gone"):
                self.book.ended(request.request_id)
                request.status = "ended" if request.status == "parked" else "gone"
        for _ in range(4):
            ids = {r.request_id for r in self.requests.values() if r.ordered_to_fail}
            reading = {r.request_id for r in self.requests.values() if r.reading}
            for request in self.requests.values():
                request.reading, request.ordered_to_fail = None, False
            self._step(ids | reading, ids)
        assert {r.status for r in self.requests.values()} <= {"gone"}
        assert len(self.book) == 0
        assert len(self.lacking) == 0
        assert not self.book.holding
        assert not self.book.take_reads()
        assert not self.book.take_failures()


PullMachine.TestCase.settings = settings(
    max_examples=int(os.environ.get("TURNCACHE_TEST_EXAMPLES", "60")),
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
TestPullMachine = PullMachine.TestCase
