"""A peer book whose answers the test gives, and the values that a pull needs."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

from turncache_server.connector.peers import Peer, PeerState
from turncache_server.control.messages import HelloReply, PeekReply, Verify, VerifyReply

START = "start-1"


def hello(**changes: Any) -> HelloReply:
    """Return the hello of a compatible decode engine."""
    base: dict[str, Any] = {
        "engine_id": "decode-0",
        "start_id": START,
        "generation": 1,
        "side": "decode",
        "mode": "on",
        "fingerprint": {},
        "nixl_host": "127.0.0.1",
        "nixl_port": 5600,
        "tp_size": 1,
        "block_size": 4,
    }
    return HelloReply(**{**base, **changes})


def compatible(name: str = "decode-0", **changes: Any) -> Peer:
    """Return a peer that may be pulled from."""
    return Peer(
        name=name,
        control_address="tcp://127.0.0.1:1",
        state=PeerState.COMPATIBLE,
        hello=hello(**changes),
    )


def holds(count: int, *, known: int | None = None, **changes: Any) -> PeekReply:
    """Return the answer of a source that holds ``count`` leading blocks."""
    base: dict[str, Any] = {
        "start_id": START,
        "generation": 1,
        "block_ids": [100 + i for i in range(count)],
        "epochs": [1000 + i for i in range(count)],
        "known": count if known is None else known,
    }
    return PeekReply(**{**base, **changes})


def confirms(valid: int, *, rest: bool = False) -> VerifyReply:
    """Return the answer of a source at which ``valid`` leading blocks are unchanged."""
    return VerifyReply(start_id=START, generation=1, valid=valid, rest=rest)


@dataclass
class FakePeers:
    """Stands for PeerBook: hands out futures that the test resolves.

    Attributes:
        peeks: (session, hashes, future) in the order of the questions.
        verifies: (question, future) in the order of the questions.
        hurried: how often a new hello was asked for.
    """

    records: dict[str, Peer] = field(default_factory=lambda: {"decode-0": compatible()})
    peeks: list[tuple[str, list[bytes], Future[PeekReply]]] = field(default_factory=list)
    verifies: list[tuple[Verify, Future[VerifyReply]]] = field(default_factory=list)
    hurried: int = 0

    def start(self) -> None:
        """Nothing to start."""

    def close(self) -> None:
        """Nothing to close."""

    def get(self, name: str) -> Peer | None:
        """Return a record."""
        return self.records.get(name)

    def all(self) -> list[Peer]:
        """Return every record."""
        return list(self.records.values())

    def hurry(self) -> None:
        """Count."""
        self.hurried += 1

    def peek(self, peer: Peer, session: str, hashes: list[bytes]) -> Future[PeekReply]:
        """Keep the question."""
        future: Future[PeekReply] = Future()
        self.peeks.append((session, hashes, future))
        return future

    def verify(self, peer: Peer, question: Verify) -> Future[VerifyReply]:
        """Keep the question."""
        future: Future[VerifyReply] = Future()
        self.verifies.append((question, future))
        return future

    def become(self, name: str, **changes: Any) -> None:
        """Replace members of a record."""
        self.records[name] = replace(self.records[name], **changes)


@dataclass(eq=False)
class FakeBlock:
    """A KV cache block, as far as a pull looks at it."""

    block_id: int


@dataclass(eq=False)
class FakeRequest:
    """A request, as far as a pull looks at it."""

    request_id: str
    num_computed_tokens: int = 0
