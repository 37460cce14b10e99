"""Warm ahead: prefill gets what is known of the next prompt before the tools have ended."""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fakes.engine import FakeEngine, Script, fake_engines, fake_pair
from tests.server.router.conftest import Pair
from tests.server.router.support import MESSAGES, TOOLS, Bench, bench, outcome_of
from turncache_server.router.body import Body
from turncache_server.router.events import WarmedAhead
from turncache_server.router.following import Said
from turncache_server.router.keys import add_key
from turncache_server.router.next_prompts import NextPrompts, next_messages
from turncache_server.router.opening import CallInput

pytestmark = pytest.mark.anyio


@pytest.fixture
async def warmed(anyio_backend: str) -> AsyncIterator[Pair]:
    """A router that sends prompts ahead, in front of one prefill and one decode engine."""
    async with (
        fake_pair() as ([prefill], [decode]),
        bench(prefill, decode, warm_ahead_s=0.03) as running,
    ):
        yield Pair(running, prefill, decode)


async def asks(made: Bench, tool_s: float, **members: Any) -> dict[str, Any]:
    """Make a call that ends in a tool call; return the message that a client appends."""
    headers = {"Turncache-Tools": f"search={tool_s}"}
    answer = await made.chat(tools=TOOLS, session="s", headers=headers, **members)
    if not members.get("stream"):
        message: dict[str, Any] = answer.json()["choices"][0]["message"]
        return message
    return {"role": "assistant", "content": None, "tool_calls": [CALL]}


#: What the fake asks for after two messages.
CALL = {
    "id": "call_2",
    "type": "function",
    "function": {"name": "search", "arguments": '{"query": "step 2"}'},
}


def with_results(reply: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the history with the tool's result."""
    result = {"role": "tool", "tool_call_id": "call_2", "content": "Laura lives in Turin. " * 4}
    return [*MESSAGES, reply, result]


async def results(made: Bench, count: int) -> list[str]:
    """Wait until this many prompts have come to their end; return what became of them."""
    told = await made.eventually(
        lambda: made.of_kind(WarmedAhead), lambda events: len(events) >= count
    )
    return [event.result for event in told]


@pytest.mark.parametrize("stream", [False, True])
async def test_prefill_is_up_to_date_when_the_tools_end(warmed: Pair, stream: bool) -> None:
    """It pulls the answer from decode in the wait, and the next call has nothing to pull."""
    reply = await asks(warmed.bench, 0.06, stream=stream)
    assert await results(warmed.bench, 1) == ["warmed"]
    first, ahead = warmed.prefill.seen
    assert ahead.body["messages"] == [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "call_2", "content": ""},
    ]
    assert (ahead.body["max_tokens"], ahead.body["stream"]) == (1, False)
    assert ahead.body["tools"] == TOOLS
    assert ahead.xargs["tc_source"] == "decode-0"
    assert ahead.xargs["tc_call"] == "prefill"
    assert "tc_handover" not in ahead.xargs
    assert ahead.xargs["tc_request"] != first.xargs["tc_request"]
    assert len(warmed.decode.seen) == 1
    (told,) = warmed.bench.of_kind(WarmedAhead)
    assert told.outcome.returned > 0
    answer = await warmed.bench.chat(tools=TOOLS, session="s", messages=with_results(reply))
    outcome = outcome_of(answer)
    assert (outcome.returned, outcome.lost) == (0, 0)
    assert outcome.local >= told.outcome.local + told.outcome.returned
    for source in ("local", "returned", "computed"):
        sample = f'turncache_router_warm_ahead_tokens_total{{source="{source}"}}'
        assert await warmed.bench.metric(sample) == getattr(told.outcome, source)
    assert await warmed.bench.metric('turncache_router_warm_ahead_total{result="warmed"}') == 1
    await warmed.bench.record(answer)
    assert await resumed(warmed.bench, "yes", "prompt") == outcome.prompt
    assert await resumed(warmed.bench, "yes", "computed") == outcome.computed
    assert await resumed(warmed.bench, "no", "prompt") == 0


async def resumed(made: Bench, warmed: str, what: str) -> float:
    """Return what was counted of calls that bring results of tools."""
    sample = f'turncache_router_resumed_tokens_total{{warmed="{warmed}",what="{what}"}}'
    return await made.metric(sample)


async def test_what_it_brings_is_counted_by_what_was_lost(warmed: Pair) -> None:
    """Of calls whose prompt was sent ahead beside the others, and of no other calls."""
    first = await warmed.bench.chat(tools=TOOLS, session="other")
    await warmed.bench.record(first)
    reply = await asks(warmed.bench, 0.06)
    assert await results(warmed.bench, 1) == ["warmed"]
    for engine in (warmed.prefill, warmed.decode):
        engine.kv.flush()
    later = {"Turncache-Tools": "search=600"}
    answer = await warmed.bench.chat(
        tools=TOOLS, session="s", messages=with_results(reply), headers=later
    )
    await warmed.bench.record(answer)
    lost = outcome_of(answer).lost
    assert lost > 0
    assert await resumed(warmed.bench, "yes", "lost") == lost
    # The next one of this session was not sent ahead.
    for engine in (warmed.prefill, warmed.decode):
        engine.kv.flush()
    again = await warmed.bench.chat(tools=TOOLS, session="s", messages=with_results(reply))
    await warmed.bench.record(again)
    assert await resumed(warmed.bench, "yes", "lost") == lost
    assert await resumed(warmed.bench, "no", "lost") == outcome_of(again).lost
    for word in ("yes", "no"):
        sample = f'turncache_router_resumed_ttft_seconds_count{{warmed="{word}"}}'
        assert await warmed.bench.metric(sample) == 1


async def test_a_session_that_is_back_first_is_not_warmed(warmed: Pair) -> None:
    """Its call brings the prompt itself."""
    reply = await asks(warmed.bench, 600)
    await warmed.bench.chat(tools=TOOLS, session="s", messages=with_results(reply))
    assert await results(warmed.bench, 1) == ["overtaken"]
    assert len(warmed.prefill.seen) == 2


async def test_a_session_that_has_ended_is_not_warmed(warmed: Pair) -> None:
    """Nobody will be back."""
    await asks(warmed.bench, 600)
    await warmed.bench.http.post(
        "/v1/sessions", json={"notice": "final"}, headers={"X-Session-ID": "s"}
    )
    await warmed.bench.chat(session="s")
    assert warmed.bench.of_kind(WarmedAhead) == []


async def notify(made: Bench, **notice: Any) -> None:
    """Say something of the session."""
    answer = await made.http.post("/v1/sessions", json=notice, headers={"X-Session-ID": "s"})
    assert answer.status_code == 202


@pytest.mark.parametrize(
    "notice",
    [
        {"notice": "cancel"},
        {"notice": "compaction"},
        {"notice": "resume"},
        {"notice": "wait", "expect_s": 0.01},
        {"notice": "wait", "expect_s": 7200},
    ],
    ids=str,
)
async def test_a_session_that_is_given_up_or_back_is_not_warmed(
    warmed: Pair, notice: dict[str, Any]
) -> None:
    """Nobody will bring that prompt, or it comes at once."""
    reply = await asks(warmed.bench, 600)
    await notify(warmed.bench, **notice)
    await warmed.bench.chat(tools=TOOLS, session="s", messages=with_results(reply))
    assert warmed.bench.of_kind(WarmedAhead) == []


async def test_the_prompt_moves_with_what_the_client_expects(warmed: Pair) -> None:
    """It knows better than a forecast; a wait of which it knows nothing stays as it is."""
    await asks(warmed.bench, 600)
    await notify(warmed.bench, notice="wait")
    await notify(warmed.bench, notice="wait", expect_s=0.06)
    assert await results(warmed.bench, 1) == ["warmed"]


async def test_returns_that_are_switched_off_in_the_wait_are_off(warmed: Pair) -> None:
    """Prefill would compute what it cannot pull."""
    await asks(warmed.bench, 0.06)
    warmed.bench.router.return_enabled = False
    assert await results(warmed.bench, 1) == ["no_engine"]
    assert len(warmed.prefill.seen) == 1


async def test_what_waits_is_the_request_and_not_the_call(warmed: Pair) -> None:
    """What has been parsed of a prompt takes many times the bytes that are counted."""
    await asks(warmed.bench, 600)

    def num_kept() -> int:
        gc.collect()
        return sum(isinstance(each, Body | CallInput) for each in gc.get_objects())

    # The end of a call is told a moment after its answer.
    await warmed.bench.eventually(num_kept, lambda count: count == 0)


@pytest.mark.parametrize("tool_s", [0.0, 0.03])
async def test_a_tool_that_is_as_quick_is_not_worth_it(warmed: Pair, tool_s: float) -> None:
    """The prompt sent ahead would meet the call itself."""
    reply = await asks(warmed.bench, tool_s)
    await warmed.bench.chat(tools=TOOLS, session="s", messages=with_results(reply))
    assert warmed.bench.of_kind(WarmedAhead) == []
    assert len(warmed.prefill.seen) == 2


async def test_nothing_is_sent_ahead_by_default(pair: Pair) -> None:
    """It costs prefill work, and pays only where waits are foreseen."""
    reply = await asks(pair.bench, 0.01)
    await asyncio.sleep(0.04)
    await pair.bench.chat(tools=TOOLS, session="s", messages=with_results(reply))
    assert len(pair.prefill.seen) == 2


async def test_a_router_of_single_engines_says_that_it_sends_nothing_ahead(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Whoever has set it believes that it does something."""
    engine = FakeEngine()
    async with fake_engines(engine), bench(engine, warm_ahead_s=1):
        pass
    assert [m for m in caplog.messages if m.startswith("warm_ahead_s = 1.0 has no effect")]


async def test_nothing_is_sent_ahead_while_returns_are_off(warmed: Pair) -> None:
    """Prefill would compute what it cannot pull."""
    warmed.bench.router.return_enabled = False
    reply = await asks(warmed.bench, 600)
    await warmed.bench.chat(tools=TOOLS, session="s", messages=with_results(reply))
    assert warmed.bench.of_kind(WarmedAhead) == []


@pytest.mark.parametrize(
    ("script", "result"),
    [
        pytest.param(Script(status=400), "refused", id="the engine refuses"),
        pytest.param(Script(die="before"), "failed", id="the engine breaks off"),
    ],
)
async def test_what_fails_is_counted_and_costs_no_call(
    warmed: Pair, script: Script, result: str
) -> None:
    """The session goes on as without it."""
    warmed.prefill.scripts = [Script(), script]
    reply = await asks(warmed.bench, 0.06)
    assert await results(warmed.bench, 1) == [result]
    answer = await warmed.bench.chat(tools=TOOLS, session="s", messages=with_results(reply))
    assert answer.status_code == 200
    assert outcome_of(answer).lost == 0
    await warmed.bench.record(answer)
    assert await resumed(warmed.bench, "yes", "prompt") == 0
    assert await resumed(warmed.bench, "no", "prompt") == outcome_of(answer).prompt


async def test_an_engine_that_pulls_nothing_is_left_alone(warmed: Pair) -> None:
    """Its mode may have changed since the call."""
    await asks(warmed.bench, 0.2)
    warmed.decode.mode = "off"
    assert await results(warmed.bench, 1) == ["no_engine"]
    assert len(warmed.prefill.seen) == 1


@given(
    text=st.text(),
    spaces=st.sampled_from(["", " ", "\n  "]),
    said=st.text(),
    calls=st.lists(st.tuples(st.text(min_size=1), st.text(), st.text()), min_size=1, max_size=3),
)
def test_the_history_stays_byte_for_byte(
    text: str, spaces: str, said: str, calls: list[tuple[str, str, str]]
) -> None:
    """What is added comes behind it; every call has its result, under the id that it has."""
    history = f'[{spaces}{{"role" :"user","content":{json.dumps(text)}}}{spaces}]'
    body = Body.parse(f'{{"messages":{history},"n":1}}'.encode(), max_depth=20)
    made = next_messages(
        body,
        Said(
            text=said,
            calls=tuple((name, arguments) for name, arguments, _ in calls),
            call_ids=tuple(call_id for _, _, call_id in calls),
        ),
    )
    assert made.startswith(history[:-1].rstrip())
    user, assistant, *after = json.loads(made)
    assert user["content"] == text
    assert assistant["content"] == (said or None)
    assert [call["id"] for call in assistant["tool_calls"]] == [
        result["tool_call_id"] for result in after
    ]
    functions = [call["function"] for call in assistant["tool_calls"]]
    assert [(f["name"], f["arguments"]) for f in functions] == [call[:2] for call in calls]


async def test_waiting_prompts_are_bounded_and_freed() -> None:
    """Of a session there is one; what is dropped makes room."""
    sent: list[str] = []
    made = NextPrompts(100)

    def later(session: str, size_bytes: int) -> int:
        return made.later(session, size_bytes, 600.0, lambda: sent.append(session), tenant=None)

    assert later("a", 60) == 0
    assert later("b", 60) == 1
    assert later("a", 90) == 0
    assert len(made) == 1
    assert made.drop("a")
    assert not made.drop("a")
    done = asyncio.Event()
    assert made.later("b", 100, 0.0, done.set, tenant=None) == 0
    await done.wait()
    assert sent == []
    assert len(made) == 0
    assert later("c", 100) == 0
    made.close()
    assert len(made) == 0


@given(
    greedy=st.lists(
        st.tuples(st.sampled_from("ab"), st.integers(0, 5), st.integers(1, 70)), max_size=30
    ),
    modest=st.lists(st.integers(0, 29), min_size=3, max_size=3),
)
async def test_no_tenant_takes_the_share_of_another(
    greedy: list[tuple[str, int, int]], modest: list[int]
) -> None:
    """A third of the room is there for a third tenant, and every prompt that goes is counted."""
    made, num_gone, num_put = NextPrompts(100), 0, 0

    def put(tenant: str, session: str, size_bytes: int) -> None:
        nonlocal num_gone, num_put
        num_put += not made.drop(session)
        num_gone += made.later(session, size_bytes, 600.0, lambda: None, tenant=tenant)

    for at, (tenant, session, size_bytes) in enumerate(greedy):
        for number, when in enumerate(modest):
            if when == at:
                put("c", f"c{number}", 11)
        put(tenant, f"{tenant}{session}", size_bytes)
    assert len(made) == num_put - num_gone
    for number, when in enumerate(modest):
        assert made.drop(f"c{number}") == (when < len(greedy))
    made.close()


async def test_one_tenant_does_not_fill_the_room_for_all(tmp_path: Path) -> None:
    """Its latest prompt makes way for the only one of another, and both are counted."""
    path = tmp_path / "keys.toml"
    red, blue = ({"Authorization": f"Bearer {add_key(path, name)}"} for name in ("red", "blue"))
    async with (
        fake_pair() as ([prefill], [decode]),
        bench(
            prefill, decode, warm_ahead_s=0.03, max_ahead_bytes=4096, keys_file=str(path)
        ) as running,
    ):
        made: dict[str, dict[str, Any]] = {}

        async def call(session: str, key: dict[str, str], **members: Any) -> Any:
            headers = {"Turncache-Tools": "search=600", **key}
            answer = await running.chat(tools=TOOLS, session=session, headers=headers, **members)
            return answer.json()["choices"][0]["message"]

        for number in range(3):
            made[f"red-{number}"] = await call(f"red-{number}", red)
        assert len(running.of_kind(WarmedAhead)) == 0
        made["red-3"] = await call("red-3", red)
        assert await results(running, 1) == ["no_room"]
        made["blue"] = await call("blue", blue)
        assert await results(running, 2) == ["no_room", "no_room"]
        for session, key in (("blue", blue), ("red-0", red), ("red-1", red)):
            await call(session, key, messages=with_results(made[session]))
        # Of red's three the latest has gone.
        assert (await results(running, 5))[2:] == ["overtaken"] * 3
        running.http.headers.update(red)
        sample = 'turncache_router_warm_ahead_total{result="no_room"}'
        assert await running.metric(sample) == 2
