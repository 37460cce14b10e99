"""The allow-list against real control servers on loopback."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping

import pytest

from tests.server.connector.peer_fakes import confirms, hello, holds
from turncache.errors import EngineFault
from turncache_server.connector.peers import Peer, PeerBook, PeerState
from turncache_server.control.messages import Hello, Peek, Reply, Request, Verify
from turncache_server.control.server import ControlServer

PRINT = {"vllm": "0.32.0", "weights": "aaaa"}


class Engine:
    """What a peer answers; changed by the test while it serves."""

    def __init__(self, fingerprint: Mapping[str, str] = PRINT, engine_id: str = "decode-0") -> None:
        self.fingerprint = dict(fingerprint)
        self.engine_id = engine_id
        self.start_id = "start-1"
        self.generation = 1
        self.seen: list[Request] = []
        self.wait: threading.Event | None = None
        self.refuses_hellos = False

    def __call__(self, request: Request) -> Reply:
        self.seen.append(request)
        match request:
            case Hello() if not self.refuses_hellos:
                return hello(
                    fingerprint=self.fingerprint,
                    start_id=self.start_id,
                    generation=self.generation,
                    engine_id=self.engine_id,
                )
            case Peek():
                if self.wait is not None:
                    self.wait.wait(10)
                held = len(request.hashes)
                return holds(held, start_id=self.start_id, generation=self.generation)
            case Verify():
                return confirms(len(request.hashes))
            case _:
                raise LookupError


@pytest.fixture
def stack() -> Iterator[contextlib.ExitStack]:
    """Closes servers and books in reverse order."""
    with contextlib.ExitStack() as stack:
        yield stack


@pytest.fixture
def serve(stack: contextlib.ExitStack) -> Callable[..., ControlServer]:
    """Start a control server."""

    def start(engine: Engine, address: str = "tcp://127.0.0.1:0") -> ControlServer:
        server = ControlServer(address, engine)
        stack.callback(server.close)
        server.start()
        return server

    return start


@pytest.fixture
def book(stack: contextlib.ExitStack) -> Callable[..., PeerBook]:
    """Start a peer book."""

    def start(peers: dict[str, str], ask_timeout_s: float = 5.0) -> PeerBook:
        book = PeerBook(peers, PRINT, engine_id="mine", ask_timeout_s=ask_timeout_s)
        stack.callback(book.close)
        book.start()
        return book

    return start


def until(book: PeerBook, name: str, state: PeerState, *, hurry: bool = True) -> Peer:
    """Wait until a peer is in a state."""
    deadline = time.monotonic() + 20
    while (record := book.get(name)) is not None and record.state is not state:
        assert time.monotonic() < deadline, f"{name} is {record.state}: {record.why}"
        if hurry:
            book.hurry()
        time.sleep(0.01)
    assert record is not None
    return record


def met(
    serve: Callable[..., ControlServer], book: Callable[..., PeerBook]
) -> tuple[Engine, PeerBook, Peer]:
    """Return a peer that was found compatible, and who knows it."""
    engine = Engine()
    peers = book({"decode-0": serve(engine).address})
    return engine, peers, until(peers, "decode-0", PeerState.COMPATIBLE, hurry=False)


def nobody() -> str:
    """Return an address where nothing listens."""
    server = ControlServer("tcp://127.0.0.1:0", Engine())
    server.close()
    return server.address


def test_an_equal_engine_is_compatible(
    serve: Callable[..., ControlServer], book: Callable[..., PeerBook]
) -> None:
    """Its hello is at hand for the first pull: no call waits for it."""
    peers = book({"decode-0": serve(Engine()).address})
    record = until(peers, "decode-0", PeerState.COMPATIBLE)
    assert record.hello is not None
    assert record.hello.engine_id == "decode-0"
    assert record.why == ""
    assert peers.all() == [record]


@pytest.mark.parametrize("own", [True, False])
def test_an_id_of_two_engines_is_incompatible(
    own: bool, serve: Callable[..., ControlServer], book: Callable[..., PeerBook]
) -> None:
    """NIXL connects once per id, and would read one engine's blocks in the other's memory."""
    names = ["mine"] if own else ["decode-0", "decode-1"]
    engines = [Engine(engine_id="mine" if own else "x") for _ in names]
    peers = book({name: serve(engine).address for name, engine in zip(names, engines, strict=True)})
    for name in names:
        record = until(peers, name, PeerState.INCOMPATIBLE)
        assert "engine_id" in record.why
    other = "this engine" if own else "peer decode-1"
    assert other in peers.all()[0].why


def test_a_peer_is_unseen_until_it_answers(book: Callable[..., PeerBook]) -> None:
    """An engine that has not started yet is not gone, and a stranger is no peer."""
    peers = book({"decode-0": nobody()})
    record = peers.get("decode-0")
    assert record is not None
    assert record.state is PeerState.UNSEEN
    assert peers.get("decode-1") is None


def test_an_incompatible_peer_is_named_once_with_both_values(
    serve: Callable[..., ControlServer],
    book: Callable[..., PeerBook],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The operator reads what differs in one line, not once per hello."""
    caplog.set_level(logging.ERROR)
    engine = Engine({**PRINT, "weights": "bbbb"})
    peers = book({"decode-0": serve(engine).address})
    record = until(peers, "decode-0", PeerState.INCOMPATIBLE)
    assert record.why == "weights: aaaa here, bbbb there"
    greeted = len(engine.seen)
    while len(engine.seen) < greeted + 3:
        peers.hurry()
        time.sleep(0.01)
    lines = [r.getMessage() for r in caplog.records if "incompatible" in r.getMessage()]
    assert len(lines) == 1
    assert "decode-0" in lines[0]
    assert "weights: aaaa here, bbbb there" in lines[0]


def test_a_peer_that_becomes_equal_may_be_pulled_from(
    serve: Callable[..., ControlServer], book: Callable[..., PeerBook]
) -> None:
    """After a weight update on both sides digests agree again, and the reverse."""
    engine = Engine({**PRINT, "weights": "bbbb"})
    peers = book({"decode-0": serve(engine).address})
    until(peers, "decode-0", PeerState.INCOMPATIBLE)
    engine.fingerprint = dict(PRINT)
    until(peers, "decode-0", PeerState.COMPATIBLE)
    engine.fingerprint = {**PRINT, "weights": "cccc"}
    until(peers, "decode-0", PeerState.INCOMPATIBLE)


def test_a_peer_that_goes_and_comes_back_is_known_by_its_new_start(
    serve: Callable[..., ControlServer], book: Callable[..., PeerBook]
) -> None:
    """Gone after a hello without an answer; back with the start id of the new process."""
    engine = Engine()
    server = serve(engine)
    peers = book({"decode-0": server.address})
    until(peers, "decode-0", PeerState.COMPATIBLE)
    server.close()
    gone = until(peers, "decode-0", PeerState.GONE)
    assert "no answer" in gone.why
    engine.start_id, engine.engine_id = "start-2", "decode-0-anew"
    serve(engine, server.address)
    back = until(peers, "decode-0", PeerState.COMPATIBLE)
    assert back.hello is not None
    assert back.hello.start_id == "start-2"


def test_a_start_under_the_id_of_the_last_one_is_not_read_from(
    serve: Callable[..., ControlServer], book: Callable[..., PeerBook]
) -> None:
    """NIXL keeps what it has of an id: it would read the old memory, and the new engine confirm."""
    engine = Engine()
    peers = book({"decode-0": serve(engine).address})
    until(peers, "decode-0", PeerState.COMPATIBLE)
    engine.start_id = "start-2"
    refused = until(peers, "decode-0", PeerState.INCOMPATIBLE)
    assert "leave engine_id out" in refused.why
    greeted = len(engine.seen)
    while len(engine.seen) < greeted + 3:
        peers.hurry()
        time.sleep(0.01)
    assert until(peers, "decode-0", PeerState.INCOMPATIBLE).why == refused.why
    engine.engine_id = "decode-0-anew"
    until(peers, "decode-0", PeerState.COMPATIBLE)


def test_one_dead_peer_does_not_hide_another(
    serve: Callable[..., ControlServer], book: Callable[..., PeerBook]
) -> None:
    """Each is asked, whatever the others do."""
    peers = book({"dead": nobody(), "decode-0": serve(Engine()).address})
    until(peers, "decode-0", PeerState.COMPATIBLE, hurry=False)


def test_questions_run_beside_the_engine_thread(
    serve: Callable[..., ControlServer], book: Callable[..., PeerBook]
) -> None:
    """Peek and verify return at once with a future, which carries the answer or the fault."""
    engine = Engine()
    server = serve(engine)
    peers = book({"decode-0": server.address}, ask_timeout_s=0.05)
    peer = until(peers, "decode-0", PeerState.COMPATIBLE)
    assert peers.peek(peer, "s", [b"a", b"b"]).result(10) == holds(2)
    question = Verify(start_id="x", generation=1, block_ids=[1], epochs=[1], hashes=[b"a"])
    assert peers.verify(peer, question).result(10) == confirms(1)
    assert engine.seen[-1] == question
    engine.wait = threading.Event()
    late = peers.peek(peer, "s", [b"a"])
    assert not late.done()
    with pytest.raises(EngineFault, match="no answer"):
        late.result(10)
    engine.wait.set()


@pytest.mark.parametrize("differs", [False, True])
def test_a_peer_that_was_reset_is_greeted_before_its_answer_is_given(
    differs: bool, serve: Callable[..., ControlServer], book: Callable[..., PeerBook]
) -> None:
    """Its record fits the answer by then, or says why nothing may be pulled any more."""
    engine, peers, peer = met(serve, book)
    for generation in (1, 2, 3):
        engine.generation = generation
        if differs and generation == 3:
            engine.fingerprint["weights"] = "bbbb"
        greeted = sum(isinstance(each, Hello) for each in engine.seen)
        answer = peers.peek(peer, "s", [b"a"]).result(10)
        record = peers.get("decode-0")
        assert record is not None
        assert record.hello is not None
        assert record.hello.is_of(answer)
        if generation > 1:
            assert sum(isinstance(each, Hello) for each in engine.seen) > greeted
    assert record.state is (PeerState.INCOMPATIBLE if differs else PeerState.COMPATIBLE)


def test_a_peer_that_cannot_be_greeted_any_more_answers_all_the_same(
    serve: Callable[..., ControlServer], book: Callable[..., PeerBook]
) -> None:
    """The reader sees by the record that the answer is not to be used."""
    engine, peers, peer = met(serve, book)
    engine.generation, engine.refuses_hellos = 2, True
    assert peers.peek(peer, "s", [b"a"]).result(10).generation == 2
    record = peers.get("decode-0")
    assert record is not None
    assert record.state is PeerState.GONE


def test_a_peer_that_gives_nothing_away_is_not_greeted_for_it(
    serve: Callable[..., ControlServer], book: Callable[..., PeerBook]
) -> None:
    """In mode off it answers every peek like that: a hello each time would change nothing."""
    engine, peers, peer = met(serve, book)
    engine.start_id, engine.generation, engine.refuses_hellos = "", 0, True
    assert peers.peek(peer, "s", [b"a"]).result(10).start_id == ""
    assert peers.get("decode-0") == peer


def test_closing_waits_for_questions_in_flight(
    serve: Callable[..., ControlServer],
) -> None:
    """Their sockets must not be closed under them; those that have not begun are cancelled."""
    engine = Engine()
    engine.wait = threading.Event()
    server = serve(engine)
    peers = PeerBook({"decode-0": server.address}, PRINT, engine_id="mine", ask_timeout_s=0.2)
    peers.start()
    peer = until(peers, "decode-0", PeerState.COMPATIBLE)
    asked = [peers.peek(peer, "s", [b"a"]) for _ in range(12)]
    peers.close()
    assert all(future.done() for future in asked)
    engine.wait.set()


def test_a_book_without_peers_starts_no_thread() -> None:
    """A single engine asks nobody."""
    before = threading.active_count()
    peers = PeerBook({}, PRINT, engine_id="mine", ask_timeout_s=1)
    peers.start()
    assert threading.active_count() == before
    peers.close()
