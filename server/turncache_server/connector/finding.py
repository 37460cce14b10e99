"""Finding the engine that holds a session's KV, where no hint of a call names it.

Behind a router that is not ours nobody tells an engine where a session was before. A
*directory* names candidates, and every one of them is peeked at; what they say is verified
like any other pull, so that a directory which is late, empty or wrong costs a recompute and
nothing else. Directory and peers are asked off the engine thread, which only looks whether
there is a result.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from typing import Final, Protocol

from turncache.errors import EngineFault
from turncache.protocol import Reason
from turncache_server.connector.peers import Peer, PeerBook, PeerState
from turncache_server.control.messages import PeekReply

logger = logging.getLogger(__name__)

#: Candidates of one call. Each is asked about the whole prompt.
MAX_CANDIDATES: Final = 8


@dataclass(frozen=True, slots=True)
class Ask:
    """A peek under way: at whom, and its answer to be."""

    peer: Peer
    reply: Future[PeekReply]


@dataclass(frozen=True, slots=True)
class Found:
    """What a search has led to.

    Attributes:
        asks: peeks at the candidates.
        reason: why there are none; None when nobody is known to hold anything.
    """

    asks: tuple[Ask, ...] = ()
    reason: Reason | None = None


class Directory(Protocol):
    """Knows by session which engines may hold its KV."""

    def find(self, session: str) -> Future[Sequence[str]]:
        """Name the candidates, the likeliest first; an :class:`EngineFault` when it cannot."""

    def keeps(self, session: str, retain_s: float) -> None:
        """Hear that this engine keeps a session's KV for so long."""

    def close(self) -> None:
        """End, within a moment."""


class AllPeers:
    """Names every peer: nothing to keep, nothing to get stale.

    For a few peers, because each of them is asked about each prompt.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._names: Future[Sequence[str]] = Future()
        self._names.set_result(tuple(names))

    def find(self, session: str) -> Future[Sequence[str]]:  # noqa: ARG002 - of any session
        """Name all of them."""
        return self._names

    def keeps(self, session: str, retain_s: float) -> None:
        """Nothing to remember: who holds something says so when it is asked."""

    def close(self) -> None:
        """Nothing to end."""


class Finder:
    """Asks a directory and then its candidates, each off the engine thread.

    Args:
        directory: whom to ask first.
        peers: the allow-list; only its members are peeked at, whatever the directory says.
    """

    def __init__(self, directory: Directory, peers: PeerBook) -> None:
        self._directory = directory
        self._peers = peers

    def find(self, session: str, hashes: list[bytes], resting: Collection[str]) -> Future[Found]:
        """Begin a search; the result never fails, and may be cancelled.

        Args:
            session: whose KV is looked for.
            hashes: of its prompt.
            resting: peers that have just failed, and are not asked.
        """
        out: Future[Found] = Future()

        def named(names: Future[Sequence[str]]) -> None:
            # Runs in whichever thread has the names; touches nothing of the engine's.
            if not out.set_running_or_notify_cancel():
                return
            try:
                out.set_result(self._asked(names, session, hashes, resting))
            except Exception:
                # Futures swallow what their callbacks raise, and the call would wait for it.
                logger.exception("turncache: a search for a session's KV failed")
                out.set_result(Found(reason=Reason.SOURCE_UNKNOWN))

        self._directory.find(session).add_done_callback(named)
        return out

    def _asked(
        self,
        names: Future[Sequence[str]],
        session: str,
        hashes: list[bytes],
        resting: Collection[str],
    ) -> Found:
        try:
            listed = names.result(timeout=0)
        except (EngineFault, CancelledError):
            return Found(reason=Reason.SOURCE_UNKNOWN)
        peers = [p for name in dict.fromkeys(listed) if (p := self._peers.get(name)) is not None]
        good = [p for p in peers if p.state is PeerState.COMPATIBLE and p.name not in resting]
        good = good[:MAX_CANDIDATES]
        if good:
            try:
                return Found(tuple(Ask(p, self._peers.peek(p, session, hashes)) for p in good))
            except RuntimeError:  # the engine is shutting down
                return Found(reason=Reason.SOURCE_GONE)
        if not peers:
            # Named, but not among our peers; or never heard of.
            return Found(reason=Reason.SOURCE_UNKNOWN if listed else None)
        incompatible = all(p.state is PeerState.INCOMPATIBLE for p in peers)
        return Found(reason=Reason.INCOMPATIBLE if incompatible else Reason.SOURCE_GONE)
