"""Faults that others have hit in OpenAI-compatible proxies: none may exist here."""

from __future__ import annotations

import asyncio
import json
import operator
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import httpx2
import openai
import pytest

from tests.fakes.engine import Answer, FakeEngine, Script, event, fake_engines, fake_pair
from tests.server.router.conftest import Pair, Single
from tests.server.router.support import CHAT, MESSAGES, TOOLS, Bench, bench, outcome_of, streamed
from turncache.protocol import Plan
from turncache_server.router.events import CallEnded, EngineChanged

pytestmark = pytest.mark.anyio


async def test_disconnects_without_streaming_leave_no_orphans(single: Single) -> None:
    """A client that times out and tries again never has two generations running."""
    single.engine.default = Script(until=asyncio.Event())
    for attempt in range(5):
        body = {"model": "fake", "messages": MESSAGES}
        call = asyncio.create_task(single.bench.http.post(CHAT, json=body))
        await single.bench.eventually(lambda: single.engine.num_active, bool)
        call.cancel()  # as a time-out does: the connection is closed
        await single.bench.eventually(
            lambda: single.engine.num_cancelled, partial(operator.eq, attempt + 1)
        )
    assert single.engine.max_active == 1


@pytest.mark.parametrize("stream", [True, False])
async def test_aborts_can_be_kept_from_an_engine_that_does_not_survive_them(
    stream: bool,
) -> None:
    """With on_disconnect=drain the answer is read to its end, for nobody."""
    engine = FakeEngine()
    async with fake_engines(engine), bench(engine, on_disconnect="drain") as running:
        script = Script(until=asyncio.Event())
        engine.scripts = [script]
        call = asyncio.create_task(running.chat(session="s", stream=stream))
        await script.arrived.wait()
        call.cancel()
        await running.eventually(lambda: running.of_kind(CallEnded), bool)
        assert engine.num_active == 1
        assert script.until is not None
        script.until.set()
        await running.eventually(lambda: engine.num_active, lambda n: n == 0)
        assert engine.num_cancelled == 0
        script = Script(pause_after=2)
        engine.scripts = [script]
        body = {"model": "fake", "messages": MESSAGES, "stream": True}
        async with running.http.stream("POST", CHAT, json=body) as answer:
            await anext(answer.aiter_bytes())
        await running.eventually(lambda: running.of_kind(CallEnded), lambda ended: len(ended) == 2)
        assert engine.num_active == 1
        script.resume.set()
        await running.eventually(lambda: engine.num_active, lambda n: n == 0)
        assert engine.num_cancelled == 0


async def test_draining_for_nobody_is_bounded() -> None:
    """An answer that nobody waits for is cut off after a while."""
    engine = FakeEngine()
    async with (
        fake_engines(engine),
        bench(engine, on_disconnect="drain", disconnect_drain_s=0.05) as running,
    ):
        for stream, paused in ((True, True), (False, False), (True, False)):
            script = Script(pause_after=2) if paused else Script(until=asyncio.Event())
            engine.scripts = [script]
            call = asyncio.create_task(running.chat(stream=stream))
            await script.arrived.wait()
            await asyncio.sleep(0.02)
            call.cancel()
            await running.eventually(lambda: engine.num_active, lambda n: n == 0)
        assert engine.num_cancelled == 3


@pytest.mark.parametrize("how", ["reset", "error event"])
async def test_an_upstream_error_in_a_stream_is_no_empty_success(pair: Pair, how: str) -> None:
    """The client raises, is told once, and the session stays where it was."""
    good = Answer.to({"messages": MESSAGES}, 1, 0).events(Script())
    error = event({"error": {"message": "engine died", "type": "server_error", "code": 500}})
    pair.decode.scripts = [
        Script(die="middle")
        if how == "reset"
        else Script(events=[*good[:2], error, b"data: [DONE]\n\n"])
        for _ in range(2)
    ]
    answer = await pair.bench.chat(session="s", stream=True)
    assert answer.content.count(b'{"error":') == 1
    with pytest.raises(openai.APIError):
        await streamed(
            pair.bench.openai,
            model="fake",
            messages=MESSAGES,
            extra_headers={"X-Session-ID": "s"},
        )
    problem = "disconnected" if how == "reset" else "incomplete"
    assert [ended.problem for ended in pair.bench.of_kind(CallEnded)] == [problem] * 2
    assert outcome_of(await pair.bench.chat(session="s")).plan is Plan.COLD


@pytest.mark.parametrize("done", [True, False])
async def test_a_clean_end_without_finish_reason_is_a_failure(pair: Pair, done: bool) -> None:
    """Truncated JSON must not look complete, with [DONE] or without."""
    half = event({"choices": [{"index": 0, "delta": {"content": '{"a":'}}]})
    pair.decode.scripts = [Script(events=[half, b"data: [DONE]\n\n"] if done else [half])]
    answer = await pair.bench.chat(session="s", stream=True)
    assert answer.content.startswith(half)
    assert b"[DONE]" not in answer.content
    assert json.loads(answer.text.split("data: ")[-1])["error"]["code"] == "engine_incomplete"
    record = await pair.bench.record(answer)
    assert (record["state"], record["boundary"]) == ("failed", None)
    assert outcome_of(await pair.bench.chat(session="s")).plan is Plan.COLD


@pytest.mark.parametrize("stream", [True, False])
async def test_an_answer_that_an_engine_breaks_off_is_a_failure(pair: Pair, stream: bool) -> None:
    """An engine that is stopped says 200 and ``abort``: half an answer must not look like one."""
    half = {"index": 0, "finish_reason": "abort"}
    said = {"role": "assistant", "content": "The capital of France is"}
    chunk = event({"choices": [{**half, "delta": said}]})
    body = json.dumps({"choices": [{**half, "message": said}]}).encode()
    script = Script(events=[chunk, b"data: [DONE]\n\n"]) if stream else Script(body=body)
    pair.decode.scripts = [script]
    answer = await pair.bench.chat(session="s", stream=stream)
    assert b"[DONE]" not in answer.content
    error = json.loads(answer.text.split("data: ")[-1])["error"]
    assert error["code"] == "engine_incomplete"
    assert "abort" in error["message"]
    assert answer.status_code == (200 if stream else 502)
    assert outcome_of(await pair.bench.chat(session="s")).plan is Plan.COLD


async def test_any_split_of_the_network_gives_the_client_the_same_bytes(single: Single) -> None:
    """Characters of several bytes, events and usage survive reads of any size."""
    options = {"include_usage": True}
    body = {"messages": MESSAGES, "stream_options": options}
    expected = b"".join(Answer.to(body, 0, 0).events(Script())[:-2])
    for size in (1, 2, 3, 5, 7, 11, 64, 1000):
        single.engine.scripts = [Script(split=size)]
        answer = await single.bench.chat(stream=True, stream_options=options)
        assert answer.content.startswith(expected)
        assert answer.content.endswith(b"data: [DONE]\n\n")
        assert "你好🙂" in answer.text
        record = await single.bench.record(answer)
        assert record["usage"]["prompt_tokens"] > 0
        assert record["boundary"] == "user"


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("split", [0, 1, 4])
async def test_line_ends_and_comments_of_any_kind_are_understood(
    single: Single, end: str, split: int
) -> None:
    """CRLF, lone CR, data without a space, comments, no blank line at the end: read and kept."""
    events = [
        b": hello\n\n",
        *Answer.to({"messages": MESSAGES, "tools": TOOLS}, 0, 0).events(Script()),
    ]
    raw = b"".join(events).replace(b"data: ", b"data:").removesuffix(b"\n\n")
    raw = raw.replace(b"\n", end.encode())
    single.engine.scripts = [Script(events=[raw], split=split)]
    answer = await single.bench.chat(stream=True)
    assert answer.content == raw
    assert (await single.bench.record(answer))["boundary"] == "tool"


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="absent"),
        pytest.param({"stream_options": {}}, id="empty"),
        pytest.param({"stream_options": {"include_usage": False}}, id="false"),
        pytest.param({"stream_options": {"include_usage": True}}, id="true"),
        pytest.param({"stream_options": None}, id="null"),
    ],
)
async def test_the_chunks_are_those_of_the_engine(pair: Pair, options: dict[str, Any]) -> None:
    """The router asks for no usage of its own: the stream equals the engine's, byte for byte."""
    # Once before, so that the engine finds the same in its cache both times.
    await pair.bench.chat(stream=True, **options)
    through = await pair.bench.chat(stream=True, **options)
    async with httpx2.AsyncClient(base_url=pair.decode.url, verify=False) as http:
        body = {"model": "fake", "messages": MESSAGES, "stream": True, **options}
        direct = await http.post(CHAT, json=body)
    assert through.content == direct.content


async def raw_stream(url: str) -> bytes:
    """Stream a call over a socket of its own: cheaper than any client, to have many."""
    body = json.dumps({"model": "fake", "messages": MESSAGES[1:], "stream": True}).encode()
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    writer.write(
        f"POST {CHAT} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n".encode()
        + body
    )
    answer = await reader.read()
    writer.close()
    await writer.wait_closed()
    return answer


async def test_hundreds_of_streams_run_at_once() -> None:
    """No pool caps the streams, and health checks get through beside them."""
    num_streams, gate = 300, asyncio.Event()
    engine = FakeEngine(control=False)
    engine.default = Script(until=gate)
    async with fake_engines(engine), bench(engine) as running:
        calls = [asyncio.create_task(raw_stream(running.router.url)) for _ in range(num_streams)]
        await running.eventually(lambda: engine.num_active, lambda n: n == num_streams)
        assert (await running.http.get("/health")).status_code == 200
        gate.set()
        answers = await asyncio.gather(*calls)
    assert all(answer.startswith(b"HTTP/1.1 200") for answer in answers)
    assert all(b"data: [DONE]\n\n" in answer for answer in answers)


@pytest.mark.parametrize("failing", [False, True])
async def test_pings_keep_a_long_prefill_alive_and_are_no_events(failing: bool) -> None:
    """A balancer sees bytes; the client sees the same events, or an error event."""
    async with (
        fake_pair() as ([prefill], [decode]),
        bench(prefill, decode, ping_s=0.01) as running,
    ):
        gate = asyncio.Event()
        prefill.scripts = [Script(until=gate, status=400 if failing else 200)]
        body = {"model": "fake", "messages": MESSAGES, "stream": True}
        async with running.http.stream("POST", CHAT, json=body) as answer:
            chunks = answer.aiter_bytes()
            first = await anext(chunks)
            assert first.startswith(b": ping\n\n")
            assert "turncache-outcome" not in answer.headers
            gate.set()
            rest = b"".join([chunk async for chunk in chunks])
        if failing:
            assert b'data: {"error": {"message": "scripted"' in rest
            assert b"[DONE]" not in rest
            assert decode.seen == []
        else:
            assert rest.replace(b": ping\n\n", b"").endswith(b"data: [DONE]\n\n")
        prefill.scripts = [Script(until=gate)]
        message = await streamed(running.openai, model="fake", messages=MESSAGES)
        assert message["content"].startswith("This is answer")


async def test_an_engine_that_does_not_stream_after_pings_is_an_error_event() -> None:
    """The client was promised events: JSON in their place is no answer."""
    engine = FakeEngine()
    async with fake_engines(engine), bench(engine, ping_s=0.01) as running:
        gate = asyncio.Event()
        engine.scripts = [Script(until=gate, events=[b'{"choices":[]}'])]
        body = {"model": "fake", "messages": MESSAGES, "stream": True}
        async with running.http.stream("POST", CHAT, json=body) as answer:
            chunks = answer.aiter_bytes()
            await anext(chunks)
            gate.set()
            rest = b"".join([chunk async for chunk in chunks])
        assert b'"code": "engine_incomplete"' in rest
        assert b"choices" not in rest


async def test_answers_of_status_500_open_no_circuit(single: Single) -> None:
    """An engine that answers 500 to prompts that are too long is healthy."""
    body = b'{"error":{"message":"prompt too long"}}'
    single.engine.scripts = [Script(status=500, body=body) for _ in range(20)]
    for _ in range(20):
        answer = await single.bench.chat()
        assert (answer.status_code, answer.content) == (500, body)
    assert (await single.bench.chat()).status_code == 200
    assert [event.live for event in single.bench.of_kind(EngineChanged)] == [True]


async def test_a_prefill_that_is_overloaded_is_no_full_prefill_on_decode(pair: Pair) -> None:
    """P answers 503 twice: the client's own retries get through; for good, it is a 503."""
    pair.prefill.scripts = [Script(status=503), Script(status=503)]
    client = pair.bench.openai.with_options(max_retries=2)
    arguments: dict[str, Any] = {"model": "fake", "messages": MESSAGES}
    answer = await client.chat.completions.create(**arguments)
    assert answer.choices[0].finish_reason == "stop"
    assert (len(pair.prefill.seen), len(pair.decode.seen)) == (3, 1)
    pair.prefill.default = Script(status=503)
    with pytest.raises(openai.InternalServerError) as caught:
        await pair.bench.openai.chat.completions.create(**arguments)
    assert caught.value.status_code == 503
    assert len(pair.decode.seen) == 1


@pytest.mark.parametrize("noticed", [False, True])
async def test_a_session_does_not_stick_to_a_dead_engine(noticed: bool) -> None:
    """Its next call is answered elsewhere, and the engine that comes back gets no stale ids."""
    async with (
        fake_pair(decodes=2) as ([prefill], decode),
        bench(prefill, *decode) as running,
    ):
        for _ in range(3):
            await running.chat(session="s")
        first = next(engine for engine in decode if engine.seen)
        other = next(engine for engine in decode if engine is not first)
        await first.stop()
        if noticed:
            await running.eventually(
                lambda: [e.engine for e in running.of_kind(EngineChanged) if not e.live],
                lambda gone: first.name in gone,
            )
        assert (await running.chat(session="s")).status_code == 200
        assert len(other.seen) == 1
        if noticed:
            assert "tc_source" not in prefill.seen[-1].xargs
        first.kv.flush()
        await first.start()
        await running.eventually(
            lambda: [e for e in running.of_kind(EngineChanged) if e.engine == first.name],
            lambda events: events[-1].live,
        )
        answer = await running.chat(session="s")
        assert answer.status_code == 200
        assert prefill.seen[-1].xargs["tc_source"] == other.name, "the last answer is there"
        assert len(first.seen) == 4


async def test_a_call_that_failed_does_not_pin_its_session() -> None:
    """The table is written after success only."""
    async with (
        fake_pair(decodes=2) as ([prefill], decode),
        bench(prefill, *decode) as running,
    ):
        for engine in decode:
            engine.scripts = [Script(die="middle")]
        await running.chat(session="s", stream=True)
        assert outcome_of(await running.chat(session="s")).plan is Plan.COLD


async def test_calls_without_session_spread_over_the_engines() -> None:
    """A missing id is not hashed as a constant, and header names have no case."""
    engines = [FakeEngine(f"single-{i}", control=False) for i in range(3)]
    async with fake_engines(*engines), bench(*engines) as running:
        await asyncio.gather(*(running.chat(messages=MESSAGES[1:]) for _ in range(90)))
        assert all(15 < len(engine.seen) < 45 for engine in engines)
        for engine in engines:
            engine.seen.clear()
        for name in ("X-Session-ID", "x-session-id", "X-SESSION-Id"):
            await running.chat(headers={name: "one"})
        assert sorted(len(engine.seen) for engine in engines) == [0, 0, 3]


async def test_equal_beginnings_make_no_common_session(pair: Pair) -> None:
    """Without an id nothing is remembered: content is no identity."""
    for _ in range(2):
        answer = await pair.bench.chat()
        assert outcome_of(answer).plan is Plan.COLD
    assert "turncache_router_sessions 0.0" in (await pair.bench.http.get("/metrics")).text
    assert all("tc_source" not in seen.xargs for seen in pair.prefill.seen)


async def test_the_outcome_is_prefills_and_usage_is_decodes(pair: Pair) -> None:
    """Usage says what decode found, which is everything; the outcome says what was saved."""
    await pair.bench.chat(session="s")
    pair.prefill.kv.flush()
    answer = await pair.bench.chat(session="s")
    cached = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    reply = pair.prefill.replies[answer.headers["x-request-id"]]
    outcome = outcome_of(answer)
    assert (outcome.prompt, outcome.returned) == (reply.prompt, reply.returned)
    assert cached >= outcome.returned


async def test_answers_without_streaming_pass_byte_for_byte(single: Single) -> None:
    """White space, key order and number forms of an engine's answer are the engine's."""
    body = (
        b'{ "id":"x",\n "choices" : [ {"finish_reason":"stop","index":0,'
        b'"message":{"role":"assistant","content":null,"n":1.50}} ],"kv_transfer_params":null }'
    )
    single.engine.scripts = [Script(body=body)]
    assert (await single.bench.chat()).content == body


async def test_null_and_empty_content_reach_the_engines_as_they_were_sent(pair: Pair) -> None:
    """Templates render null, an empty string and nothing differently."""
    messages = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [_call("1")]},
        {"role": "tool", "tool_call_id": "1", "content": ""},
        {"role": "assistant", "tool_calls": [_call("2")], "reasoning_content": "hm"},
        {"role": "tool", "tool_call_id": "2", "content": "ok"},
    ]
    await pair.bench.chat(messages=messages)
    for seen in (*pair.prefill.seen, *pair.decode.seen):
        assert seen.body["messages"] == messages


def _call(call_id: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": "f", "arguments": "{}"}}


async def test_the_server_names_itself_and_no_engine(pair: Pair) -> None:
    """No header of an engine passes but the media type and Retry-After."""
    pair.decode.default = Script(headers={"X-Engine-Host": "10.0.0.7", "Set-Cookie": "a=b"})
    for stream in (True, False):
        answer = await pair.bench.chat(stream=stream)
        assert set(answer.headers) <= {
            *("content-type", "turncache", "turncache-outcome", "x-request-id", "server"),
            *("date", "content-length", "transfer-encoding", "cache-control"),
            "x-accel-buffering",
        }
        assert answer.headers["server"] == "turncache"


async def agents(running: Bench, num_agents: int) -> list[httpx2.Response]:
    """Run agents of two calls each at once."""

    async def agent(number: int) -> httpx2.Response:
        await running.chat(session=f"agent-{number}")
        return await running.chat(session=f"agent-{number}", stream=True)

    return list(await asyncio.gather(*(agent(number) for number in range(num_agents))))


async def test_concurrent_sessions_do_not_mix(pair: Pair) -> None:
    """Each call's record, outcome and hints are its own."""
    answers = await agents(pair.bench, 20)
    assert {outcome_of(answer).plan for answer in answers} == {Plan.RETURN}
    for seen in (*pair.prefill.seen, *pair.decode.seen):
        assert seen.xargs["tc_session"] == seen.headers["x-session-id"]
