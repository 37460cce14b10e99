"""An engine that is to be stopped: its sessions go to the others, and nothing is lost."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import pytest

from tests.fakes.engine import BLOCK_TOKENS, FakeEngine, fake_engines, fake_pair
from tests.server.router.support import MESSAGES, Bench, bench, outcome_of
from turncache.protocol import FINAL_HEADER, Plan
from turncache_server.router.events import EngineDrains
from turncache_tools.__main__ import main

pytestmark = pytest.mark.anyio


class Agent:
    """Calls one after the other, each with the answers before it.

    Args:
        flooded: engines that keep nothing from one call to the next.

    Attributes:
        again_tokens: prompt tokens that were computed although an engine had computed them.
    """

    def __init__(self, running: Bench, name: str, flooded: Sequence[FakeEngine] = ()) -> None:
        self.name = name
        self.messages: list[dict[str, Any]] = [
            {"role": "user", "content": f"I am {name}. " + "Where does Laura live? " * 4}
        ]
        self.again_tokens = 0
        self.stop = False
        self._known_tokens = 0
        self._bench = running
        self._flooded = flooded

    async def call(self) -> None:
        """Make one call, and note what was computed again."""
        for engine in self._flooded:
            engine.kv.flush()
        response = await self._bench.chat(messages=self.messages, session=self.name)
        assert response.status_code == 200
        outcome = outcome_of(response)
        # The last block of what is known is not full, and so is computed.
        held = max(0, self._known_tokens - BLOCK_TOKENS)
        self.again_tokens += max(0, held - outcome.local - outcome.returned)
        answer = response.json()
        self._known_tokens = answer["usage"]["prompt_tokens"]
        self.messages.append(answer["choices"][0]["message"])
        self.messages.append({"role": "user", "content": "And then? " * 3})

    async def work(self) -> None:
        """Call until told to stop."""
        while not self.stop:
            await self.call()
            await asyncio.sleep(0.02)


async def restarted(engine: FakeEngine) -> None:
    """Stop an engine and start it anew, without what it had."""
    await engine.stop()
    engine.kv.flush()
    engine.kept.clear()
    engine.draining = False
    await engine.start()


async def drain(engine: FakeEngine, *more: str) -> int:
    """Run the verb as an operator does, beside what goes on here."""
    assert engine.control is not None
    return await asyncio.to_thread(
        main, ["drain", engine.control, "--settle", "0.2", "--timeout", "10", *more]
    )


async def every_engine_in_turn(*, drained: bool) -> tuple[int, int]:
    """Restart all four engines under load; return tokens computed again, and calls."""
    async with (
        fake_pair(prefills=2, decodes=2) as (prefills, decodes),
        bench(*prefills, *decodes) as running,
    ):
        await running.ready()
        agents = [Agent(running, f"agent-{number}", prefills) for number in range(6)]
        for agent in agents:
            await agent.call()
        work = [asyncio.create_task(agent.work()) for agent in agents]
        for engine in (*decodes, *prefills):
            if not drained:
                engine.kv.flush()
                await asyncio.sleep(0.05)
                continue
            assert await drain(engine) == 0
            assert (engine.num_active, engine.kept) == (0, {})
            await restarted(engine)
            # Until the router knows that it is back.
            await running.eventually(
                lambda: running.http.get("/health"),
                lambda answer: all(side["live"] == 2 for side in answer.json()["sides"].values()),
            )
        for agent in agents:
            agent.stop = True
        await asyncio.gather(*work)
        return sum(a.again_tokens for a in agents), sum(len(a.messages) // 2 for a in agents)


async def test_a_fleet_is_restarted_engine_by_engine_and_nothing_is_lost() -> None:
    """No call fails, none is computed again, whatever engine is gone."""
    again_tokens, num_calls = await every_engine_in_turn(drained=True)
    assert num_calls > 24
    assert again_tokens == 0


async def test_without_draining_what_an_engine_had_is_lost() -> None:
    """What the test above would see."""
    again_tokens, _ = await every_engine_in_turn(drained=False)
    assert again_tokens > 0


@pytest.mark.parametrize("final", [False, True], ids=["goes on", "ends"])
async def test_a_session_is_pulled_from_the_draining_engine_and_left_there(final: bool) -> None:
    """Its next call is served elsewhere with the old engine as source, which then lets go."""
    async with fake_pair(decodes=2) as ([prefill], decodes), bench(prefill, *decodes) as running:
        await running.ready()
        agent = Agent(running, "s")
        await agent.call()
        (old,) = [engine for engine in decodes if engine.seen]
        (new,) = [engine for engine in decodes if engine is not old]
        old.draining = True
        await running.eventually(lambda: running.of_kind(EngineDrains), bool)
        prefill.kv.flush()
        last = {FINAL_HEADER: "true"} if final else {}
        response = await running.chat(messages=agent.messages, session="s", headers=last)
        assert outcome_of(response).plan is Plan.RETURN
        assert outcome_of(response).lost == 0
        assert prefill.seen[-1].xargs["tc_source"] == old.name
        assert new.seen[-1].xargs["tc_source"] == prefill.name
        await running.eventually(lambda: old.kept, lambda kept: kept == {})
        assert [(s.session, s.kind) for s in old.signals] == [("s", "final")]
        await running.chat(messages=agent.messages, session="s")
        assert prefill.seen[-1].xargs["tc_source"] == (old if final else new).name
        assert len(old.signals) == 1


async def test_a_single_engine_keeps_its_sessions_and_gets_no_new_ones() -> None:
    """The others could only compute them again."""
    engines = [FakeEngine("a"), FakeEngine("b")]
    async with fake_engines(*engines), bench(*engines) as running:
        await running.ready()
        agent = Agent(running, "s")
        await agent.call()
        (old,) = [engine for engine in engines if engine.seen]
        (other,) = [engine for engine in engines if engine is not old]
        old.draining = True
        await running.eventually(lambda: running.of_kind(EngineDrains), bool)
        await agent.call()
        assert len(old.seen) == 2
        for number in range(6):
            await running.chat(messages=MESSAGES, session=f"new-{number}")
        assert len(old.seen) == 2
        assert len(other.seen) == 6


async def test_what_is_left_fails_the_verb_and_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    """A session that does not come back in time; ``--cancel`` lets the engine have more."""
    engine = FakeEngine()
    async with fake_engines(engine), bench(engine) as running:
        await running.ready()
        await running.chat(session="s")
        assert await drain(engine, "--timeout", "0.3", "--json") == 1
        told = json.loads(capsys.readouterr().out)
        assert (told["drained"], told["draining"], told["sessions"]) == (False, True, 1)
        assert told["tokens"] == len(engine.kept["s"]) * BLOCK_TOKENS
        assert await drain(engine, "--cancel") == 0
        assert engine.draining is False
