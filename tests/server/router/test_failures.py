"""Engines that die, refuse, stall or lie; clients that leave."""

from __future__ import annotations

import asyncio
import json

import httpx2
import openai
import pytest

from tests.fakes.engine import FakeEngine, Script, event, fake_engines, fake_pair
from tests.server.router.conftest import Pair, Single
from tests.server.router.support import CHAT, MESSAGES, Bench, bench, outcome_of, streamed
from turncache.protocol import Plan, Reason
from turncache_server.router.events import CallEnded, EngineChanged, LegFailure

pytestmark = pytest.mark.anyio


def error_of(answer: httpx2.Response) -> dict[str, object]:
    """Return an answer's error, which has OpenAI's shape."""
    error: dict[str, object] = answer.json()["error"]
    assert {"message", "type", "param", "code"} <= set(error)
    return error


async def events_of(running: Bench, **members: object) -> list[dict[str, object]]:
    """Stream a call and return its events' data."""
    answer = await running.chat(stream=True, **members)
    assert answer.status_code == 200
    lines = [line[6:] for line in answer.text.split("\n\n") if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


# --- engines ---------------------------------------------------------------------------------


@pytest.mark.parametrize("side", ["prefill", "decode"])
@pytest.mark.parametrize("stream", [True, False])
async def test_an_engine_that_is_gone_is_a_503_until_it_is_back(
    pair: Pair, side: str, stream: bool
) -> None:
    """The error says when to try again, and the next call works once the engine does."""
    engine = pair.prefill if side == "prefill" else pair.decode
    await pair.bench.chat(session="s")
    await engine.stop()
    answer = await pair.bench.chat(session="s", stream=stream)
    assert answer.status_code == 503
    assert error_of(answer)["code"] == "engine_refused"
    assert answer.headers["retry-after"] == "1"
    assert answer.headers["turncache"] == "v=1"
    assert "127.0.0.1" not in answer.text
    if side == "prefill":
        assert len(pair.decode.seen) == 1, "no fallback to a whole prefill on decode"
    engine.kv.flush()
    await engine.start()
    await pair.bench.ready()
    again = await pair.bench.chat(session="s", stream=stream)
    assert again.status_code == 200
    assert outcome_of(again).plan is Plan.RETURN


@pytest.mark.parametrize("side", ["prefill", "decode"])
@pytest.mark.parametrize("stream", [True, False])
async def test_an_engine_that_dies_before_its_first_byte_is_a_502(
    pair: Pair, side: str, stream: bool
) -> None:
    """The engine may have worked on the request: it is not sent again, the client decides."""
    engine = pair.prefill if side == "prefill" else pair.decode
    engine.scripts = [Script(die="before")]
    answer = await pair.bench.chat(session="s", stream=stream)
    assert answer.status_code == 502
    assert error_of(answer)["code"] == "engine_disconnected"
    assert answer.headers["retry-after"] == "1"
    assert len(engine.seen) == 1
    assert (await pair.bench.chat(session="s", stream=stream)).status_code == 200
    failure = pair.bench.of_kind(LegFailure)[0]
    assert (failure.side, failure.kind, failure.retried) == (side, "disconnected", False)


async def test_a_stream_that_breaks_ends_in_an_error_event(pair: Pair) -> None:
    """After the first byte the failure is the stream's last event, and the client raises."""
    pair.decode.scripts = [Script(die="middle"), Script(die="middle")]
    chunks = await events_of(pair.bench, session="s")
    assert chunks[0]["choices"]
    assert chunks[-1]["error"]["code"] == "engine_disconnected"  # type: ignore[index]
    with pytest.raises(openai.APIError, match="broke off"):
        await streamed(pair.bench.openai, model="fake", messages=MESSAGES)
    ended = pair.bench.of_kind(CallEnded)
    assert [(event.code, event.problem) for event in ended] == [(200, "disconnected")] * 2
    sample = 'turncache_router_failed_calls_total{problem="disconnected"}'
    assert await pair.bench.metric(sample) == 2
    answer = await pair.bench.chat(session="s")
    assert outcome_of(answer).plan is Plan.COLD, "the session was not advanced"


@pytest.mark.parametrize("side", ["prefill", "decode"])
async def test_another_engine_is_tried_when_nothing_was_consumed(side: str) -> None:
    """A refused connection or a 503 moves the leg to the next engine of the side."""
    async with (
        fake_pair(prefills=2, decodes=2) as (prefill, decode),
        bench(*prefill, *decode, health_interval_s=60) as running,
    ):
        engines = prefill if side == "prefill" else decode
        await running.chat(session="s")
        first = next(engine for engine in engines if engine.seen)
        other = next(engine for engine in engines if engine is not first)
        first.scripts = [Script(status=503)]
        assert (await running.chat(session="s")).status_code == 200
        assert len(other.seen) == 1
        await first.stop()
        for _ in range(3):
            assert (await running.chat(session="s")).status_code == 200
        assert len(other.seen) == 4
        # One refused connection is enough to go straight to the other engine.
        retried = running.of_kind(LegFailure)
        assert [event.kind for event in retried] == ["unavailable", "refused"]
        assert all(event.retried for event in retried)


async def test_a_leg_on_another_prefill_engine_names_that_as_source() -> None:
    """Decode pulls from the engine that computed the prompt, wherever that was."""
    async with (
        fake_pair(prefills=2) as (prefill, [decode]),
        bench(*prefill, decode) as running,
    ):
        await running.chat(session="s")
        first = next(engine for engine in prefill if engine.seen)
        other = next(engine for engine in prefill if engine is not first)
        first.scripts = [Script(status=503)]
        await running.chat(session="s")
        assert [seen.xargs["tc_source"] for seen in decode.seen] == [first.name, other.name]


@pytest.mark.parametrize("status", [400, 404, 422, 429, 500])
@pytest.mark.parametrize("side", ["prefill", "decode"])
async def test_an_engines_error_passes_as_it_is(pair: Pair, side: str, status: int) -> None:
    """Status, body and Retry-After of an error before the first byte are the engine's."""
    engine = pair.prefill if side == "prefill" else pair.decode
    body = b'{"object":"error", "error":{"message":"no","code":  400}}'
    engine.scripts = [Script(status=status, body=body, headers={"Retry-After": "7"})]
    answer = await pair.bench.chat(stream=True)
    assert (answer.status_code, answer.content) == (status, body)
    assert answer.headers["retry-after"] == "7"
    assert len(engine.seen) == 1
    assert len(pair.decode.seen) == (side == "decode")


async def test_a_503_of_the_only_engine_keeps_its_body(single: Single) -> None:
    """With nobody else to ask the engine's answer goes out, with a Retry-After."""
    single.engine.scripts = [Script(status=503, body=b'{"error":{"message":"full"}}')]
    answer = await single.bench.chat()
    assert (answer.status_code, answer.json()["error"]["message"]) == (503, "full")
    assert answer.headers["retry-after"] == "1"


async def test_what_happens_after_done_is_nobodys_problem(single: Single) -> None:
    """The client has the whole answer: a connection that breaks then changes nothing."""
    single.engine.scripts = [Script(die="end")]
    answer = await single.bench.chat(session="s", stream=True)
    assert answer.text.endswith("data: [DONE]\n\n")
    assert b'"error"' not in answer.content
    assert (await single.bench.record(answer))["state"] == "done"


async def test_an_engine_that_is_full_or_refuses_is_alive() -> None:
    """Answers of any status neither open the circuit nor let failures add up."""
    engine = FakeEngine()
    async with fake_engines(engine), bench(engine, breaker_failures=2) as running:
        engine.scripts = [Script(status=503) for _ in range(5)]
        for _ in range(5):
            assert (await running.chat()).status_code == 503
        for script, status in [(Script(die="before"), 502), (Script(status=400), 400)] * 3:
            engine.scripts = [script]
            assert (await running.chat()).status_code == status
        assert [event.live for event in running.of_kind(EngineChanged)] == [True]


@pytest.mark.parametrize("stream", [True, False])
async def test_an_engine_that_stalls_is_a_504(stream: bool) -> None:
    """Every leg has a deadline for its first byte; then the engine is told to stop."""
    engine = FakeEngine()
    async with fake_engines(engine), bench(engine, first_byte_timeout_s=0.05) as running:
        engine.scripts = [Script(until=asyncio.Event())]
        answer = await running.chat(stream=stream)
        assert answer.status_code == 504
        assert error_of(answer)["code"] == "engine_timeout"
        await running.eventually(lambda: engine.num_cancelled, lambda n: n == 1)
        assert (await running.chat(stream=stream)).status_code == 200


async def test_each_leg_has_a_deadline_of_its_own() -> None:
    """Prefill may need longer, or less long, than what comes after it."""
    for late, limits in (
        ("prefill", {"prefill_timeout_s": 0.05}),
        ("decode", {"first_byte_timeout_s": 0.05, "prefill_timeout_s": 20.0}),
    ):
        async with (
            fake_pair() as ([prefill], [decode]),
            bench(prefill, decode, **limits) as running,
        ):
            slow = prefill if late == "prefill" else decode
            slow.scripts = [Script(until=asyncio.Event())]
            answer = await running.chat(stream=True)
            assert (answer.status_code, error_of(answer)["code"]) == (504, "engine_timeout")
            [failure] = running.of_kind(LegFailure)
            assert (failure.side, failure.kind, failure.retried) == (late, "timeout", False)
            assert len(decode.seen) == (late == "decode")
            await running.eventually(lambda: slow.num_cancelled, lambda n: n == 1)  # noqa: B023


async def test_an_answer_may_take_only_so_long() -> None:
    """However steadily it comes; the client is told, the engine is told to stop, and is well."""
    engine = FakeEngine()
    async with (
        fake_engines(engine),
        bench(engine, answer_timeout_s=0.05, breaker_failures=1) as running,
    ):
        engine.scripts = [Script(pause_after=2)]
        chunks = await events_of(running)
        assert chunks[-1]["error"]["code"] == "engine_too_long"  # type: ignore[index]
        await running.eventually(lambda: engine.num_cancelled, lambda n: n == 1)
        [ended] = running.of_kind(CallEnded)
        assert (ended.code, ended.problem) == (200, "too_long")
        assert [event.live for event in running.of_kind(EngineChanged)] == [True]


async def test_a_stream_that_falls_silent_ends_in_an_error_event() -> None:
    """A stalled engine does not hold a client for ever."""
    engine = FakeEngine()
    async with fake_engines(engine), bench(engine, idle_timeout_s=0.05) as running:
        engine.scripts = [Script(pause_after=2)]
        chunks = await events_of(running)
        assert chunks[-1]["error"]["code"] == "engine_timeout"  # type: ignore[index]
        await running.eventually(lambda: engine.num_cancelled, lambda n: n == 1)


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(b"<html>", id="no json"),
        pytest.param(b"{}", id="no choices"),
        pytest.param(b'{"choices":[]}', id="empty choices"),
        pytest.param(b'{"choices":[{"index":0,"finish_reason":null}]}', id="no reason"),
        pytest.param(b'{"error":{"message":"x"}}', id="error with 200"),
    ],
)
async def test_an_answer_that_is_none_is_a_502(single: Single, body: bytes) -> None:
    """What does not read as a finished answer never reaches the client as success."""
    single.engine.scripts = [Script(body=body)]
    answer = await single.bench.chat(session="s")
    assert answer.status_code == 502
    assert error_of(answer)["code"] == "engine_incomplete"
    assert (await single.bench.record(answer))["state"] == "failed"


async def test_an_answer_that_is_too_large_is_cut_off() -> None:
    """An engine that never ends an event, or a body, does not fill the router's memory."""
    engine = FakeEngine()
    async with (
        fake_engines(engine),
        bench(engine, max_event_bytes=4096, max_answer_bytes=4096) as running,
    ):
        engine.scripts = [Script(events=[b"data: " + b"x" * 1000] * 50), Script(body=b"x" * 9000)]
        assert (await events_of(running))[-1]["error"]["code"] == "engine_bad_answer"  # type: ignore[index]
        answer = await running.chat()
        assert (answer.status_code, error_of(answer)["code"]) == (502, "engine_bad_answer")


async def test_a_circuit_opens_on_connections_that_break_and_closes_again() -> None:
    """An engine that is healthy by its own word but drops calls is avoided for a while."""
    engines = [FakeEngine(f"single-{i}") for i in range(2)]
    async with (
        fake_engines(*engines),
        bench(*engines, breaker_failures=2, breaker_open_s=0.2) as running,
    ):
        await running.chat(session="s")
        bad = next(engine for engine in engines if engine.seen)
        bad.default = Script(die="before")
        codes = [(await running.chat(session="s")).status_code for _ in range(4)]
        assert codes == [502, 502, 200, 200]
        bad.default = Script()
        before = len(bad.seen)

        async def served_again() -> bool:
            await running.chat(session="s")
            return len(bad.seen) > before

        await running.eventually(served_again, bool)
        changes = [
            event.live for event in running.of_kind(EngineChanged) if event.engine == bad.name
        ]
        assert changes == [True, False, True]


# --- clients ---------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("side", ["prefill", "decode"])
async def test_a_client_that_leaves_cancels_the_leg(pair: Pair, side: str, stream: bool) -> None:
    """Whichever leg is running is broken off, and no other is started."""
    engine = pair.prefill if side == "prefill" else pair.decode
    script = Script(until=asyncio.Event())
    engine.scripts = [script]
    call = asyncio.create_task(pair.bench.chat(session="s", stream=stream))
    await script.arrived.wait()
    call.cancel()
    await pair.bench.eventually(lambda: engine.num_cancelled, lambda n: n == 1)
    assert len(pair.decode.seen) == (side == "decode")
    ended = await pair.bench.eventually(lambda: pair.bench.of_kind(CallEnded), bool)
    assert (ended[0].code, ended[0].problem) == (499, "client_gone")
    again = await pair.bench.chat(session="s", stream=stream)
    assert outcome_of(again).plan is Plan.COLD
    assert await pair.bench.metric("turncache_router_active_calls") == 0


async def test_a_client_that_leaves_mid_stream_cancels_the_engine(single: Single) -> None:
    """The engine stops generating, and the session stays where it was."""
    script = Script(pause_after=3)
    single.engine.scripts = [script]
    body = {"model": "fake", "messages": MESSAGES, "stream": True}
    async with single.bench.http.stream("POST", CHAT, json=body) as answer:
        await anext(answer.aiter_lines())
    await single.bench.eventually(lambda: single.engine.num_cancelled, lambda n: n == 1)
    assert single.engine.num_active == 0


async def test_a_slow_reader_slows_the_engine_and_not_the_router(single: Single) -> None:
    """A client that does not read makes the router stop reading: its memory is bounded."""
    big = event({"choices": [{"index": 0, "delta": {"content": "x" * 65536}}]})
    finish = event({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
    events = [*[big] * 400, finish, b"data: [DONE]\n\n"]
    single.engine.scripts = [Script(events=events)]
    body = {"model": "fake", "messages": MESSAGES, "stream": True}
    async with single.bench.http.stream("POST", CHAT, json=body) as answer:
        await asyncio.sleep(0.05)
        assert single.engine.num_active == 1, "26 MB do not fit into the buffers in between"
        read = [chunk async for chunk in answer.aiter_raw()]
    assert b"".join(read) == b"".join(events)


async def test_the_reason_of_a_return_that_could_not_be_tried() -> None:
    """A session whose decode engine died is computed again elsewhere, and says why."""
    async with (
        fake_pair(decodes=2) as ([prefill], decode),
        bench(prefill, *decode) as running,
    ):
        await running.chat(session="s")
        first = next(engine for engine in decode if engine.seen)
        await first.stop()
        await running.eventually(
            lambda: running.of_kind(EngineChanged), lambda events: not events[-1].live
        )
        outcome = outcome_of(await running.chat(session="s"))
        assert (outcome.plan, outcome.reason) == (Plan.COLD, Reason.SOURCE_GONE)
        outcome = outcome_of(await running.chat(session="s"))
        assert (outcome.plan, outcome.reason) == (Plan.RETURN, Reason.OK)
