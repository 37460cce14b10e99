"""Two engines that know each other over real control sockets on loopback."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.builders import BLOCK, Engine, World, tokens, world
from tests.scheduler.test_metrics import Exposed
from turncache.protocol import Reason
from turncache_server.connector.peers import PeerState
from turncache_server.control.client import ControlClient, switch_mode
from turncache_server.control.messages import (
    Call,
    CallReply,
    Hello,
    HelloReply,
    Lacking,
    LackingReply,
    Repeated,
    Stats,
    StatsReply,
)

MODES = pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])


@pytest.fixture
def made() -> Iterator[World]:
    """A clock and a wire."""
    with world() as made:
        yield made


@pytest.fixture
def client() -> Iterator[ControlClient]:
    """Asks as a router does."""
    client = ControlClient()
    yield client
    client.close()


def free_address() -> str:
    """Return a loopback address that nobody listens at, nor at the next port."""
    while True:
        with socket.socket() as probe, socket.socket() as beside:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
            try:
                beside.bind(("127.0.0.1", port + 1))
            except (OSError, OverflowError):
                continue
            return f"tcp://127.0.0.1:{port}"


def until(condition: Callable[[], bool]) -> None:
    """Wait for another thread."""
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "waited for 20 s"
        time.sleep(0.01)


def connected(made: World, **kwargs: Any) -> tuple[Engine, Engine]:
    """Make two engines that list each other, and wait until they have greeted."""
    addresses = {"prefill-0": free_address(), "decode-0": free_address()}
    engines = []
    for name, side in (("prefill-0", "prefill"), ("decode-0", "decode")):
        settings = {
            "side": side,
            "control_address": addresses[name],
            "peers": {other: at for other, at in addresses.items() if other != name},
        }
        engines.append(Engine(made, name, settings=settings, **kwargs))
    for engine in engines:
        until(lambda engine=engine: state_of(engine) is PeerState.COMPATIBLE)  # type: ignore[misc]
    return engines[0], engines[1]


def book(engine: Engine) -> Any:
    """Return an engine's peer book."""
    return engine.connector.connector_scheduler._peers


def state_of(engine: Engine) -> PeerState:
    """Return how an engine's only peer stands with it."""
    (peer,) = book(engine).all()
    state: PeerState = peer.state
    return state


def address(engine: Engine) -> str:
    """Return an engine's control address."""
    control = engine.connector.connector_scheduler._control
    assert control is not None
    found: str = control.address
    return found


@MODES
def test_a_return_over_real_sockets(asynchronous: bool, made: World) -> None:
    """Peek and verify travel over ZMQ while the engine goes on stepping."""
    prefill, decode = connected(made, async_scheduling=asynchronous)
    exposed = Exposed(prefill, nixl=True)
    history = decode.call("d", tokens(60), session="s", max_tokens=8)
    prefill.call("p", [*history, *tokens(10, start=4)], session="s", source="decode-0")
    record = prefill.record("p")
    assert record.returned == 60 + 8 - 1
    assert record.lost == 0
    assert exposed["turncache_peek_seconds_count"] == 1
    assert 0 < exposed["turncache_peek_seconds_sum"] < 20
    for engine in (prefill, decode):
        engine.assert_no_leak()


def test_a_hand_over_is_kept_until_it_was_taken(made: World) -> None:
    """Prefill's pool is flooded before decode asks; after its verify nothing is kept."""
    prefill, decode = connected(made)
    prefill.call("p", tokens(60), session="s", retain_s=0.0, handover=True)
    prefill.flood(3 * prefill.num_blocks)
    decode.call("d", tokens(60), session="s", source="prefill-0")
    assert decode.record("d").returned == 60 - 1
    prefill.call("any", tokens(5, start=8))
    assert prefill.extension.gauges()["retained_blocks"] == 0
    for engine in (prefill, decode):
        engine.assert_no_leak()


def test_the_router_hears_who_waits_and_says_who_has_computed(
    made: World, client: ControlClient
) -> None:
    """A prompt that is lost before it was pulled, over real sockets; prefill never waits."""
    prefill, decode = connected(made)
    prompt = tokens(60)
    request = decode.add("d", prompt, session="s", source="prefill-0", repeat_s=30.0)

    def waiting(engine: Engine = decode) -> list[str]:
        return client.ask(address(engine), Lacking(), LackingReply, timeout_s=5).requests

    decode.run(lambda: waiting() == ["d"])
    assert waiting(prefill) == []
    prefill.call("p", prompt, session="s", retain_s=0.0, handover=True)
    said = Repeated(request="d", source="prefill-0")
    left = client.ask(address(decode), said, LackingReply, timeout_s=5).requests
    assert left == []
    decode.run(request.is_finished)
    assert decode.record("d").returned == 60 - 1
    for engine in (prefill, decode):
        engine.assert_no_leak()


def test_the_router_reads_modes_records_and_numbers(made: World, client: ControlClient) -> None:
    """The control socket of a real connector."""
    prefill, _ = connected(made)
    prefill.call("call-1", tokens(30), session="s")
    at = address(prefill)
    reply = client.ask(at, Call(request="call-1"), CallReply, timeout_s=5)
    assert (reply.found, reply.done, reply.prompt, reply.computed) == (True, True, 30, 30)
    hello = client.ask(at, Hello(), HelloReply, timeout_s=5)
    assert (hello.engine_id, hello.side, hello.block_size) == ("prefill-0", "prefill", BLOCK)
    assert hello.nixl_port > 0
    stats = client.ask(at, Stats(), StatsReply, timeout_s=5)
    assert stats.counters["calls"] == 1
    assert stats.gauges["retained_blocks"] == 30 // BLOCK + 1, "the last one is not full"
    assert switch_mode(client, at, "off", timeout_s=5).mode == "off"
    prefill.call("call-2", tokens(30), session="s")
    assert prefill.record("call-2").reason is Reason.DISABLED


def test_an_incompatible_engine_is_not_pulled_from(
    made: World, caplog: pytest.LogCaptureFixture
) -> None:
    """Equal tokens under another rope give other KV: both values are said in one line."""
    addresses = {"prefill-0": free_address(), "decode-0": free_address()}
    prefill = Engine(
        made,
        "prefill-0",
        settings={
            "control_address": addresses["prefill-0"],
            "peers": {"decode-0": addresses["decode-0"]},
        },
    )
    decode = Engine(
        made,
        "decode-0",
        settings={"control_address": addresses["decode-0"]},
        hf_overrides={"rope_theta": 12345.0},
    )
    until(lambda: state_of(prefill) is PeerState.INCOMPATIBLE)
    decode.call("d", tokens(60), session="s")
    prefill.call("p", tokens(60), session="s", source="decode-0")
    assert prefill.record("p").reason is Reason.INCOMPATIBLE
    (peer,) = book(prefill).all()
    assert peer.why.startswith("model_config: ")
    assert made.transfers == []


def test_ranks_of_one_configuration_are_engines_of_their_own(
    made: World, client: ControlClient
) -> None:
    """Each has a control socket, a name and a NIXL port, so that a rank can be pulled from."""
    host, _, port = free_address().rpartition(":")
    settings = {"control_address": f"{host}:{port}", "name": "decode-0", "side": "decode"}
    ranks = [
        Engine(made, f"decode-0-{n}", settings=settings, data_parallel_index=n) for n in range(2)
    ]
    hellos = []
    for number, rank in enumerate(ranks):
        assert address(rank) == f"{host}:{int(port) + number}"
        hellos.append(client.ask(address(rank), Hello(), HelloReply, timeout_s=5))
    assert [hello.name for hello in hellos] == ["decode-0", "decode-0_dp1"]
    assert hellos[1].nixl_port == hellos[0].nixl_port + 1
    peers = {hello.name: address(rank) for hello, rank in zip(hellos, ranks, strict=True)}
    prefill = Engine(made, "prefill-0", settings={"side": "prefill", "peers": peers})
    until(lambda: all(p.state is PeerState.COMPATIBLE for p in book(prefill).all()))
    history = ranks[1].call("d", tokens(60), session="s", max_tokens=8)
    prefill.call("p", history, session="s", source="decode-0_dp1")
    assert prefill.record("p").returned > 0


def test_an_engine_that_restarts_is_greeted_again(made: World) -> None:
    """The old process is gone, the new one holds nothing: the call computes, the next returns."""
    prefill, decode = connected(made)
    at = address(decode)
    decode.call("d", tokens(60), session="s")
    decode.close()
    del made.engines["decode-0"]
    prefill.call("p1", tokens(60), session="s", source="decode-0", retain_s=0.0)
    assert prefill.record("p1").reason is Reason.SOURCE_GONE
    decode = Engine(made, "decode-0-anew", settings={"control_address": at})
    decode.call("d", tokens(60), session="s")
    start_id = decode.source.start_id

    def greeted() -> bool:
        book(prefill).hurry()
        (peer,) = book(prefill).all()
        return peer.state is PeerState.COMPATIBLE and peer.hello.start_id == start_id

    until(greeted)
    made.now_s += 3
    prefill.scheduler.reset_prefix_cache()
    prefill.call("p2", tokens(60), session="s", source="decode-0")
    assert prefill.record("p2").returned == 60 - 1
    for engine in (prefill, decode):
        engine.assert_no_leak()


def test_a_retention_engine_answers_too(made: World, client: ControlClient) -> None:
    """One ordinary vLLM has modes, records and numbers, and exchanges KV with nobody."""
    at = free_address()
    engine = Engine(made, connector="ClockedRetention", settings={"control_address": at})
    engine.call("call-1", tokens(30), session="s")
    assert client.ask(at, Call(request="call-1"), CallReply, timeout_s=5).done
    hello = client.ask(at, Hello(), HelloReply, timeout_s=5)
    assert (hello.nixl_host, hello.nixl_port, hello.fingerprint) == ("", 0, {})
    engine.assert_no_leak()
