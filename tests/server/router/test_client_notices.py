"""Our client and our router: what a session says between two calls reaches the engines."""

from __future__ import annotations

import pytest

import turncache
from tests.server.router.conftest import Pair
from tests.server.router.support import MESSAGES
from turncache_server.control.messages import Signal

pytestmark = pytest.mark.anyio


async def test_waits_and_ends_reach_the_engines(pair: Pair) -> None:
    """wait() and aend() of an async client arrive at both engines, in order, with the id."""
    async with turncache.AsyncOpenAI(
        base_url=pair.bench.router.url + "/v1", api_key="-", http_client=pair.bench.http
    ) as client:
        with turncache.session("ticket-client") as session:
            await client.chat.completions.create(model="fake", messages=MESSAGES)  # type: ignore[call-overload]
            session.wait(expected_s=600)
            told = Signal(session="ticket-client", kind="wait", expect_s=600)
            await pair.bench.eventually(
                lambda: pair.decode.signals, lambda signals: told in signals
            )
            await session.aend(timeout_s=10)
    final = Signal(session="ticket-client", kind="final")
    for engine in (pair.prefill, pair.decode):
        assert engine.signals[-2:] == [told, final]
    assert turncache.session("ticket-client").calls[-1].error is None
