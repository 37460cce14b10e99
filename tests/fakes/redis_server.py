"""Debian's redis-server on a port of its own, for tests; it keeps nothing on disk."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import tempfile
import time
from types import TracebackType
from typing import Self

import pytest

_PROGRAM = "redis-server"


class RedisServer:
    """A server that can be killed, frozen and started again on the same port.

    Skips the test, with the reason, on a machine without Redis. ``.ci/run`` installs it.
    """

    def __init__(self) -> None:
        if shutil.which(_PROGRAM) is None:
            pytest.skip(f"no {_PROGRAM} on PATH: apt-get install redis-server")
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port: int = free.getsockname()[1]
        self.url = f"redis://127.0.0.1:{self.port}"
        self._folder = tempfile.TemporaryDirectory(prefix="turncache-redis-")
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start, empty, and wait until it answers."""
        self._process = subprocess.Popen(
            [
                *(_PROGRAM, "--port", str(self.port), "--bind", "127.0.0.1"),
                *("--save", "", "--appendonly", "no", "--dir", self._folder.name),
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.STDOUT,
        )
        deadline_s = time.monotonic() + 20
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline_s:
                raise AssertionError(f"{_PROGRAM} does not start on port {self.port}")
            time.sleep(0.01)

    def _answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=5) as connection:
                connection.sendall(b"PING\r\n")
                return connection.recv(7) == b"+PONG\r\n"
        except OSError:
            return False

    def kill(self) -> None:
        """Kill it: everything it had is gone, and its port refuses."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def freeze(self) -> None:
        """Stop it without ending it: it accepts and does not answer."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Let it go on."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.kill()
        self._folder.cleanup()
