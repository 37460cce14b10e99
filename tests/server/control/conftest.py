"""Control sockets on loopback: a real server with a handler of the test's choice, and a raw one."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import zmq

from turncache_server.control.client import ControlClient
from turncache_server.control.messages import Reply, Request
from turncache_server.control.server import ControlServer

Serve = Callable[..., ControlServer]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Start real control servers on free loopback ports; they are closed after the test."""
    with contextlib.ExitStack() as stack:

        def start(handler: Callable[[Request], Reply], **options: Any) -> ControlServer:
            server = ControlServer("tcp://127.0.0.1:0", handler, **options)
            stack.callback(server.close)
            server.start()
            return server

        yield start


@pytest.fixture
def client() -> Iterator[ControlClient]:
    """A blocking client."""
    client = ControlClient()
    yield client
    client.close()


class RawServer:
    """A ROUTER socket that answers each batch of questions with frames of the test's choice.

    Args:
        answer: (questions so far) to answers, each the raw bytes for one question's sender.
    """

    def __init__(self, answer: Callable[[list[bytes]], list[tuple[int, bytes]]]) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        port = self._socket.bind_to_random_port("tcp://127.0.0.1")
        self.address = f"tcp://127.0.0.1:{port}"
        self._answer = answer
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        senders: list[bytes] = []
        questions: list[bytes] = []
        while not self._stop.is_set():
            if self._socket.poll(20):
                sender, data = self._socket.recv_multipart()
                senders.append(sender)
                questions.append(data)
                for index, answer in self._answer(questions):
                    self._socket.send_multipart([senders[index], answer])

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        self._context.destroy(linger=0)


@pytest.fixture
def raw_server() -> Iterator[Callable[..., RawServer]]:
    """Start raw servers; they are closed after the test."""
    with contextlib.ExitStack() as stack:

        def start(answer: Callable[[list[bytes]], list[tuple[int, bytes]]]) -> RawServer:
            server = RawServer(answer)
            stack.callback(server.close)
            return server

        yield start
