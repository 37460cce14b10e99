"""Fixtures of the LangGraph tests: the client's own, and one event loop per module."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest

from tests.sdk.conftest import fresh_process, pytest_configure, running_server, server

__all__ = ["fresh_process", "pytest_configure", "run", "running_server", "server"]

Run = Callable[[Coroutine[Any, Any, Any]], Any]


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    """Give a function that runs a coroutine: LangChain keeps connections of one event loop."""
    with asyncio.Runner() as runner:
        yield runner.run
