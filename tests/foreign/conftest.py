"""The client inside other frameworks: run by ``make test-foreign``, in their environments.

The fast tier collects nothing here, because the frameworks are not installed there. Where
they are, a framework that is missing fails its tests.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from turncache.testing import FakeServer, forget_everything

collect_ignore_glob = [] if os.environ.get("TURNCACHE_FOREIGN") else ["test_*.py"]


@pytest.fixture(autouse=True)
def fresh_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each test starts as a fresh process would, with a key for frameworks that want one."""
    for name in ("SESSION_ID", "PROFILE", "HOSTS", "DISABLED", "LOG"):
        monkeypatch.delenv(f"TURNCACHE_{name}", raising=False)
    monkeypatch.setenv("OPENAI_API_KEY", "-")
    forget_everything()
    yield
    forget_everything()


@pytest.fixture
def server() -> Iterator[FakeServer]:
    """Give a server that calls the first tool that is offered, then says ``fine``."""
    with FakeServer() as running:
        yield running
