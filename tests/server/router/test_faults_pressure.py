"""Faults that others have hit with retention under pressure, as far as a router takes part."""

from __future__ import annotations

import pytest

from tests.fakes.engine import Script, fake_pair
from tests.server.router.support import bench, outcome_of
from turncache.protocol import Plan, Reason

pytestmark = pytest.mark.anyio


async def test_retention_binds_no_session_to_an_overloaded_engine() -> None:
    """A session moves when its engine refuses, is pulled from there, and comes back."""
    async with (
        fake_pair(decodes=2) as ([prefill], decode),
        bench(prefill, *decode) as running,
    ):
        await running.chat(session="s")
        first = next(engine for engine in decode if engine.seen)
        other = next(engine for engine in decode if engine is not first)
        first.scripts = [Script(status=503)]
        moved = await running.chat(session="s")
        assert (moved.status_code, len(other.seen)) == (200, 1)
        prefill.kv.flush()
        back = await running.chat(session="s")
        assert prefill.seen[-1].xargs["tc_source"] == other.name
        assert outcome_of(back).returned > 0
        assert len(first.seen) == 3


async def test_an_engine_that_lost_everything_costs_a_recompute() -> None:
    """Nothing that was retained is needed: the call is served, and the loss is counted."""
    async with fake_pair() as ([prefill], [decode]), bench(prefill, decode) as running:
        await running.chat(session="s")
        prefill.kv.flush()
        decode.kv.flush()
        answer = await running.chat(session="s")
        outcome = outcome_of(answer)
        assert (outcome.plan, outcome.computed) == (Plan.RETURN, outcome.prompt)
        assert outcome.lost > 0
        await running.record(answer)
        sample = 'turncache_lost_tokens_total{reason="ok"}'
        assert await running.metric(sample) == outcome.lost


async def test_a_full_table_forgets_sessions_and_serves_them() -> None:
    """The router's own memory is bounded; a session that fell out is found by its history."""
    async with (
        fake_pair() as ([prefill], [decode]),
        bench(prefill, decode, max_sessions=2) as running,
    ):
        for number in range(4):
            await running.chat(session=f"s{number}")
        assert await running.metric("turncache_router_sessions") == 2
        outcome = outcome_of(await running.chat(session="s0"))
        assert (outcome.plan, outcome.reason) == (Plan.COLD, Reason.NEW_SESSION)
