"""Calls through real sockets: router, fake engines, the real OpenAI client."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx2
import msgspec
import openai
import pytest
from openai import OpenAI

from tests.fakes.engine import FakeEngine, Script, fake_engines, fake_pair
from tests.server.router.conftest import Pair, Single
from tests.server.router.support import (
    CHAT,
    MESSAGES,
    TOOLS,
    bench,
    config_for,
    outcome_of,
    streamed,
)
from turncache.errors import ConfigError
from turncache.protocol import Boundary, EngineHints, Plan, Reason
from turncache_server.router.app import serving
from turncache_server.router.events import CallEnded, CallRefused, OutcomeMissing

pytestmark = pytest.mark.anyio


async def agent_loop(client: openai.AsyncOpenAI, stream: bool, num_calls: int = 3) -> None:
    """Run a tool loop as an agent does."""
    messages: list[Any] = list(MESSAGES)
    for _ in range(num_calls):
        arguments: dict[str, Any] = {
            "model": "fake",
            "messages": messages,
            "tools": TOOLS,
            "extra_headers": {"X-Session-ID": "loop"},
        }
        if stream:
            reply = await streamed(client, **arguments)
        else:
            answer = await client.chat.completions.create(**arguments)
            reply = answer.choices[0].message.model_dump(exclude_none=True)
        if "tool_calls" in reply:
            follow = {"role": "tool", "tool_call_id": "1", "content": "done " * 8}
        else:
            follow = {"role": "user", "content": "and then? " * 4}
        messages = [*messages, reply, follow]


@pytest.mark.parametrize("stream", [True, False])
async def test_an_agent_loop_on_a_pair_returns_what_decode_holds(pair: Pair, stream: bool) -> None:
    """After the first call each prefill takes the last answer's KV from decode."""
    await agent_loop(pair.bench.openai, stream)
    ended = pair.bench.of_kind(CallEnded)
    assert [event.plan for event in ended] == [Plan.COLD, Plan.RETURN, Plan.RETURN]
    assert [event.boundary for event in ended] == [Boundary.TOOL, Boundary.USER, Boundary.TOOL]
    assert ended[0].tool_names == ("search",)
    assert [seen.xargs.get("tc_source") for seen in pair.prefill.seen] == [
        None,
        "decode-0",
        "decode-0",
    ]
    assert {seen.xargs["tc_source"] for seen in pair.decode.seen} == {"prefill-0"}


async def test_a_flooded_prefill_computes_only_what_is_new(pair: Pair) -> None:
    """What prefill lost comes back from decode, and the outcome says so and adds up."""
    messages = [*MESSAGES]
    for turn in range(3):
        answer = await pair.bench.chat(messages=messages, session="s", stream=turn % 2 == 1)
        outcome = outcome_of(answer)
        assert outcome.local + outcome.returned + outcome.computed == outcome.prompt
        if turn:
            assert outcome.plan is Plan.RETURN
            assert (outcome.local, outcome.lost) == (0, 0)
            assert outcome.returned > outcome.computed
        pair.prefill.kv.flush()
        reply = {"role": "assistant", "content": f"This is answer {len(messages)}: 你好🙂."}
        messages = [*messages, reply, {"role": "user", "content": "next question"}]


async def test_the_openai_client_works_as_against_an_engine(pair: Pair) -> None:
    """The synchronous client too: answers, models, and errors of the right class."""

    def work() -> tuple[str, list[str], type[Exception]]:
        with OpenAI(base_url=pair.bench.router.url + "/v1", api_key="-") as client:
            answer = client.chat.completions.create(model="fake", messages=MESSAGES)  # type: ignore[arg-type]
            models = [model.id for model in client.models.list()]
            try:
                client.chat.completions.create(model="gpt-9", messages=MESSAGES)  # type: ignore[arg-type]
            except openai.APIError as error:
                return answer.choices[0].message.content or "", models, type(error)
        raise AssertionError("the unknown model was served")

    text, models, error = await asyncio.to_thread(work)
    assert "你好🙂" in text
    assert models == ["fake"]
    assert error is openai.NotFoundError


async def test_the_legs_say_what_each_engine_has_to_know(pair: Pair) -> None:
    """Hints, session carriers and ids of both legs."""
    answer = await pair.bench.chat(
        session="ticket-1",
        headers={
            "X-Parent-Session-ID": "root-1",
            "Turncache": "v=1, turn=1, call=2, cause=compaction, retain=30, priority=70",
        },
    )
    request_id = answer.headers["x-request-id"]
    (prefill,), (decode,) = pair.prefill.seen, pair.decode.seen
    common: dict[str, Any] = {
        "session": "ticket-1",
        "parent": "root-1",
        "priority": 70,
        "request": request_id,
        "compaction": True,
    }
    assert EngineHints.from_xargs(prefill.xargs, trusted=True) == EngineHints(
        **common, call="prefill", handover=True, retain_s=0.0
    )
    assert EngineHints.from_xargs(decode.xargs, trusted=True) == EngineHints(
        **common, call="decode", source="prefill-0", retain_s=30.0, repeat_s=30.0
    )
    for seen in (prefill, decode):
        assert seen.headers["x-session-id"] == seen.body["session_id"] == "ticket-1"
        assert "turncache" not in seen.headers
        assert seen.headers["accept-encoding"] == "identity"
    ids = [prefill.headers["x-request-id"], decode.headers["x-request-id"]]
    assert len({request_id, *ids}) == 3


async def test_a_call_on_one_engine_retains_by_default(single: Single) -> None:
    """One leg, counted as single; the outcome is asked when the first byte is there."""
    answer = await single.bench.chat(session="s", stream=True)
    assert outcome_of(answer).plan is Plan.SINGLE
    (seen,) = single.engine.seen
    hints = EngineHints.from_xargs(seen.xargs, trusted=True)
    assert hints is not None
    assert (hints.call, hints.retain_s, hints.source) == ("single", None, None), (
        "the engine's own default"
    )
    record = await single.bench.record(answer)
    assert record["state"] == "done"
    assert record["plan"] == "single"
    assert record["outcome"]["prompt"] == outcome_of(answer).prompt
    assert record["timings"]["ttft_s"] <= record["timings"]["total_s"]
    assert record["timings"]["prefill_s"] is None


async def test_an_untagged_call_keeps_nothing(single: Single) -> None:
    """Without a session each call is its own, and is not retained."""
    for _ in range(2):
        await single.bench.chat()
    hints = [EngineHints.from_xargs(seen.xargs, trusted=True) for seen in single.engine.seen]
    assert [hint.retain_s for hint in hints if hint] == [0.0, 0.0]
    assert len({hint.session for hint in hints if hint}) == 2


async def test_with_returns_off_prefill_keeps_the_session(pair: Pair) -> None:
    """The switch takes effect with the next call; the plan says disabled."""
    pair.bench.router.return_enabled = False
    messages = [*MESSAGES, {"role": "assistant", "content": "x"}, MESSAGES[1]]
    answer = await pair.bench.chat(messages=messages, session="s")
    outcome = outcome_of(answer)
    assert (outcome.plan, outcome.reason) == (Plan.COLD, Reason.DISABLED)
    hints = EngineHints.from_xargs(pair.prefill.seen[0].xargs, trusted=True)
    assert hints is not None
    assert (hints.source, hints.retain_s) == (None, None)


async def test_a_final_call_is_forgotten(pair: Pair) -> None:
    """Nothing follows: the table drops the session, the engines are told."""
    await pair.bench.chat(session="s")
    answer = await pair.bench.chat(session="s", headers={"X-Session-Final": "true"})
    assert outcome_of(answer).plan is Plan.RETURN
    assert pair.decode.seen[1].xargs["tc_final"] == 1
    assert pair.bench.of_kind(CallEnded)[1].boundary is Boundary.FINAL
    again = await pair.bench.chat(session="s")
    assert outcome_of(again).plan is Plan.COLD


# --- refused by the router -------------------------------------------------------------------


async def refusals(http: httpx2.AsyncClient) -> list[tuple[str, httpx2.Response, int]]:
    """Send everything that the router has to refuse: (name, answer, expected status)."""
    good = {"model": "fake", "messages": MESSAGES}
    text = json.dumps(good)
    json_type = {"content-type": "application/json"}
    cases: list[tuple[str, dict[str, Any], int]] = [
        ("malformed", {"content": b'{"model": "fake"', "headers": json_type}, 400),
        ("no body", {"content": b"", "headers": json_type}, 400),
        (
            "twice",
            {"content": text[:-1].encode() + b',"model":"x"}', "headers": json_type},
            400,
        ),
        ("max_tokens", {"json": {**good, "max_tokens": "10"}}, 400),
        ("too many tokens", {"json": {**good, "max_tokens": 10_000_000}}, 400),
        ("unknown model", {"json": {**good, "model": "gpt-9"}}, 404),
        ("illegal session", {"json": good, "headers": {"X-Session-ID": "a b"}}, 400),
        ("long session", {"json": good, "headers": {"X-Session-ID": "x" * 257}}, 400),
        ("illegal body session", {"json": {**good, "session_id": "a\n"}}, 400),
        (
            "two sessions",
            {"json": good, "headers": [("X-Session-ID", "a"), ("x-session-id", "b")]},
            400,
        ),
        (
            "illegal header",
            {"json": good, "headers": {"X-Session-ID": "a", "Turncache": "v=9"}},
            400,
        ),
        ("media type", {"content": text.encode(), "headers": {"content-type": "text/plain"}}, 415),
        (
            "compressed",
            {"content": text.encode(), "headers": {**json_type, "content-encoding": "gzip"}},
            415,
        ),
        ("large header", {"json": good, "headers": {"x-large": "x" * 40_000}}, 431),
        ("large body", {"json": {**good, "user": "x" * 70_000}}, 413),
        ("large chunked body", {"content": _endless(), "headers": json_type}, 413),
        ("deep", {"json": {**good, "metadata": _nested(101)}}, 400),
    ]
    return [(name, await http.post(CHAT, **args), status) for name, args, status in cases]


async def _endless() -> Any:
    yield b'{"model":"'
    for _ in range(100):
        yield b"x" * 1000


def _nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


async def test_what_cannot_be_served_never_reaches_an_engine() -> None:
    """Each is answered by the router in OpenAI's shape, with our headers."""
    async with (
        fake_pair() as ([prefill], [decode]),
        bench(prefill, decode, max_body_bytes=65536) as running,
    ):
        for name, answer, status in await refusals(running.http):
            assert answer.status_code == status, (name, answer.text)
            error = answer.json()["error"]
            assert set(error) == {"message", "type", "param", "code"}, name
            assert len(error["message"]) > 20, name
            assert answer.headers["turncache"] == "v=1", name
            assert answer.headers["x-request-id"], name
        assert prefill.seen == decode.seen == []
        assert {event.api for event in running.of_kind(CallRefused)} == {"chat"}
        assert (
            await running.metric(
                'turncache_router_requests_total{api="chat",code="413",plan="none"}'
            )
            == 2
        )
        assert (await running.chat()).status_code == 200


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("POST", "/v1/load_lora_adapter", 404),
        ("POST", "/collective_rpc", 404),
        ("POST", "/v1/audio/transcriptions", 404),
        ("GET", "/", 404),
        ("GET", "/v1/calls/unknown", 404),
        ("GET", CHAT, 405),
        ("POST", "/admin/return", 404),
    ],
)
async def test_paths_outside_the_list_are_not_served(
    single: Single, method: str, path: str, status: int
) -> None:
    """Nothing is forwarded that is not listed: vLLM has routes that change weights."""
    answer = await single.bench.http.request(method, path)
    assert answer.status_code == status
    assert answer.json()["error"]["message"]
    assert answer.headers["turncache"] == "v=1"


async def test_a_model_that_was_loaded_later_is_found(single: Single) -> None:
    """Before a model is refused the engines are asked again, at most once a second."""
    single.engine.models.append("adapter")
    assert (await single.bench.chat(model="adapter")).status_code == 200
    asked = single.engine.num_model_questions
    for _ in range(3):
        assert (await single.bench.chat(model="gpt-9")).status_code == 404
    assert single.engine.num_model_questions == asked


# --- the outcome -----------------------------------------------------------------------------


async def test_an_engine_without_control_socket_serves_without_outcome() -> None:
    """Nothing is asked, nothing is counted as missing."""
    engine = FakeEngine(control=False)
    async with fake_engines(engine), bench(engine) as running:
        answer = await running.chat()
        assert answer.status_code == 200
        assert "turncache-outcome" not in answer.headers
        assert (await running.record(answer))["outcome"] is None
        assert running.of_kind(OutcomeMissing) == []


async def test_a_silent_control_socket_costs_the_header_and_not_the_call() -> None:
    """The question has a budget; its failure is counted."""
    engine = FakeEngine(control=False)
    async with fake_engines(engine):
        table = {**engine.as_config(), "control": "tcp://127.0.0.1:9"}
        async with bench(engines=[table], control_timeout_s=0.02) as running:
            answer = await running.chat(stream=True)
            assert answer.status_code == 200
            assert "turncache-outcome" not in answer.headers
            assert [event.why for event in running.of_kind(OutcomeMissing)] == ["no_answer"]
            name = 'turncache_router_outcome_missing_total{why="no_answer"}'
            assert await running.metric(name) == 1


async def test_the_final_record_wins_over_the_header(single: Single) -> None:
    """Counts of the admission go out with the headers; those of the end are kept."""
    script = Script(pause_after=2)
    single.engine.scripts = [script]
    body = {"model": "fake", "messages": MESSAGES, "stream": True}
    async with single.bench.http.stream("POST", CHAT, json=body) as answer:
        request_id = answer.headers["x-request-id"]
        reply = single.engine.replies[request_id]
        assert outcome_of(answer).computed == reply.computed
        record = (await single.bench.http.get(f"/v1/calls/{request_id}")).json()
        assert (record["state"], record["timings"]["total_s"]) == ("running", None)
        # Preempted, and computed again: the engine's last word differs from its first.
        single.engine.replies[request_id] = msgspec.structs.replace(reply, lost=reply.computed)
        script.resume.set()
        await answer.aread()
    record = await single.bench.record(answer)
    assert record["outcome"]["lost"] == reply.computed


async def test_the_token_metrics_are_the_sum_of_the_outcomes(pair: Pair) -> None:
    """Each call is counted once, by where its prompt's KV came from."""
    total = {"local": 0, "returned": 0, "computed": 0}
    for turn in range(3):
        answer = await pair.bench.chat(session=f"s{turn % 2}")
        await pair.bench.record(answer)
        outcome = outcome_of(answer)
        for source in total:
            total[source] += getattr(outcome, source)
    for source, tokens in total.items():
        sample = f'turncache_prompt_tokens_total{{source="{source}"}}'
        assert await pair.bench.metric(sample) == tokens


# --- the small endpoints ----------------------------------------------------------------------


async def test_health_names_the_side_that_is_missing(pair: Pair) -> None:
    """200 only while every needed side has a live engine."""
    answer = await pair.bench.http.get("/health")
    assert (answer.status_code, answer.json()["status"]) == (200, "ok")
    pair.decode.healthy = False
    answer = await pair.bench.eventually(
        lambda: pair.bench.http.get("/health"), lambda a: a.status_code == 503
    )
    assert answer.json()["sides"] == {
        "prefill": {"live": 1, "engines": 1, "pulling": 1},
        "decode": {"live": 0, "engines": 1, "pulling": 1},
    }
    pair.decode.healthy = True
    await pair.bench.ready()


async def test_returns_are_switched_from_loopback_when_admin_is_on() -> None:
    """The demo turns returns off and on while the router serves."""
    async with (
        fake_pair() as ([prefill], [decode]),
        bench(prefill, decode, admin=True) as running,
    ):
        path = "/admin/return"
        answer = await running.http.post(path, json={"enabled": False})
        assert answer.json() == {"return_enabled": False}
        assert running.router.return_enabled is False
        assert (await running.http.get("/health")).json()["return_enabled"] is False
        for wrong in ({"enabled": 1}, {}, {"enabled": True, "more": [[[[1]]]]}):
            assert (await running.http.post(path, json=wrong)).status_code == 400
        await running.http.post(path, json={"enabled": True})
        assert running.router.return_enabled is True


async def test_models_without_an_engine_is_an_error() -> None:
    """The list comes from an engine that answers clients, or not at all."""
    async with (
        fake_pair(decodes=2) as ([prefill], decode),
        bench(prefill, *decode, health_interval_s=60) as running,
    ):
        await decode[0].stop()
        assert (await running.http.get("/v1/models")).json()["data"][0]["id"] == "fake"
        await decode[1].stop()
        answer = await running.http.get("/v1/models")
        assert answer.status_code == 503
        assert answer.headers["retry-after"] == "1"


async def test_the_engines_key_replaces_the_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a key of its own for the engines the router passes no client's on."""
    monkeypatch.setenv("ENGINE_KEY", "secret")
    engine = FakeEngine()
    async with fake_engines(engine), bench(engine, engine_key_env="ENGINE_KEY") as running:
        await running.chat(headers={"Authorization": "Bearer client"})
        assert engine.seen[0].headers["authorization"] == "Bearer secret"


async def test_a_header_of_the_operators_own_names_the_session() -> None:
    """Before all others, in any case, once; also of a notice between two calls."""
    engine = FakeEngine()
    headers = {"x-thread": "t", "X-Session-ID": "s"}
    async with fake_engines(engine), bench(engine, session_header="X-Thread") as running:
        await running.chat(headers=headers)
        await running.http.post("/v1/sessions", json={"notice": "final"}, headers=headers)
        await running.chat(session="s")
        twice = [("x-thread", "t"), ("X-Thread", "u"), ("content-type", "application/json")]
        refused = await running.http.post(CHAT, content=b"{}", headers=twice)
    assert [seen.xargs["tc_session"] for seen in engine.seen] == ["t", "s"]
    assert [seen.headers["x-session-id"] for seen in engine.seen] == ["t", "s"]
    assert [signal.session for signal in engine.signals] == ["t"]
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "X-Thread")


async def test_an_address_that_cannot_be_listened_on_names_what_to_change() -> None:
    """A port that somebody has, or an address that this machine has not."""
    nobody = [{"name": "a", "side": "single", "url": "http://127.0.0.1:1"}]
    taken = await asyncio.start_server(lambda _r, _w: None, "127.0.0.1", 0)
    port = taken.sockets[0].getsockname()[1]
    for settings, setting, words in (
        ({"port": port}, "port", "choose a free port"),
        ({"host": "203.0.113.7", "serve_without_keys": True}, "host", "address of this machine"),
    ):
        with pytest.raises(ConfigError, match=words) as caught:
            async with bench(engines=nobody, **settings):
                pass
        assert caught.value.setting == setting
    taken.close()
    await taken.wait_closed()


# --- shutting down ----------------------------------------------------------------------------


async def refuses_connections(url: str) -> None:
    """Wait until nobody listens."""
    for _ in range(100):
        async with httpx2.AsyncClient() as http:
            try:
                await http.get(url + "/health")
            except httpx2.ConnectError:
                return
        await asyncio.sleep(0.005)
    raise AssertionError(f"{url} still takes connections")


async def drained(engine: FakeEngine, script: Script, **settings: Any) -> list[str]:
    """Shut a router down while it streams; return the lines that the client gets."""
    engine.scripts = [script]
    async with fake_engines(engine), httpx2.AsyncClient(timeout=20) as http:
        manager = serving(config_for([engine], **settings))
        router = await manager.__aenter__()
        body = {"model": "fake", "messages": MESSAGES, "stream": True}
        async with http.stream("POST", router.url + CHAT, json=body) as answer:
            lines = answer.aiter_lines()
            await anext(lines)
            closing = asyncio.create_task(manager.__aexit__(None, None, None))
            await refuses_connections(router.url)
            if script.pause_after == 2:
                script.resume.set()
            rest = [line async for line in lines]
        await closing
    return rest


async def test_a_stream_in_flight_ends_before_the_router_does() -> None:
    """Draining lets running calls finish and takes no new ones."""
    assert (await drained(FakeEngine(), Script(pause_after=2)))[-2:] == ["data: [DONE]", ""]


async def test_draining_is_bounded() -> None:
    """A stream that does not end is broken off with an error event, and its engine is told."""
    engine = FakeEngine()
    lines = await drained(engine, Script(pause_after=3), shutdown_s=0.05)
    assert json.loads(lines[-2].removeprefix("data: "))["error"]["code"] == "draining"
    assert engine.num_cancelled == 1
