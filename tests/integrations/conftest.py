"""Fixtures of the LangGraph tests: one fake server and one event loop per module."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest

from turncache.testing import FakeServer, forget_everything

Run = Callable[[Coroutine[Any, Any, Any]], Any]


@pytest.fixture(autouse=True)
def fresh_process(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> Iterator[None]:
    """Each test starts as a fresh process would; bookkeeping that fails fails the test."""
    for name in ("SESSION_ID", "PROFILE", "HOSTS", "DISABLED", "LOG"):
        monkeypatch.delenv(f"TURNCACHE_{name}", raising=False)
    forget_everything()
    yield
    forget_everything()
    said = [record.getMessage() for record in caplog.get_records("call")]
    assert not [text for text in said if "could not prepare" in text]


@pytest.fixture(scope="module")
def running_server() -> Iterator[FakeServer]:
    """Give a server for the module's tests."""
    with FakeServer() as server:
        yield server


@pytest.fixture
def server(running_server: FakeServer) -> FakeServer:
    """Give the server without requests, script and prompts of another test."""
    running_server.clear()
    return running_server


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    """Give a function that runs a coroutine: LangChain keeps connections of one event loop."""
    with asyncio.Runner() as runner:
        yield runner.run
