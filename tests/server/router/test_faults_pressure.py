"""Faults that others have hit with retention under pressure, as far as a router takes part."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.fakes.engine import Script, fake_pair
from tests.server.router.support import bench, outcome_of
from turncache.protocol import Plan, Reason
from turncache_server.router.keys import add_key

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
        # What it keeps there would be in vain, and keep it from being drained.
        await running.eventually(
            lambda: [(each.session, each.kind) for each in first.signals],
            lambda told: ("s", "final") in told,
        )
        prefill.kv.flush()
        back = await running.chat(session="s")
        assert prefill.seen[-1].xargs["tc_source"] == other.name
        assert outcome_of(back).returned > 0
        assert len(first.seen) == 3


@pytest.mark.parametrize(
    ("share", "repeat_s", "pulled"),
    [(0.8, 0, True), (0.0, 0, False), (0.0, 30, True)],
    ids=["bounded", "not bounded", "repeated"],
)
async def test_a_burst_on_decode_evicts_no_prompt_that_it_has_not_read(
    share: float, repeat_s: float, pulled: bool
) -> None:
    """Prefill is held back while decode is full, or computes again what it has lost; without
    either, decode computes prompts itself.
    """
    num_calls, num_blocks = 12, 40
    async with fake_pair() as ([prefill], [decode]):
        prefill.num_blocks = prefill.kv.max_blocks = num_blocks
        decode.turns = turns = asyncio.Semaphore(1)
        settings = {"handover_share": share, "repeat_prefill_s": repeat_s}
        async with bench(prefill, decode, **settings) as running:

            async def call(number: int) -> int:
                """Make a call like no other; return its status."""
                said = f"{number:03}. Where does Laura live, and with whom? "
                messages = [{"role": "user", "content": 2 * said}]
                return (await running.chat(session=f"s{number}", messages=messages)).status_code

            await turns.acquire()
            calls = [asyncio.create_task(call(number)) for number in range(num_calls)]
            sample = 'turncache_router_handover_waiting{engine="prefill-0"}'

            async def all_there() -> bool:
                return len(decode.seen) + await running.metric(sample) == num_calls

            await running.eventually(all_there, bool)
            turns.release()
            assert await asyncio.gather(*calls) == [200] * num_calls
        found = [reply.returned for reply in decode.replies.values()]
        assert len(found) == num_calls
        assert (min(found) > 0) is pulled


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


async def test_another_tenants_prefix_is_as_slow_as_nobodys(tmp_path: Path) -> None:
    """Whoever sends another's session, salt and prompt learns nothing from the time it takes."""
    path = tmp_path / "keys.toml"
    red, blue = ({"Authorization": f"Bearer {add_key(path, name)}"} for name in ("red", "blue"))
    async with (
        fake_pair() as ([prefill], [decode]),
        bench(prefill, decode, keys_file=str(path)) as running,
    ):

        async def computed(key: dict[str, str], salt: str | None) -> int:
            """Make the same call; return what was computed of its prompt."""
            salts = {} if salt is None else {"cache_salt": salt}
            answer = await running.chat(session="s", headers=key, **salts)
            outcome = outcome_of(answer)
            assert outcome.computed + outcome.local + outcome.returned == outcome.prompt
            return outcome.computed

        cold = await computed(red, None)
        assert await computed(red, None) < cold, "its own, which shows that there is something"
        made = prefill.seen[-1].body["cache_salt"]
        for salt in (None, made):
            assert await computed(blue, salt) == cold
        assert "tc_source" not in prefill.seen[2].xargs


async def test_a_guessed_session_opens_nothing(tmp_path: Path) -> None:
    """Neither the client's own name of it, nor the one that engines and logs know."""
    path = tmp_path / "keys.toml"
    red, blue = ({"Authorization": f"Bearer {add_key(path, name)}"} for name in ("red", "blue"))
    async with (
        fake_pair() as ([prefill], [decode]),
        bench(prefill, decode, keys_file=str(path)) as running,
    ):
        await running.chat(session="s", headers=red)
        (first,) = decode.seen
        known = first.xargs["tc_session"]
        for guess in ("s", known):
            await running.chat(session=guess, headers=blue)
            headers = {**blue, "X-Session-ID": guess}
            notice = {"notice": "final"}
            answer = await running.http.post("/v1/sessions", json=notice, headers=headers)
            assert answer.status_code == 202
        for seen in (*prefill.seen[1:], *decode.seen[1:]):
            assert seen.xargs["tc_session"] != known
        assert all("tc_source" not in seen.xargs for seen in prefill.seen)
        assert known not in {signal.session for signal in (*prefill.signals, *decode.signals)}
        assert outcome_of(await running.chat(session="s", headers=red)).plan is Plan.RETURN
