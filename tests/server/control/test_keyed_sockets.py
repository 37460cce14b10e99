"""Real sockets with keys: who gets in, who is told why not, and that all of it is counted."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import selectors
import socket as sockets
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Self

import pytest

from tests.server.control.conftest import Serve
from turncache.errors import ConfigError, EngineFault, EngineRefusal
from turncache_server.control.client import AsyncControlClient, ControlClient
from turncache_server.control.keys import FleetKeys, derive_keys
from turncache_server.control.messages import (
    MAX_MESSAGE_BYTES,
    Call,
    CallReply,
    Peek,
    PeekReply,
    Reply,
    Request,
)
from turncache_server.control.server import ControlServer

FLEET = derive_keys(b"the secret of this fleet")
OTHER = derive_keys(b"the secret of another fleet")
#: Knows whom to ask, as whoever sees the server's key would, and has no client key.
STRANGER = replace(FLEET, client_public=OTHER.client_public, client_secret=OTHER.client_secret)
Ask = Callable[..., Any]
QUESTION = Call(request="r")


def echo(request: Request) -> Reply:
    """Answer a call question with its id as the reason."""
    match request:
        case Call():
            return CallReply(found=True, reason=request.request)
        case Peek():
            return PeekReply(start_id="s", generation=1, block_ids=[], epochs=[])
        case _:
            raise LookupError


def sync_ask(keys: FleetKeys | None, address: str, *, timeout_s: float = 5, **options: Any) -> Any:
    """Ask one question from this thread."""
    client = ControlClient(keys, **options)
    try:
        return client.ask(address, QUESTION, CallReply, timeout_s=timeout_s)
    finally:
        client.close()


def async_ask(keys: FleetKeys | None, address: str, *, timeout_s: float = 5, **options: Any) -> Any:
    """Ask one question from an event loop."""

    async def run() -> Any:
        client = AsyncControlClient(keys, **options)
        try:
            return await client.ask(address, QUESTION, CallReply, timeout_s=timeout_s)
        finally:
            await client.close()

    return asyncio.run(run())


@pytest.fixture(params=[sync_ask, async_ask], ids=["thread", "asyncio"])
def ask(request: pytest.FixtureRequest) -> Ask:
    """One question through either client."""
    asked: Ask = request.param
    return asked


@pytest.fixture
def keyed(serve: Serve) -> ControlServer:
    """An engine of the fleet."""
    return serve(echo, keys=FLEET, name="decode-0")


def until(condition: Callable[[], bool]) -> None:
    """Wait for another thread."""
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "waited for 20 s"
        time.sleep(0.005)


def test_who_has_the_secret_is_answered(ask: Ask, keyed: ControlServer) -> None:
    """Engine and asker have derived their keys from the same secret, and nothing was dropped."""
    assert ask(FLEET, keyed.address).reason == "r"
    assert set(keyed.dropped.values()) == {0}
    assert keyed.counters()["control_questions"] == 1


def test_questions_that_are_still_being_sent_are_refused_with_the_first(
    keyed: ControlServer,
) -> None:
    """Their socket is closed under them: that is no cancellation, and no error stays unheard."""
    unheard: list[dict[str, Any]] = []

    async def ask_late(client: AsyncControlClient, number: int) -> None:
        await asyncio.sleep(0.0002 * number)
        with pytest.raises(EngineRefusal):
            await client.ask(keyed.address, QUESTION, CallReply, timeout_s=5)

    async def run() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, found: unheard.append(found))
        for _ in range(6):
            client = AsyncControlClient()
            await asyncio.gather(*(ask_late(client, number) for number in range(50)))
            await client.close()

    asyncio.run(run())
    gc.collect()
    assert unheard == []


@pytest.mark.parametrize(
    ("there", "here", "why"),
    [
        pytest.param(FLEET, None, "it has a fleet secret and this side has none", id="none-here"),
        pytest.param(None, FLEET, "it has another one or none", id="none-there"),
        pytest.param(FLEET, OTHER, "it has another one or none", id="different"),
        pytest.param(FLEET, STRANGER, "the key is not one of that fleet", id="stranger"),
    ],
)
def test_secrets_that_do_not_fit_are_said_and_counted(
    there: FleetKeys | None, here: FleetKeys | None, why: str, ask: Ask, serve: Serve
) -> None:
    """Long before the deadline the asker learns what to change; the engine counts it."""
    server = serve(echo, keys=there)
    began = time.monotonic()
    with pytest.raises(EngineRefusal, match=why) as caught:
        ask(here, server.address, timeout_s=30)
    assert time.monotonic() - began < 15
    assert caught.value.code == "unauthenticated"
    assert caught.value.engine == server.address
    until(lambda: server.dropped["unauthenticated"] > 0)
    assert server.num_questions == 0


def test_a_short_deadline_still_ends_in_the_reason(ask: Ask, keyed: ControlServer) -> None:
    """A router asks with 100 ms: less than it takes to be sure, enough to say what was seen."""
    deadline = time.monotonic() + 20
    while True:
        # On a busy machine 90 ms may pass before anything was seen at all.
        assert time.monotonic() < deadline
        with pytest.raises(EngineFault) as caught:
            ask(OTHER, keyed.address, timeout_s=0.09)
        if "it has another one or none" in str(caught.value):
            break
    assert isinstance(caught.value, EngineRefusal)


def test_nobody_there_is_not_taken_for_another_secret(ask: Ask, serve: Serve) -> None:
    """An engine that has not started is silent."""
    gone = serve(echo, keys=FLEET)
    gone.close()
    with pytest.raises(EngineFault, match="no answer") as caught:
        ask(FLEET, gone.address, timeout_s=0.3)
    assert not isinstance(caught.value, EngineRefusal)


def test_others_are_served_while_strangers_knock(keyed: ControlServer) -> None:
    """A failed handshake is nobody else's, and not the engine's."""
    client = ControlClient(FLEET)
    for stranger in (OTHER, None, STRANGER):
        with pytest.raises(EngineRefusal):
            sync_ask(stranger, keyed.address, timeout_s=10)
        assert client.ask(keyed.address, QUESTION, CallReply, timeout_s=5).found
    client.close()
    until(lambda: keyed.dropped["unauthenticated"] >= 3)
    assert keyed.num_questions == 3


def test_noise_on_the_port_is_cut_off(keyed: ControlServer) -> None:
    """What does not even speak ZMQ loses its connection."""
    host, port = keyed.address.removeprefix("tcp://").rsplit(":", 1)
    with sockets.create_connection((host, int(port)), timeout=20) as noise:
        noise.sendall(b"GET / HTTP/1.1\r\nHost: engine\r\n\r\n" * 4)
        with contextlib.suppress(ConnectionResetError):
            while noise.recv(4096):
                pass
    assert sync_ask(FLEET, keyed.address).found
    assert keyed.num_questions == 1


def test_a_handshake_without_keys_is_counted(keyed: ControlServer) -> None:
    """A program that speaks ZMQ and skips the proof, written by hand."""
    host, port = keyed.address.removeprefix("tcp://").rsplit(":", 1)
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
    ready = b"\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"
    with sockets.create_connection((host, int(port)), timeout=20) as bare:
        bare.sendall(greeting + ready + b"\x00\x03abc")
        until(lambda: keyed.dropped["unauthenticated"] == 1)
    assert keyed.num_questions == 0


def test_nothing_crosses_the_wire_in_the_clear(keyed: ControlServer) -> None:
    """Whoever listens on the network reads neither the question nor the answer."""
    with _Tap(keyed.address) as tap:
        client = ControlClient(FLEET)
        asked = Call(request="a-session-nobody-should-read")
        assert client.ask(tap.address, asked, CallReply, timeout_s=5).found
        client.close()
        assert b"nobody-should-read" not in bytes(tap.seen)
        assert len(tap.seen) > 200


def test_what_was_recorded_cannot_be_played_again(keyed: ControlServer) -> None:
    """The bytes of a whole conversation, sent again, are no handshake."""
    with _Tap(keyed.address) as tap:
        client = ControlClient(FLEET)
        assert client.ask(tap.address, QUESTION, CallReply, timeout_s=5).found
        client.close()
        recorded = bytes(tap.seen_from_asker)
    asked = keyed.num_questions
    host, port = keyed.address.removeprefix("tcp://").rsplit(":", 1)
    with sockets.create_connection((host, int(port))) as again:
        again.sendall(recorded)
        until(lambda: keyed.dropped["unauthenticated"] == 1)
    assert keyed.num_questions == asked


def test_an_engine_of_another_name_refuses(ask: Ask, keyed: ControlServer) -> None:
    """A wrong address in the settings is found by the first question, keys or not."""
    right, wrong = {keyed.address: "decode-0"}, {keyed.address: "decode-1"}
    assert ask(FLEET, keyed.address, names=right).found
    with pytest.raises(EngineRefusal, match="this is decode-0, the question is for decode-1") as c:
        ask(FLEET, keyed.address, names=wrong)
    assert c.value.code == "other_engine"
    assert keyed.dropped["other_engine"] == 1


def test_an_engine_without_a_name_takes_any(serve: Serve) -> None:
    """Names are checked where both sides have one."""
    server = serve(echo)
    assert sync_ask(None, server.address, names={server.address: "decode-0"}).found


def test_an_event_loop_asks_again_when_the_secret_has_been_put_right(serve: Serve) -> None:
    """The router goes on asking the same address; a restarted engine with the secret answers."""

    async def run() -> None:
        client = AsyncControlClient(FLEET)
        server = serve(echo)
        for _ in range(3):
            with pytest.raises(EngineRefusal, match="another one or none"):
                await client.ask(server.address, QUESTION, CallReply, timeout_s=10)
        await asyncio.to_thread(server.close)
        right = ControlServer(server.address, echo, keys=FLEET)
        right.start()
        assert (await client.ask(right.address, QUESTION, CallReply, timeout_s=10)).found
        await asyncio.to_thread(right.close)
        wrong = ControlServer(server.address, echo, keys=OTHER)
        wrong.start()
        with pytest.raises(EngineRefusal, match="another one"):
            await client.ask(wrong.address, QUESTION, CallReply, timeout_s=10)
        await client.close()
        await asyncio.to_thread(wrong.close)

    asyncio.run(run())


def test_beyond_loopback_only_with_keys() -> None:
    """Listening on the network without keys is refused; with keys it is not."""
    with pytest.raises(ConfigError, match="fleet_secret_file"):
        ControlServer("tcp://0.0.0.0:5800", echo)
    server = ControlServer("tcp://0.0.0.0:0", echo, keys=FLEET)
    server.start()
    port = server.address.rpartition(":")[2]
    assert sync_ask(FLEET, f"tcp://127.0.0.1:{port}").found
    server.close()


def test_ipv6_loopback_works(ask: Ask) -> None:
    """Where the machine has it."""
    try:
        server = ControlServer("tcp://[::1]:0", echo, keys=FLEET)
    except ConfigError:
        pytest.skip("no IPv6 on this machine")
    server.start()
    assert ask(FLEET, server.address).found
    server.close()


def test_an_answer_above_the_bound_is_not_taken_in(serve: Serve) -> None:
    """A question that is too large is not even sent, with keys as without."""
    server = serve(echo, keys=FLEET)
    client = ControlClient(FLEET)
    huge = Peek(session="s", hashes=[bytes(MAX_MESSAGE_BYTES)])
    with pytest.raises(EngineFault, match="too_large"):
        client.ask(server.address, huge, PeekReply, timeout_s=5)
    client.close()


class _Tap:
    """Passes bytes through to a control socket and keeps what it saw."""

    def __init__(self, target: str) -> None:
        host, port = target.removeprefix("tcp://").rsplit(":", 1)
        self._target = (host, int(port))
        self._listener = sockets.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self.seen = bytearray()
        self.seen_from_asker = bytearray()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        asker, _ = self._listener.accept()
        engine = sockets.create_connection(self._target)
        with asker, engine, selectors.DefaultSelector() as ready:
            ready.register(asker, selectors.EVENT_READ, engine)
            ready.register(engine, selectors.EVENT_READ, asker)
            while True:
                for key, _ in ready.select():
                    source = key.fileobj
                    assert isinstance(source, sockets.socket)
                    try:
                        data = source.recv(65536)
                    except ConnectionError:
                        return
                    if not data:
                        return
                    self.seen += data
                    if source is asker:
                        self.seen_from_asker += data
                    key.data.sendall(data)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.join(10)
        self._listener.close()


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    """Every thread of a server has ended with its test."""
    yield
    until(lambda: all(t.name != "turncache-control" for t in threading.enumerate()))
