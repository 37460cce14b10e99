"""The engines that this one may read from: allow-list, compatibility, liveness.

One thread asks every peer ``hello`` and replaces frozen records in a dict; the engine
thread reads them. A peer whose answer to a peek is of another start or another cache than
its last hello is greeted again by the thread that peeked, before that answer is given. KV is
exchanged only with a peer whose fingerprint is equal in every member; the difference is said
in one line.
"""

from __future__ import annotations

import enum
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Final

from turncache.errors import EngineFault, EngineRefusal
from turncache_server.connector.fingerprint import UNCOMPARABLE
from turncache_server.control.client import ControlClient
from turncache_server.control.keys import FleetKeys
from turncache_server.control.messages import (
    INCOMPATIBLE_CODES,
    Hello,
    HelloReply,
    Peek,
    PeekReply,
    Verify,
    VerifyReply,
)

logger = logging.getLogger(__name__)

HELLO_TIMEOUT_S: Final = 1.0
_FIRST_HELLO_EVERY_S: Final = 0.5
_HELLO_EVERY_S: Final = 5.0
_FEWEST_THREADS: Final = 4
_MOST_THREADS: Final = 16
#: Times of peeks that wait to be taken; older ones are dropped.
_MOST_TIMES: Final = 1000


class PeerState(enum.StrEnum):
    """What a peer is good for."""

    UNSEEN = "unseen"
    COMPATIBLE = "compatible"
    INCOMPATIBLE = "incompatible"
    GONE = "gone"


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """One engine of the allow-list, as its last hello left it."""

    name: str
    control_address: str
    state: PeerState = PeerState.UNSEEN
    why: str = ""
    hello: HelloReply | None = None


def difference(mine: Mapping[str, str], theirs: Mapping[str, str]) -> str:
    """Say how two fingerprints differ, both values in one line; empty when they are equal.

    Weights that cannot be read are equal to none.
    """
    names = sorted(set(mine) | set(theirs))
    differ = "; ".join(
        f"{name}: {mine.get(name, 'absent')} here, {theirs.get(name, 'absent')} there"
        for name in names
        if mine.get(name) != theirs.get(name)
    )
    if not differ and mine.get("weights") in UNCOMPARABLE:
        return (
            f"weights: {mine['weights']} here and there: no files to compare; set weights_id on "
            "all engines to a name of the very weights that they load"
        )
    return differ


class PeerBook:
    """Keeps the peers' records fresh and carries peeks and verifies off the engine thread.

    Args:
        peers: engine name to control address.
        fingerprint: of this engine.
        engine_id: NIXL id of this engine, under which no peer may be known.
        ask_timeout_s: longest time for one peek or verify.
        keys: of the fleet, None for peers on loopback without keys.
    """

    def __init__(
        self,
        peers: Mapping[str, str],
        fingerprint: Mapping[str, str],
        *,
        engine_id: str,
        ask_timeout_s: float,
        keys: FleetKeys | None = None,
    ) -> None:
        self._fingerprint = dict(fingerprint)
        self._engine_id = engine_id
        self._ask_timeout_s = ask_timeout_s
        # Every question carries the name that is expected at its address.
        self._client = ControlClient(keys, names={address: name for name, address in peers.items()})
        self._refused: Counter[str] = Counter(dict.fromkeys(INCOMPATIBLE_CODES, 0))
        # The start under which each NIXL id was first found compatible.
        self._met: dict[str, str] = {}
        # Where all peers are asked at once, those that do not answer must leave threads for others.
        workers = min(_MOST_THREADS, max(_FEWEST_THREADS, 2 * len(peers)))
        self._pool = ThreadPoolExecutor(max_workers=workers, thread_name_prefix="turncache-ask")
        self._records = {
            name: Peer(name=name, control_address=address) for name, address in peers.items()
        }
        # Appended to by the threads that ask, taken by the engine thread.
        self._peek_s: deque[float] = deque(maxlen=_MOST_TIMES)
        # Held while a hello is judged and put down, not while it is asked for.
        self._judging = threading.Lock()
        self._wake = threading.Event()
        self._stop = False
        self._thread = threading.Thread(target=self._run, name="turncache-peers", daemon=True)

    def start(self) -> None:
        """Begin asking."""
        if self._records:
            self._thread.start()

    def close(self) -> None:
        """Stop asking, and wait for the questions in flight: each ends by its deadline."""
        self._stop = True
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join()
        # The sockets belong to these threads: closing them under a thread that polls
        # aborts the process.
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._client.close()

    def get(self, name: str) -> Peer | None:
        """Return the record of a peer, None when it is not in the allow-list."""
        return self._records.get(name)

    def all(self) -> list[Peer]:
        """Return every record."""
        return list(self._records.values())

    def counters(self) -> Mapping[str, float]:
        """Return how many hellos peers have refused, by why; safe to call from any thread."""
        return {
            f"peer_hellos_refused_{code}": float(self._refused[code]) for code in INCOMPATIBLE_CODES
        }

    def hurry(self) -> None:
        """Ask every peer anew, soon: an answer did not fit what its hello said."""
        self._wake.set()

    def peek(self, peer: Peer, session: str, hashes: list[bytes]) -> Future[PeekReply]:
        """Ask a peer what it holds of a hash chain.

        Its record (:meth:`get`) is of the start and the cache that the answer is of, where a
        hello could be had: a reset of its cache costs the next pull one more question.
        """
        asked_at_s = time.monotonic()
        question = Peek(session=session, hashes=hashes)
        return self._pool.submit(self._peek, peer.name, question, asked_at_s)

    def take_peek_s(self) -> list[float]:
        """Return how long the peeks took that were answered since the last time, in seconds."""
        times = self._peek_s
        return [times.popleft() for _ in range(len(times))]

    def _peek(self, name: str, question: Peek, asked_at_s: float) -> PeekReply:
        address = self._records[name].control_address
        reply = self._client.ask(address, question, PeekReply, timeout_s=self._ask_timeout_s)
        self._peek_s.append(time.monotonic() - asked_at_s)
        hello = self._records[name].hello
        # Who gives nothing away at present names no start.
        if reply.start_id and (hello is None or not hello.is_of(reply)):
            self._greet(name)
        return reply

    def verify(self, peer: Peer, question: Verify) -> Future[VerifyReply]:
        """Ask a peer whether blocks that were read are unchanged."""
        return self._pool.submit(
            self._client.ask,
            peer.control_address,
            question,
            VerifyReply,
            timeout_s=self._ask_timeout_s,
        )

    def _run(self) -> None:
        while not self._stop:
            for name in self._records:
                if not self._stop:
                    self._greet(name)
            seen = all(r.state is PeerState.COMPATIBLE for r in self._records.values())
            self._wake.wait(_HELLO_EVERY_S if seen else _FIRST_HELLO_EVERY_S)
            self._wake.clear()

    def _greet(self, name: str) -> None:
        """Ask a peer who it is, and replace its record."""
        address = self._records[name].control_address
        reply: HelloReply | EngineFault
        try:
            reply = self._client.ask(address, Hello(), HelloReply, timeout_s=HELLO_TIMEOUT_S)
        except EngineFault as error:
            reply = error
        with self._judging:
            record = self._records[name]
            self._records[name] = (
                self._unanswered(record, reply)
                if isinstance(reply, EngineFault)
                else self._judged(record, reply)
            )

    def _unanswered(self, record: Peer, error: EngineFault) -> Peer:
        if isinstance(error, EngineRefusal) and error.code in INCOMPATIBLE_CODES:
            self._refused[error.code] += 1
            return self._incompatible(record, str(error), record.hello)
        state = PeerState.UNSEEN if record.hello is None else PeerState.GONE
        if record.state is not state:
            logger.warning("turncache: peer %s does not answer: %s", record.name, error)
        return replace(record, state=state, why=str(error))

    def _judged(self, record: Peer, reply: HelloReply) -> Peer:
        if differs := difference(self._fingerprint, reply.fingerprint):
            return self._incompatible(record, differs, reply)
        if namesake := self._namesake(record.name, reply.engine_id):
            # NIXL connects once per id: it would read one engine's blocks in the other's memory.
            return self._incompatible(
                record,
                f"its engine_id {reply.engine_id!r} is also that of {namesake}: leave engine_id "
                "out of --kv-transfer-config, or give each engine one of its own",
                reply,
            )
        if self._is_former(reply):
            return self._incompatible(
                record,
                f"it was restarted under the engine_id of its last start, {reply.engine_id!r}, by "
                "which NIXL would read from the memory of then: leave engine_id out of "
                "--kv-transfer-config and start it anew",
                reply,
            )
        if record.state is not PeerState.COMPATIBLE:
            logger.info("turncache: peer %s is compatible (%s)", record.name, reply.engine_id)
        return replace(record, state=PeerState.COMPATIBLE, why="", hello=reply)

    def _namesake(self, name: str, engine_id: str) -> str | None:
        """Return who else has a peer's NIXL id, None when nobody has."""
        if engine_id == self._engine_id:
            return "this engine"
        for other in self._records.values():
            if other.name != name and other.hello and other.hello.engine_id == engine_id:
                return f"peer {other.name}"
        return None

    def _is_former(self, reply: HelloReply) -> bool:
        """Whether NIXL has another start of a peer under its id: it connects once per id.

        An answer of the new start to peek and verify says nothing of memory of the old one,
        which a transport that maps it goes on reading.
        """
        return self._met.setdefault(reply.engine_id, reply.start_id) != reply.start_id

    def _incompatible(self, record: Peer, why: str, hello: HelloReply | None) -> Peer:
        """Return a record that refuses pulls, and say why once."""
        if record.why != why:
            logger.error(
                "turncache: peer %s is incompatible, nothing will be pulled from it: %s",
                record.name,
                why,
            )
        return replace(record, state=PeerState.INCOMPATIBLE, why=why, hello=hello)
