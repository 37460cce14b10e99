"""A flood neither grows memory, nor shuts others out, nor takes the interpreter."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest
import zmq

from tests.server.control.conftest import Serve
from turncache.errors import EngineRefusal
from turncache_server.control.client import ControlClient, switch_mode
from turncache_server.control.keys import FleetKeys, derive_keys
from turncache_server.control.messages import (
    CONTROL_VERSION,
    DROP_CODES,
    Call,
    CallReply,
    ModeReply,
    Refusal,
    Reply,
    Request,
    SetMode,
    encode,
)
from turncache_server.control.pace import Pace

KEYS = [None, derive_keys(b"the secret of this fleet")]
MIB = 1024 * 1024


class Flood:
    """Sends without reading an answer."""

    def __init__(self, address: str, keys: FleetKeys | None) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        for option, value in ((zmq.LINGER, 0), (zmq.SNDHWM, 1), (zmq.RCVHWM, 1)):
            self._socket.setsockopt(option, value)
        if keys is not None:
            keys.ask_with(self._socket)
        self._socket.connect(address)

    def send_all(self, data: bytes, *, within_s: float = 0.3, at_most: int = 100_000) -> int:
        """Send until nothing has gone out for ``within_s``; returns how many did."""
        count = 0
        while count < at_most and self._socket.poll(int(within_s * 1000), zmq.POLLOUT):
            self._socket.send(data)
            count += 1
        return count

    def close(self) -> None:
        self._context.destroy(linger=0)


@pytest.fixture(params=KEYS, ids=["plain", "keyed"])
def keys(request: pytest.FixtureRequest) -> FleetKeys | None:
    """With and without keys."""
    found: FleetKeys | None = request.param
    return found


@pytest.fixture
def flood() -> Iterator[Callable[..., Flood]]:
    """Make floods; they end with the test."""
    made: list[Flood] = []

    def make(address: str, keys: FleetKeys | None) -> Flood:
        made.append(Flood(address, keys))
        return made[-1]

    yield make
    for one in made:
        one.close()


def echo(request: Request) -> Reply:
    """Answer a call question with its id as the reason."""
    assert isinstance(request, Call)
    return CallReply(found=True, reason=request.request)


def test_what_waits_is_bounded_while_the_engine_does_not_answer(
    serve: Serve, flood: Callable[..., Flood], keys: FleetKeys | None
) -> None:
    """The rest stays at the sender: a connection holds a few questions here, not gigabytes."""
    let_go = threading.Event()

    def stuck(request: Request) -> Reply:
        assert let_go.wait(30)
        return echo(request)

    server = serve(stuck, keys=keys)
    data = encode(1, Call(request="x" * (4 * MIB)))
    sent = flood(server.address, keys).send_all(data, at_most=200)
    let_go.set()
    # Four here, one in the handler, a few in what the kernel and the sender buffer.
    assert 0 < sent <= 40


def test_another_asker_is_served_during_a_flood(
    serve: Serve, flood: Callable[..., Flood], keys: FleetKeys | None
) -> None:
    """ZMQ takes turns between connections, and answers that nobody takes are dropped."""
    server = serve(echo, keys=keys)
    stop = threading.Event()
    attacker = flood(server.address, keys)
    data = encode(1, Call(request="x" * 1000))

    def send() -> None:
        while not stop.is_set():
            attacker.send_all(data, within_s=0.05, at_most=100)

    thread = threading.Thread(target=send)
    thread.start()
    client = ControlClient(keys)
    try:
        for n in range(20):
            reply = client.ask(server.address, Call(request=f"r{n}"), CallReply, timeout_s=20)
            assert reply.reason == f"r{n}"
    finally:
        stop.set()
        thread.join()
        client.close()
    assert server.num_questions > 20


def test_answers_that_nobody_takes_are_dropped_and_counted(
    serve: Serve, flood: Callable[..., Flood]
) -> None:
    """An asker that does not read costs a bounded queue of answers."""
    server = serve(lambda _: CallReply(found=True, reason="x" * MIB))
    flood(server.address, None).send_all(encode(1, Call(request="r")), at_most=200)
    deadline = time.monotonic() + 20
    while server.dropped["unsent"] == 0:
        assert time.monotonic() < deadline, server.counters()
        time.sleep(0.01)


def test_work_beyond_the_pace_waits(serve: Serve, flood: Callable[..., Flood]) -> None:
    """The thread rests between questions, is counted doing so, and closes at once all the same."""

    def busy(request: Request) -> Reply:
        until = time.thread_time() + 0.002
        while time.thread_time() < until:
            pass
        return echo(request)

    server = serve(busy, pace=Pace(share=0.01, burst_s=0.01))
    flood(server.address, None).send_all(encode(1, Call(request="r")), at_most=50)
    deadline = time.monotonic() + 20
    while server.counters()["control_rested_s"] == 0:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    began = time.monotonic()
    server.close()
    assert time.monotonic() - began < 4


def test_every_drop_has_a_counter_from_the_start(serve: Serve) -> None:
    """A rate that is shown for the first time when it matters would be missed."""
    assert set(serve(echo).counters()) == {
        "control_questions",
        "control_rested_s",
        *(f"control_dropped_{code}" for code in DROP_CODES),
    }


def test_a_refusal_of_the_handler_is_counted_by_its_code(serve: Serve) -> None:
    """What the engine's own service refuses is a drop too."""
    server = serve(lambda _: Refusal(code="stale", why="too late"))
    client = ControlClient()
    with pytest.raises(EngineRefusal, match=r"refused \(stale\): too late"):
        client.ask(server.address, Call(request="r"), CallReply, timeout_s=5)
    client.close()
    assert server.dropped["stale"] == 1


def test_switching_a_mode_asks_for_the_ticket_first(serve: Serve) -> None:
    """One call does both; a change without a ticket is refused, except from version 1."""
    seen: list[SetMode] = []

    def engine(request: Request) -> Reply:
        assert isinstance(request, SetMode)
        seen.append(request)
        return ModeReply(mode=request.mode or "on", ticket="t:0")

    server = serve(engine)
    client = ControlClient()
    assert switch_mode(client, server.address, "off", timeout_s=5).mode == "off"
    assert seen == [SetMode(), SetMode(mode="off", ticket="t:0")]
    with pytest.raises(EngineRefusal, match="without a ticket"):
        client.ask(server.address, SetMode(mode="on"), ModeReply, timeout_s=5)
    client.close()
    assert len(seen) == 2
    with zmq.Context() as context, context.socket(zmq.DEALER) as old:
        old.setsockopt(zmq.LINGER, 0)
        old.connect(server.address)
        old.send(encode(3, SetMode(mode="on"), version=CONTROL_VERSION - 1))
        assert old.poll(5000)
    assert seen[-1] == SetMode(mode="on")
