"""Fixtures of the command line's tests."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.vllm_program import write_python
from tests.server.launch.conftest import mark, model_folder
from turncache_server.control.keys import FleetKeys, read_fleet_keys
from turncache_server.control.messages import (
    Hello,
    HelloReply,
    ModeReply,
    Refusal,
    Reply,
    Request,
    SessionRow,
    Sessions,
    SessionsReply,
    SetMode,
    Stats,
    StatsReply,
)
from turncache_server.control.server import ControlServer
from turncache_tools.__main__ import main

__all__ = ["mark", "model_folder"]


@dataclass(frozen=True)
class Ran:
    """What a command did."""

    code: int
    out: str
    err: str


@pytest.fixture
def turncache(capsys: pytest.CaptureFixture[str]) -> Callable[..., Ran]:
    """Run the command line in this process."""

    def run(*arguments: str) -> Ran:
        code = main(list(arguments))
        captured = capsys.readouterr()
        return Ran(code, captured.out, captured.err)

    return run


@pytest.fixture
def engine_python(tmp_path: Path) -> str:
    """Return the fake interpreter of a complete engine environment."""
    return write_python(tmp_path)


@dataclass
class ControlledEngine:
    """The control socket of an engine, in this process.

    Attributes:
        address: where it listens.
        mode: what it is in; ``stays`` keeps it there.
    """

    address: str = ""
    mode: str = "on"
    stays: str = ""
    stats: Mapping[str, float] = field(default_factory=dict)
    gauges: Mapping[str, float] = field(default_factory=lambda: {"free_blocks": 7.0})
    hello: Mapping[str, Any] = field(default_factory=dict)
    sessions: Sequence[SessionRow] = ()

    def answer(self, request: Request) -> Reply:
        """Answer as the extension does."""
        if isinstance(request, SetMode):
            if request.mode and not self.stays:
                self.mode = request.mode
            return ModeReply(mode=self.mode, why=self.stays, ticket="t:0")
        if isinstance(request, Sessions):
            return SessionsReply(
                name="decode-0",
                side="decode",
                rows=list(self.sessions[: request.limit]),
                num_sessions=len(self.sessions),
                num_handovers=1,
                num_calls=2,
                block_size=16,
            )
        if isinstance(request, Stats):
            return StatsReply(counters=dict(self.stats), gauges=dict(self.gauges))
        if isinstance(request, Hello):
            values: dict[str, Any] = {
                "engine_id": "x",
                "start_id": "y",
                "generation": 1,
                "side": "single",
                "mode": self.mode,
                "fingerprint": {"model": "m"},
                "vllm_version": "0.32.0",
            }
            return HelloReply(**{**values, **self.hello})
        return Refusal(code="unsupported", why="not in this test")


@dataclass(frozen=True)
class Secret:
    """A fleet's secret: its file, and the keys that engines have derived from it."""

    path: Path
    keys: FleetKeys


@pytest.fixture
def secret(tmp_path: Path) -> Secret:
    """Make a secret as the documentation says."""
    path = tmp_path / "fleet.secret"
    path.touch(mode=0o600)
    path.write_text(secrets.token_hex(32))
    return Secret(path, read_fleet_keys(path))


@pytest.fixture
def control() -> Iterator[Callable[..., ControlledEngine]]:
    """Start control sockets on free ports."""
    with ExitStack() as servers:

        def start(keys: FleetKeys | None = None, **values: Any) -> ControlledEngine:
            engine = ControlledEngine(**values)
            server = ControlServer("tcp://127.0.0.1:0", engine.answer, keys=keys)
            server.start()
            servers.callback(server.close)
            engine.address = server.address
            return engine

        yield start
