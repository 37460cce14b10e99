"""Peers whose keys, names or versions do not fit: incompatible, with words that say why."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

from tests.server.connector.peer_fakes import confirms, hello, holds
from turncache.protocol import Reason
from turncache_server.connector.costs import PullCosts
from turncache_server.connector.peers import Peer, PeerBook, PeerState
from turncache_server.connector.pull import PullBook
from turncache_server.control.keys import FleetKeys, derive_keys
from turncache_server.control.messages import Hello, Peek, Reply, Request, Verify
from turncache_server.control.server import ControlServer

FLEET = derive_keys(b"the secret of this fleet")
OTHER = derive_keys(b"the secret of another fleet")
PRINT = {"vllm": "0.32.0"}


def engine(request: Request) -> Reply:
    """Answer as a compatible engine."""
    match request:
        case Hello():
            return hello(fingerprint=PRINT)
        case Peek():
            return holds(len(request.hashes))
        case Verify():
            return confirms(len(request.hashes))
        case _:
            raise LookupError


@pytest.fixture
def serve() -> Iterator[Callable[..., ControlServer]]:
    """Start engines; they end with the test."""
    with contextlib.ExitStack() as stack:

        def start(address: str = "tcp://127.0.0.1:0", **options: Any) -> ControlServer:
            server = ControlServer(address, engine, **options)
            stack.callback(server.close)
            server.start()
            return server

        yield start


@pytest.fixture
def book() -> Iterator[Callable[..., PeerBook]]:
    """Start peer books; they end with the test."""
    with contextlib.ExitStack() as stack:

        def start(peers: Mapping[str, str], keys: FleetKeys | None = None) -> PeerBook:
            made = PeerBook(peers, PRINT, engine_id="mine", ask_timeout_s=5, keys=keys)
            stack.callback(made.close)
            made.start()
            return made

        yield start


def until(book: PeerBook, state: PeerState) -> Peer:
    """Wait until the only peer is in a state."""
    deadline = time.monotonic() + 20
    while (record := book.all()[0]).state is not state:
        assert time.monotonic() < deadline, f"{record.state}: {record.why}"
        time.sleep(0.01)
    return record


def test_a_fleet_with_one_secret_exchanges_kv(
    serve: Callable[..., ControlServer], book: Callable[..., PeerBook]
) -> None:
    """Hello, peek and verify with keys and names."""
    server = serve(keys=FLEET, name="decode-0")
    peers = book({"decode-0": server.address}, FLEET)
    peer = until(peers, PeerState.COMPATIBLE)
    assert peers.peek(peer, "s", [b"a", b"b"]).result(10) == holds(2)
    question = Verify(start_id="x", generation=1, block_ids=[1], epochs=[1], hashes=[b"a"])
    assert peers.verify(peer, question).result(10) == confirms(1)
    assert set(peers.counters().values()) == {0}


@pytest.mark.parametrize(
    ("secrets", "why"),
    [
        ((FLEET, None), "it has a fleet secret and this side has none"),
        ((None, FLEET), "it has another one or none"),
        ((FLEET, OTHER), "it has another one or none"),
    ],
    ids=["none-here", "none-there", "different"],
)
def test_a_peer_with_another_secret_is_incompatible(
    secrets: tuple[FleetKeys | None, FleetKeys | None],
    why: str,
    serve: Callable[..., ControlServer],
    book: Callable[..., PeerBook],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """One line says what to change, the refusals are counted, and a call's reason is the same."""
    caplog.set_level(logging.WARNING)
    there, here = secrets
    peers = book({"decode-0": serve(keys=there).address}, here)
    record = until(peers, PeerState.INCOMPATIBLE)
    assert why in record.why
    while peers.counters()["peer_hellos_refused_unauthenticated"] < 3:
        peers.hurry()
        time.sleep(0.01)
    said = [record.getMessage() for record in caplog.records]
    lines = [line for line in said if why in line]
    # Said once more by a peer that was silent in between, as it is on a machine that is busy.
    assert 1 <= len(lines) <= 1 + sum("does not answer" in line for line in said)
    assert "decode-0" in lines[0]
    pulls = PullBook(peers, block_size=4, threshold_tokens=4, timeout_s=1, costs=PullCosts())
    # A hello of this loop that is answered late leaves the peer unseen until the next one.
    deadline = time.monotonic() + 20
    while pulls.start("r", "s", "decode-0", [b"a"], 0.0) is not Reason.INCOMPATIBLE:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_wrong_address_is_noticed_by_its_name(
    serve: Callable[..., ControlServer], book: Callable[..., PeerBook]
) -> None:
    """Another engine of the fleet answers there: nothing is pulled from it by mistake."""
    server = serve(keys=FLEET, name="decode-1")
    peers = book({"decode-0": server.address}, FLEET)
    record = until(peers, PeerState.INCOMPATIBLE)
    assert "this is decode-1, the question is for decode-0" in record.why
    assert peers.counters()["peer_hellos_refused_other_engine"] >= 1
    assert server.dropped["other_engine"] >= 1


def test_a_peer_that_is_put_right_may_be_pulled_from(
    serve: Callable[..., ControlServer], book: Callable[..., PeerBook]
) -> None:
    """Restarted with the secret, it is compatible without anything being done here."""
    server = serve()
    peers = book({"decode-0": server.address}, FLEET)
    until(peers, PeerState.INCOMPATIBLE)
    server.close()
    serve(server.address, keys=FLEET, name="decode-0")
    until(peers, PeerState.COMPATIBLE)
