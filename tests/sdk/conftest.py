"""Fixtures of the client's tests: one fake server, one client of each kind per module."""

from __future__ import annotations

from collections.abc import Iterator

import hypothesis
import pytest

import turncache
from turncache.testing import FakeServer, forget_everything

if hypothesis.settings.get_current_profile_name() == "default":
    # A busy machine makes an example slow, and no example wrong.
    hypothesis.settings.register_profile("no deadline", deadline=None)
    hypothesis.settings.load_profile("no deadline")


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker of this folder."""
    config.addinivalue_line("markers", "odd_request: sends what our bookkeeping cannot read")


@pytest.fixture(autouse=True)
def fresh_process(
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> Iterator[None]:
    """Each test starts as a fresh process would, without settings from outside.

    Bookkeeping that fails lets the call pass: here that fails the test, unless it is
    what the test is about.
    """
    for name in ("SESSION_ID", "PROFILE", "HOSTS", "DISABLED", "LOG"):
        monkeypatch.delenv(f"TURNCACHE_{name}", raising=False)
    forget_everything()
    yield
    forget_everything()
    if request.node.get_closest_marker("odd_request") is None:
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
def running_client(running_server: FakeServer) -> Iterator[turncache.OpenAI]:
    """Give a client for the module's tests: making one loads certificates."""
    with turncache.OpenAI(base_url=running_server.url, api_key="-") as client:
        yield client


@pytest.fixture
def client(server: FakeServer, running_client: turncache.OpenAI) -> turncache.OpenAI:
    """Give a client with a family of its own, on the module's connections."""
    return turncache.OpenAI(base_url=server.url, api_key="-", http_client=running_client._client)
