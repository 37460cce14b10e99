"""Fixtures of the router's tests."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest

from tests.fakes.engine import FakeEngine, fake_engines, fake_pair
from tests.server.router.support import Bench, bench


@pytest.fixture
def anyio_backend() -> str:
    """The router runs on asyncio."""
    return "asyncio"


@dataclass
class Single:
    """A router in front of one engine."""

    bench: Bench
    engine: FakeEngine


@dataclass
class Pair:
    """A router in front of one prefill and one decode engine."""

    bench: Bench
    prefill: FakeEngine
    decode: FakeEngine


@pytest.fixture
async def single(anyio_backend: str) -> AsyncIterator[Single]:
    """A router in front of one engine."""
    engine = FakeEngine()
    async with fake_engines(engine), bench(engine) as running:
        yield Single(running, engine)


@pytest.fixture
async def pair(anyio_backend: str) -> AsyncIterator[Pair]:
    """A router in front of one prefill and one decode engine."""
    async with fake_pair() as ([prefill], [decode]), bench(prefill, decode) as running:
        yield Pair(running, prefill, decode)
