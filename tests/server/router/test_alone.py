"""Calls that one side serves alone: decode for what is short, and either when the other is gone."""

from __future__ import annotations

from typing import Any

import httpx2
import pytest

from tests.fakes.engine import FakeEngine, fake_pair
from tests.server.router.agents import ChatAgent, MessagesAgent, ResponsesAgent, turn
from tests.server.router.conftest import Pair
from tests.server.router.support import MESSAGES, TOOLS, Bench, bench, outcome_of
from turncache.protocol import Plan, Reason
from turncache_server.router.alone import Answered, least_new_tokens
from turncache_server.router.events import EngineRestarted
from turncache_server.router.following import History

pytestmark = pytest.mark.anyio

#: Room for one answer of the fake and a tool's result.
SHORT = 400


async def is_gone(running: Bench, engine: FakeEngine) -> None:
    """Stop an engine and wait until the router knows."""
    await engine.stop()
    await running.eventually(lambda: running.http.get("/health"), lambda a: '"live": 0' in a.text)


async def is_back(running: Bench, engine: FakeEngine) -> None:
    """Start an engine and wait until the router knows."""
    await engine.start()
    await running.eventually(lambda: running.http.get("/health"), lambda a: '"ok"' in a.text)


async def health(running: Bench) -> tuple[int, Any]:
    """Return what ``/health`` says."""
    answer = await running.http.get("/health")
    return answer.status_code, answer.json()["status"]


async def going_on(running: Bench, question: str, **members: Any) -> list[httpx2.Response]:
    """Ask, and ask again with the answer in the history."""
    first = await running.chat(session="s", **members)
    said = first.json()["choices"][0]["message"]
    messages = [*MESSAGES, said, {"role": "user", "content": question}]
    return [first, await running.chat(session="s", **{**members, "messages": messages})]


@pytest.mark.parametrize(
    "agent", [ChatAgent({"x-session-id": "s"}), MessagesAgent("s"), ResponsesAgent("s")]
)
async def test_decode_does_short_calls_alone_and_computes_what_is_new(agent: Any) -> None:
    """No leg on prefill, nothing lost, and what comes after it is returned as ever."""
    async with (
        fake_pair() as ([prefill], [decode]),
        bench(prefill, decode, decode_alone_tokens=SHORT) as running,
    ):
        answers = await turn(agent, running.http, "Do this. ")
        assert [outcome_of(answer).plan for answer in answers] == [Plan.COLD, Plan.DECODE]
        assert len(prefill.seen) == 1
        outcome = outcome_of(answers[1])
        assert (outcome.reason, outcome.lost, outcome.returned) == (Reason.OK, 0, 0)
        assert 0 < outcome.computed < SHORT
        long = await turn(agent, running.http, "And that. " * 200)
        assert outcome_of(long[0]).plan is Plan.RETURN
        assert outcome_of(long[0]).lost == 0


async def test_without_the_setting_decode_serves_nothing_alone(pair: Pair) -> None:
    """Off by default."""
    answers = await going_on(pair.bench, "And?")
    assert [outcome_of(answer).plan for answer in answers] == [Plan.COLD, Plan.RETURN]


async def test_what_decode_does_not_confirm_to_keep_counts_as_new() -> None:
    """After an eviction, or a restart, the whole prompt would be computed there."""
    async with (
        fake_pair() as ([prefill], [decode]),
        bench(prefill, decode, decode_alone_tokens=SHORT) as running,
    ):
        long = [{"role": "user", "content": "Where does Laura live? " * 200}]
        first = await running.chat(session="s", messages=long)
        said = first.json()["choices"][0]["message"]
        messages = [*long, said, {"role": "user", "content": "And Tom?"}]
        decode.kv.flush()
        again = await running.chat(session="s", messages=messages)
        assert outcome_of(again).plan is Plan.RETURN


async def test_a_history_or_tools_that_changed_are_not_served_alone() -> None:
    """Decode's KV ends where they differ, however short the new message is."""
    async with (
        fake_pair() as ([prefill], [decode]),
        bench(prefill, decode, decode_alone_tokens=SHORT) as running,
    ):
        first = await running.chat(session="s")
        said = first.json()["choices"][0]["message"]
        asked = {"role": "user", "content": "And?"}
        for members in (
            {"messages": [*MESSAGES, {**said, "content": "never said"}, asked]},
            {"messages": [MESSAGES[1], said, asked]},
            {"messages": [*MESSAGES, said, asked], "tools": TOOLS},
        ):
            await running.chat(session="s")
            answer = await running.chat(session="s", **members)
            assert outcome_of(answer).plan is Plan.RETURN, members


async def test_reasoning_that_a_template_may_strip_is_not_relied_on() -> None:
    """Within a turn it stays; with the next user message all of it may go."""
    history = History(whole=b"", answers=(b"d",), new_bytes=100, has_reasoning=True)
    last = Answered(digest=b"d", front=b"", prompt_tokens=10, answer_bytes=20)
    assert least_new_tokens(history, b"", last, in_turn=False) is None
    assert least_new_tokens(history, b"", last, in_turn=True) == 60 + 64


async def test_all_prefill_engines_gone_is_503_or_what_decode_may_compute() -> None:
    """Short calls and what continues a session go on; the rest is told when to come back."""
    async with (
        fake_pair() as ([prefill], [decode]),
        bench(prefill, decode, max_new_tokens_on_decode=SHORT) as running,
    ):
        await running.ready()
        long = [{"role": "user", "content": "Where does Laura live? " * 200}]
        first = await running.chat(session="s", messages=long)
        assert outcome_of(first).plan is Plan.COLD, "with prefill there it is not used"
        await is_gone(running, prefill)
        assert await health(running) == (200, "degraded")
        said = first.json()["choices"][0]["message"]
        messages = [*long, said, {"role": "user", "content": "And Tom?"}]
        again = outcome_of(await running.chat(session="s", messages=messages))
        assert (again.plan, again.lost) == (Plan.DECODE, 0)
        short = outcome_of(await running.chat(session="t"))
        assert (short.plan, short.reason) == (Plan.DECODE, Reason.OK)
        refused = await running.chat(session="u", messages=long)
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "no_prefill"
        assert "max_new_tokens_on_decode" in refused.json()["error"]["message"]
        assert refused.headers["retry-after"] == "1"
        await is_back(running, prefill)
        assert outcome_of(await running.chat(session="u", messages=long)).plan is Plan.COLD


async def test_all_decode_engines_gone_is_503_or_served_by_prefill() -> None:
    """By setting; a session that was answered there goes on when decode is back."""
    async with (
        fake_pair() as ([prefill], [decode]),
        bench(prefill, decode, serve_on_prefill=True) as running,
    ):
        await running.ready()
        await is_gone(running, decode)
        assert await health(running) == (200, "degraded")
        answers = await going_on(running, "And?")
        outcomes = [outcome_of(answer) for answer in answers]
        assert [(each.plan, each.reason) for each in outcomes] == [
            (Plan.COLD, Reason.SOURCE_GONE)
        ] * 2
        assert sum(each.lost for each in outcomes) == 0
        assert (await running.chat(n=2)).status_code == 200
        await is_back(running, decode)
        assert (await going_on(running, "And?"))[1].status_code == 200
        assert len(decode.seen) == 2


@pytest.mark.parametrize("side", ["prefill", "decode"])
async def test_without_a_policy_a_side_that_is_gone_is_unavailable(pair: Pair, side: str) -> None:
    """Readiness says so, and calls are 503 with a time to come back."""
    await is_gone(pair.bench, pair.prefill if side == "prefill" else pair.decode)
    assert await health(pair.bench) == (503, "unavailable")
    answer = await pair.bench.chat(session="s")
    assert answer.status_code == 503
    assert answer.headers["retry-after"] == "1"


async def test_a_restart_between_two_checks_is_noticed(pair: Pair) -> None:
    """Another process: its models are asked for again, and it is counted."""
    await pair.bench.ready()
    pair.decode.models = ["another"]
    pair.decode.num_starts += 1
    await pair.bench.eventually(
        lambda: pair.bench.of_kind(EngineRestarted), lambda events: len(events) == 1
    )
    assert (await pair.bench.chat(model="another")).status_code != 404
    sample = 'turncache_router_engine_restarts_total{engine="decode-0",side="decode"}'
    assert await pair.bench.metric(sample) == 1
