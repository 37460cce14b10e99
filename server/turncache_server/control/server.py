"""The control socket of one engine: a thread beside the engine loop, never in its way.

The handler it calls only reads engine state and posts to the engine's mailbox, so
nothing here can block an allocation.
"""

from __future__ import annotations

import ipaddress
import logging
import threading
from collections import Counter
from collections.abc import Callable
from typing import Final
from urllib.parse import urlsplit

import zmq

from turncache.errors import ConfigError, ProtocolError
from turncache_server.control.messages import (
    MAX_MESSAGE_BYTES,
    Refusal,
    Reply,
    Request,
    decode_request,
    encode,
    open_envelope,
    question_number,
)

logger = logging.getLogger(__name__)

_POLL_MS: Final = 200


def check_loopback(address: str, *, setting: str = "control_address") -> str:
    """Return ``address`` when it is ``tcp://<loopback>:<port>``.

    Raises:
        ConfigError: otherwise. Addresses beyond loopback need keys, which this version
            does not have.
    """
    parts = urlsplit(address)
    try:
        host, port = parts.hostname or "", parts.port
        loopback = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        loopback, port = False, None
    if parts.scheme != "tcp" or port is None or not loopback:
        raise ConfigError(
            setting,
            f"{address!r}: expected tcp://127.0.0.1:<port>; the control plane has no keys yet, "
            "so it only listens on loopback",
        )
    return address


class ControlServer:
    """Answers control messages on a ROUTER socket in a daemon thread.

    Args:
        address: loopback address to bind, ``tcp://127.0.0.1:<port>``; port 0 lets the
            system choose.
        handler: answers one question; runs on the server's thread. What it raises is
            answered with a refusal and counted.

    Attributes:
        address: the address that was bound.
        dropped: messages that were refused, by code.
    """

    def __init__(self, address: str, handler: Callable[[Request], Reply]) -> None:
        check_loopback(address)
        self._handler = handler
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        self._socket.setsockopt(zmq.RCVHWM, 1000)
        self._socket.setsockopt(zmq.SNDHWM, 1000)
        try:
            self._socket.bind(address)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise ConfigError(
                "control_address", f"cannot listen on {address}: {error}; choose a free port"
            ) from error
        self.address: str = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self.dropped: Counter[str] = Counter()
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
        self._context.destroy(linger=0)

    def _run(self) -> None:
        while not self._stop.is_set():
            if not self._socket.poll(_POLL_MS):
                continue
            frames = self._socket.recv_multipart()
            if len(frames) != 2:
                self.dropped["malformed"] += 1
                continue
            sender, data = frames
            answer = self._answer(data)
            if answer is not None:
                try:
                    self._socket.send_multipart([sender, answer], flags=zmq.NOBLOCK)
                except zmq.ZMQError:  # the asker is gone or does not read: its loss
                    self.dropped["unsent"] += 1

    def _answer(self, data: bytes) -> bytes | None:
        number = 0
        try:
            number, body = open_envelope(data)
            return encode(number, self._handler(decode_request(body)))
        except ProtocolError as error:
            self.dropped[error.field] += 1
            refusal = Refusal(code=error.field, why=str(error))
            return encode(number or question_number(data), refusal)
        except Exception as error:
            # One bad question must not end the thread that every peer depends on.
            logger.exception("control request failed")
            self.dropped["error"] += 1
            return encode(number, Refusal(code="error", why=f"{type(error).__name__}: {error}"))
