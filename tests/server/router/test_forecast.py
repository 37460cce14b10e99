"""Expectations of tool waits: whose row counts, what is learnt, and what engines are told."""

from __future__ import annotations

import json
from typing import Any

import httpx2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fakes.engine import FakeEngine, Script, fake_engines
from tests.server.router.conftest import Pair, Single
from tests.server.router.support import MESSAGES, TOOLS, Bench, bench
from turncache_server.control.messages import Signal
from turncache_server.router.events import SignalSent, WaitEnded
from turncache_server.router.forecast import EndedWait, Forecast

pytestmark = pytest.mark.anyio


def forecast(**measured_s: float) -> Forecast:
    """Return a forecast that has measured these tools once."""
    made = Forecast(100)
    for name, seconds in measured_s.items():
        made.begins("teacher", [name], {}, tenant=None, now_s=0.0)
        made.ends("teacher", now_s=seconds)
    return made


@pytest.mark.parametrize(
    ("measured_s", "rows", "names", "expect_s"),
    [
        pytest.param({}, {}, ["search"], None, id="nobody knows"),
        pytest.param({"search": 5}, {"search": 2}, ["search"], 2.0, id="the client's own row"),
        pytest.param({"search": 5}, {"*": 9}, ["search"], 5.0, id="measured before any tool"),
        pytest.param({"build": 5}, {"*": 9}, ["search"], 9.0, id="the client's any tool"),
        pytest.param({"build": 5}, {}, ["search"], 5.0, id="any tool measured"),
        pytest.param({}, {"a": 1, "b": 7}, ["a", "b"], 7.0, id="the slowest of several"),
        pytest.param({}, {"a": 1}, ["a", "b"], 1.0, id="the slowest that is known"),
        pytest.param({}, {"bash": 3}, ["Bash"], 3.0, id="keys are lower case"),
        pytest.param({}, {"a": 0.0}, ["a"], 0.0, id="at once is an expectation"),
    ],
)
def test_whose_row_counts(
    measured_s: dict[str, float], rows: dict[str, float], names: list[str], expect_s: float | None
) -> None:
    """The client's row for the tool, then the router's, then a row for any tool."""
    assert forecast(**measured_s).begins("s", names, rows, tenant=None, now_s=10.0) == expect_s


def test_a_wait_is_measured_once() -> None:
    """The call that brings the results ends it; a retry of that call does not."""
    made = Forecast(100)
    made.begins("s", ["search"], {"search": 4.0}, tenant=None, now_s=10.0)
    assert made.ends("s", now_s=18.0) == EndedWait(
        seconds=8.0, expect_s=4.0, tool_names=("search",)
    )
    assert made.ends("s", now_s=19.0) is None
    assert made.begins("s", ["search"], {}, tenant=None, now_s=20.0) == 8.0


async def test_a_wait_that_ended_at_another_replica_is_measured_by_neither() -> None:
    """The first replica's next call would make two waits, and the call between them, one."""
    engine = FakeEngine()
    function = {"name": "search", "arguments": "{}"}
    reply = {"role": "assistant", "tool_calls": [{"id": "1", "function": function}]}
    choice = {"index": 0, "finish_reason": "tool_calls", "message": reply}
    engine.default = Script(body=json.dumps({"choices": [choice]}).encode())
    async with fake_engines(engine), bench(engine) as first, bench(engine) as second:
        messages = MESSAGES
        for running in (first, second, first, first):
            await running.chat(tools=TOOLS, session="s", messages=messages)
            messages = [*messages, *results(reply)[-2:]]
        # Only the last wait began and ended at one.
        assert [len(running.of_kind(WaitEnded)) for running in (first, second)] == [1, 0]


@pytest.mark.parametrize(
    ("num_answers", "measured"), [(4, True), (2, True), (None, True), (5, False)]
)
def test_answers_that_came_in_between_are_another_wait(
    num_answers: int | None, measured: bool
) -> None:
    """A history that got shorter, or that an engine keeps, says nothing of that."""
    made = Forecast(100)
    made.begins("s", ["search"], {}, tenant=None, num_answers=3, now_s=0.0)
    assert (made.ends("s", num_answers=num_answers, now_s=5.0) is not None) is measured


def test_a_forgotten_wait_teaches_nothing() -> None:
    """The session has ended: nobody comes back from its tools."""
    made = Forecast(100)
    made.begins("s", ["search"], {}, tenant=None, now_s=0.0)
    made.forget("s")
    assert made.ends("s", now_s=5.0) is None
    assert made.begins("s", ["search"], {}, tenant=None, now_s=6.0) is None


@given(
    steps=st.lists(
        st.tuples(st.booleans(), st.integers(0, 9), st.floats(-1e6, 1e6, allow_nan=False)),
        max_size=60,
    )
)
def test_memory_is_bounded_and_no_wait_is_negative(steps: list[tuple[bool, int, float]]) -> None:
    """Whatever the clock does, and however many sessions never come back."""
    made = Forecast(4)
    for begins, session, now_s in steps:
        if begins:
            expect_s = made.begins(f"s{session}", ["search"], {}, tenant=None, now_s=now_s)
            assert expect_s is None or expect_s >= 0
        else:
            ended = made.ends(f"s{session}", now_s=now_s)
            assert ended is None or ended.seconds >= 0
        assert len(made) <= 4


def results(reply: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the history with a tool call and its result."""
    return [*MESSAGES, reply, {"role": "tool", "tool_call_id": "1", "content": "done"}]


@pytest.mark.parametrize("stream", [True, False])
async def test_both_engines_hear_how_long_the_tool_takes(pair: Pair, stream: bool) -> None:
    """Whoever holds the session: the answer on decode, the prompt on prefill."""
    await pair.bench.chat(
        tools=TOOLS, session="s", stream=stream, headers={"Turncache-Tools": "search=7.5"}
    )
    await pair.bench.eventually(lambda: pair.bench.of_kind(SignalSent), lambda sent: len(sent) == 2)
    told = Signal(session="s", kind="wait", expect_s=7.5)
    assert pair.prefill.signals == pair.decode.signals == [told]
    sample = 'turncache_router_signals_total{kind="wait",result="accepted"}'
    assert await pair.bench.metric(sample) == 2


async def test_without_a_table_the_routers_own_measurement_counts(single: Single) -> None:
    """A client without our SDK has its tools measured from call to call."""
    first = await single.bench.chat(tools=TOOLS, session="s")
    assert single.engine.signals == []
    reply = first.json()["choices"][0]["message"]
    await single.bench.chat(tools=TOOLS, session="s", messages=results(reply))
    (ended,) = single.bench.of_kind(WaitEnded)
    assert ended.expect_s is None
    await single.bench.chat(tools=TOOLS, session="other")
    await single.bench.eventually(lambda: single.engine.signals, lambda told: len(told) == 1)
    (told,) = single.engine.signals
    assert told.session == "other"
    # The client's table holds three significant digits.
    assert told.expect_s == pytest.approx(ended.seconds, rel=0.01)
    assert await single.bench.metric("turncache_router_tool_wait_seconds_count") == 1


async def test_a_wait_is_scored_against_its_expectation(single: Single) -> None:
    """An expectation that never comes true shows in the metrics."""
    first = await single.bench.chat(
        tools=TOOLS, session="s", headers={"Turncache-Tools": "search=3600"}
    )
    reply = first.json()["choices"][0]["message"]
    await single.bench.chat(tools=TOOLS, session="s", messages=results(reply))
    assert await single.bench.metric('turncache_expectation_ratio_bucket{le="0.1"}') == 1


@pytest.mark.parametrize("final", [True, False])
async def test_no_signal_without_a_session_that_comes_back(single: Single, final: bool) -> None:
    """Neither for a call that says it is the last, nor for one without a session."""
    headers = {"Turncache-Tools": "search=7.5"}
    if final:
        headers |= {"X-Session-ID": "s", "X-Session-Final": "true"}
    await single.bench.chat(tools=TOOLS, headers=headers)
    await single.bench.chat(tools=TOOLS, session="t", headers={"Turncache-Tools": "search=1"})
    await single.bench.eventually(lambda: single.engine.signals, bool)
    assert [told.session for told in single.engine.signals] == ["t"]


async def test_an_engine_without_a_control_socket_is_not_told() -> None:
    """There is nobody to tell; the client has its answer all the same."""
    engine = FakeEngine(control=False)
    async with fake_engines(engine), bench(engine) as running:
        answer = await running.chat(
            tools=TOOLS, session="s", headers={"Turncache-Tools": "search=7.5"}
        )
        assert answer.status_code == 200
        assert running.of_kind(SignalSent) == []


# --- what clients say themselves ----------------------------------------------------------------


async def say(running: Bench, session: str | None, **body: Any) -> httpx2.Response:
    """Post a notice."""
    headers = {} if session is None else {"X-Session-ID": session}
    return await running.http.post("/v1/sessions", json=body, headers=headers)


async def test_a_clients_notice_reaches_every_engine_that_holds_the_session(pair: Pair) -> None:
    """A wait for a person, or the end of a run that made no last call."""
    await pair.bench.chat(session="s")
    answer = await say(pair.bench, "s", notice="wait", expect_s=600)
    assert answer.status_code == 202
    assert answer.json() == {"accepted": True, "clipped_s": None, "why": None}
    told = Signal(session="s", kind="wait", expect_s=600)
    assert pair.prefill.signals == pair.decode.signals == [told]
    await say(pair.bench, "s", notice="final")
    assert pair.decode.signals[-1] == Signal(session="s", kind="final")
    assert await pair.bench.metric("turncache_router_sessions") == 0


async def test_a_notice_about_a_session_that_nobody_knows_is_answered(single: Single) -> None:
    """Refused by the engine, with its reason, and no error: there is nothing to do."""
    answer = await say(single.bench, "nobody", notice="cancel")
    assert answer.status_code == 202
    assert answer.json()["accepted"] is False


async def test_what_a_client_expects_is_what_its_wait_is_scored_by(single: Single) -> None:
    """It knows better than the table what its tool waits for."""
    headers = {"Turncache-Tools": "search=1"}
    first = await single.bench.chat(tools=TOOLS, session="s", headers=headers)
    await say(single.bench, "s", notice="wait", expect_s=900)
    reply = first.json()["choices"][0]["message"]
    await single.bench.chat(tools=TOOLS, session="s", messages=results(reply))
    (ended,) = single.bench.of_kind(WaitEnded)
    assert ended.expect_s == 900


@pytest.mark.parametrize(
    ("session", "body", "param"),
    [
        (None, {"notice": "final"}, "session"),
        ("s", {}, "notice"),
        ("s", {"notice": "nap"}, "notice"),
        ("s", {"notice": ["final"]}, "notice"),
        ("s", {"notice": "wait", "expect_s": -1}, "expect_s"),
        ("s", {"notice": "wait", "expect_s": "soon"}, "expect_s"),
        ("s", {"notice": "wait", "expect_s": True}, "expect_s"),
        ("s p a c e", {"notice": "final"}, "x-session-id"),
    ],
)
async def test_a_notice_that_cannot_be_meant_is_refused(
    single: Single, session: str | None, body: dict[str, Any], param: str
) -> None:
    """In OpenAI's form, and no engine hears of it."""
    answer = await say(single.bench, session, **body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
    assert single.engine.signals == []
