"""The control socket of one engine: a thread beside the engine loop, never in its way.

The handler it calls only reads engine state and posts to the engine's mailbox, so
nothing here can block an allocation. What comes in is bounded before it is read: in size by
ZMQ, in number per connection by a short queue behind which the sender waits, and in work by
:class:`~turncache_server.control.pace.Pace`, because every question holds the interpreter
that the engine loop needs too. ZMQ takes turns between connections, so a flood on one does
not shut the others out.

Owner of the counts of what was dropped.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Final

import zmq

from turncache.errors import ConfigError, ProtocolError
from turncache_server.control.addresses import check_address, is_ipv6
from turncache_server.control.keys import FleetKeys
from turncache_server.control.messages import (
    CONTROL_VERSION,
    DROP_CODES,
    MAX_MESSAGE_BYTES,
    Refusal,
    Reply,
    Request,
    decode_request,
    encode,
    question_number,
    read_envelope,
)
from turncache_server.control.pace import Pace

logger = logging.getLogger(__name__)

_POLL_MS: Final = 200
#: Above our own bound, so that what exceeds it a little gets an answer instead of losing its
#: connection.
_SOCKET_BOUND_BYTES: Final = MAX_MESSAGE_BYTES + 1024 * 1024
#: Questions of one connection that wait here; the rest waits at the asker.
_QUESTIONS_WAITING: Final = 4
#: Answers that wait for one asker; what comes after them is dropped.
_ANSWERS_WAITING: Final = 64
#: Time for proving the key, after which a connection is cut.
_HANDSHAKE_MS: Final = 5_000
#: Where ZMQ asks whether a key is admitted (RFC 27).
_ZAP_ADDRESS: Final = "inproc://zeromq.zap.01"
_FAILED_HANDSHAKES: Final = (
    zmq.Event.HANDSHAKE_FAILED_NO_DETAIL
    | zmq.Event.HANDSHAKE_FAILED_PROTOCOL
    | zmq.Event.HANDSHAKE_FAILED_AUTH
)


class ControlServer:
    """Answers control messages on a ROUTER socket in a daemon thread.

    Args:
        address: to bind, ``tcp://<host>:<port>``; port 0 lets the system choose. Beyond
            loopback only with ``keys``.
        handler: answers one question; runs on the server's thread. What it raises is
            answered with a refusal and counted.
        name: of this engine; a question for another one is refused. Empty takes any.
        keys: of the fleet; without them nobody has to prove anything.
        pace: how much work the thread may do.

    Attributes:
        address: the address that was bound.
        dropped: messages and connections that were refused, by code.
        num_questions: messages that were read.
        rested_s: seconds for which questions waited because of the pace.
    """

    def __init__(
        self,
        address: str,
        handler: Callable[[Request], Reply],
        *,
        name: str = "",
        keys: FleetKeys | None = None,
        pace: Pace | None = None,
    ) -> None:
        check_address(address, keyed=keys is not None, bind=True)
        self._handler = handler
        self._name = name
        self._keys = keys
        self._pace = pace or Pace()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._zap = self._context.socket(zmq.REP)
        for option, value in (
            (zmq.LINGER, 0),
            (zmq.MAXMSGSIZE, _SOCKET_BOUND_BYTES),
            (zmq.RCVHWM, _QUESTIONS_WAITING),
            (zmq.SNDHWM, _ANSWERS_WAITING),
            (zmq.HANDSHAKE_IVL, _HANDSHAKE_MS),
            (zmq.IPV6, int(is_ipv6(address))),
            # An answer that cannot be sent is an error then, which is counted.
            (zmq.ROUTER_MANDATORY, 1),
        ):
            self._socket.setsockopt(option, value)
        if keys is not None:
            keys.serve(self._socket)
            self._zap.bind(_ZAP_ADDRESS)
        self._monitor = self._socket.get_monitor_socket(_FAILED_HANDSHAKES)
        try:
            self._socket.bind(address)
        except zmq.ZMQError as error:
            self._close_sockets()
            raise ConfigError(
                "control_address",
                f"cannot listen on {address}: {zmq.strerror(error.errno or 0)}; choose a free port",
            ) from error
        self.address: str = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self.dropped: Counter[str] = Counter(dict.fromkeys(DROP_CODES, 0))
        self.num_questions = 0
        self.rested_s = 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="turncache-control", daemon=True)

    def start(self) -> None:
        """Start answering."""
        self._thread.start()

    def close(self) -> None:
        """Stop answering and free the port."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout=5)
        self._close_sockets()

    def counters(self) -> Mapping[str, float]:
        """Return the totals since start, by name; safe to call from any thread."""
        return {
            "control_questions": float(self.num_questions),
            "control_rested_s": self.rested_s,
            **{f"control_dropped_{code}": float(self.dropped[code]) for code in DROP_CODES},
        }

    def _close_sockets(self) -> None:
        if not self._socket.closed:
            # First: ZMQ's own thread waits for room in a monitor that nobody reads any more.
            self._socket.disable_monitor()
        self._context.destroy(linger=0)

    def _run(self) -> None:
        acts = {
            self._zap: self._admit,
            self._monitor: self._note_failed_handshake,
            self._socket: self._serve,
        }
        poller = zmq.Poller()
        for socket in acts:
            poller.register(socket, zmq.POLLIN)
        while not self._stop.is_set():
            ready = dict(poller.poll(_POLL_MS))
            if not ready:
                continue
            began_s = time.thread_time()
            for socket, act in acts.items():
                if socket in ready and (frames := _take(socket)) is not None:
                    act(frames)
            rest_s = self._pace.spent(time.thread_time() - began_s, time.monotonic())
            if rest_s > 0:
                self.rested_s += rest_s
                self._stop.wait(rest_s)

    def _admit(self, frames: list[bytes]) -> None:
        """Say whether a key is the fleet's; a stranger's connection is counted by the monitor."""
        version, number, _, _, _, mechanism, *credentials = frames
        admitted = (
            self._keys is not None
            and mechanism == b"CURVE"
            and len(credentials) == 1
            and self._keys.admits(credentials[0])
        )
        verdict = (b"200", b"") if admitted else (b"400", b"not a key of this fleet")
        self._zap.send_multipart([version, number, *verdict, b"", b""])

    def _note_failed_handshake(self, _frames: list[bytes]) -> None:
        self.dropped["unauthenticated"] += 1

    def _serve(self, frames: list[bytes]) -> None:
        self.num_questions += 1
        if len(frames) != 2:
            self.dropped["malformed"] += 1
            return
        sender, data = frames
        try:
            self._socket.send_multipart([sender, self._answer(data)], flags=zmq.NOBLOCK)
        except zmq.ZMQError:  # the asker is gone or does not read: its loss
            self.dropped["unsent"] += 1

    def _answer(self, data: bytes) -> bytes:
        number, version = 0, CONTROL_VERSION
        try:
            envelope = read_envelope(data)
            number, version = envelope.id, envelope.v
            self._check_name(envelope.to)
            reply = self._handler(decode_request(envelope.body, version=version))
            answer = encode(number, reply, version=version)
        except ProtocolError as error:
            number, reply = number or question_number(data), _refusal(error)
            answer = encode(number, reply, version=version)
        except Exception as error:
            # One bad question must not end the thread that every peer depends on.
            logger.exception("control request failed")
            reply = Refusal(code="error", why=f"{type(error).__name__}: {error}")
            answer = encode(number, reply, version=version)
        if isinstance(reply, Refusal):
            self.dropped[reply.code if reply.code in DROP_CODES else "error"] += 1
        return answer

    def _check_name(self, to: str) -> None:
        """Refuse a question for another engine: its asker has a wrong address."""
        if to and self._name and to != self._name:
            raise ProtocolError("other_engine", f"this is {self._name}, the question is for {to}")


def _refusal(error: ProtocolError) -> Refusal:
    return Refusal(code=error.field, why=str(error).removeprefix(f"{error.field}: "))


def _take(socket: zmq.Socket[bytes]) -> list[bytes] | None:
    """Receive what a poll has announced; None when it is gone with its connection."""
    try:
        return socket.recv_multipart(flags=zmq.NOBLOCK)
    except zmq.Again:
        return None
