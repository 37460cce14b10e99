"""OpenTelemetry spans of calls and legs, made of the same events as metrics and log."""

from __future__ import annotations

import asyncio
import sys
import threading
from typing import Any

import pytest
from aiohttp import web
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from tests.fakes.engine import FakeEngine, Script, fake_engines, fake_pair
from tests.server.router.support import CHAT, MESSAGES, TOOLS, Bench, bench, outcome_of
from turncache.errors import ConfigError
from turncache_server.control.messages import session_digest
from turncache_server.router.traces import Traces

pytestmark = pytest.mark.anyio

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = {"traceparent": f"00-{TRACE}-00f067aa0ba902b7-01", "tracestate": "vendor=x"}
#: By the conventions for GenAI, on a call and on its legs.
ASKED = {
    "gen_ai.operation.name": "chat",
    "gen_ai.provider.name": "vllm",
    "gen_ai.request.model": "fake",
}
NOBODY = [{"name": "a", "side": "single", "url": "http://127.0.0.1:1"}]


class Spans:
    """A tracer of the test's own, and what it has ended."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        provider = TracerProvider(shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.traces = Traces(provider.get_tracer("test"))

    async def of(self, running: Bench, num_calls: int = 1) -> list[ReadableSpan]:
        """Return the spans, the calls' last, once so many calls are settled."""
        await running.eventually(
            lambda: [s for s in self._exporter.get_finished_spans() if s.name.startswith("call")],
            lambda calls: len(calls) == num_calls,
        )
        return list(self._exporter.get_finished_spans())


@pytest.fixture
def spans() -> Spans:
    """Give a tracer; no global provider is set."""
    return Spans()


def attributes(span: ReadableSpan) -> dict[str, Any]:
    """Return a span's attributes."""
    return dict(span.attributes or {})


def header_of(span: ReadableSpan) -> str:
    """Return the ``traceparent`` that names a span."""
    return f"00-{span.context.trace_id:032x}-{span.context.span_id:016x}-01"


@pytest.mark.parametrize("stream", [True, False])
async def test_a_call_is_a_span_with_its_legs_as_children(spans: Spans, stream: bool) -> None:
    """Below the client's span, with what the log line says, the outcome, and nobody's words."""
    async with (
        fake_pair() as ([prefill], [decode]),
        bench(prefill, decode, traces=spans.traces, pass_trace_context=True) as running,
    ):
        answer = await running.chat(tools=TOOLS, session="geheim", stream=stream, headers=PARENT)
        first, second, call = await spans.of(running)
        outcome = outcome_of(answer)
        request = answer.headers["x-request-id"]
    assert (first.name, second.name, call.name) == ("leg prefill", "leg decode", "call chat")
    assert call.parent is not None
    assert (f"{call.parent.trace_id:032x}", call.parent.span_id) == (TRACE, 0x00F067AA0BA902B7)
    assert call.kind is SpanKind.SERVER
    for leg, engine in ((first, prefill), (second, decode)):
        assert leg.parent == call.context
        assert leg.kind is SpanKind.CLIENT
        assert attributes(leg) == {
            **ASKED,
            "turncache.engine": engine.name,
            "server.address": "127.0.0.1",
            "server.port": engine.port,
        }
        (seen,) = engine.seen
        assert seen.headers["traceparent"] == header_of(leg)
        assert seen.headers["tracestate"] == "vendor=x"
    assert call.start_time <= first.start_time <= first.end_time <= second.start_time
    assert second.end_time <= call.end_time
    told = attributes(call)
    usage = () if stream else ("gen_ai.usage.input_tokens", "gen_ai.usage.output_tokens")
    for name in usage:
        assert told.pop(name) > 0
    for name in ("turncache.prefill_s", "turncache.ttft_s", "turncache.overhead_s"):
        assert told.pop(name) >= 0
    assert told == {
        **ASKED,
        "http.request.method": "POST",
        "http.route": CHAT,
        "gen_ai.response.finish_reasons": ("tool_calls",),
        "turncache.request": request,
        "turncache.api": "chat",
        "turncache.session": session_digest("geheim"),
        "turncache.plan": "cold",
        "turncache.reason": "new_session",
        "turncache.boundary": "tool",
        "http.response.status_code": 200,
        "gen_ai.usage.cache_read.input_tokens": outcome.reused,
        "turncache.outcome.prompt": outcome.prompt,
        "turncache.outcome.local": outcome.local,
        "turncache.outcome.returned": outcome.returned,
        "turncache.outcome.computed": outcome.computed,
        "turncache.outcome.lost": outcome.lost,
        "turncache.outcome.plan": "cold",
        "turncache.outcome.reason": "new_session",
    }
    text = f"{told} {attributes(first)} {attributes(second)}"
    assert "geheim" not in text
    assert MESSAGES[1]["content"][:9] not in text


async def test_other_apis_have_the_operation_of_the_conventions(spans: Spans) -> None:
    """A model that nobody has named is not made up; usage is read in each API's own words."""
    engine = FakeEngine()
    async with fake_engines(engine), bench(engine, traces=spans.traces) as running:
        await running.http.post("/v1/completions", json={"prompt": "x"})
        body = {"model": "fake", "max_tokens": 9, "messages": MESSAGES[1:]}
        await running.http.post("/v1/messages", json=body)
        calls = [s for s in await spans.of(running, 2) if s.name.startswith("call")]
    first, second = map(attributes, calls)
    assert first["gen_ai.operation.name"] == "text_completion"
    assert "gen_ai.request.model" not in first
    assert second["gen_ai.operation.name"] == "chat"
    assert (first["http.route"], second["http.route"]) == ("/v1/completions", "/v1/messages")
    assert second["gen_ai.usage.output_tokens"] > 0


async def test_a_leg_that_fails_is_a_child_with_an_error(spans: Spans) -> None:
    """The next engine has a span of its own; the call, which was served, is no error."""
    a, b = FakeEngine("a"), FakeEngine("b")
    async with (
        fake_engines(a, b),
        bench(a, b, traces=spans.traces, health_interval_s=60) as running,
    ):
        for engine in (a, b):
            engine.scripts.append(Script(status=503))
        assert (await running.chat(session="s")).status_code == 503
        assert (await running.chat(session="s")).status_code == 200
        legs = [s for s in await spans.of(running, 2) if s.name.startswith("leg")]
        calls = [s for s in await spans.of(running, 2) if s.name.startswith("call")]
    assert [leg.status.status_code for leg in legs] == [
        StatusCode.ERROR,
        StatusCode.ERROR,
        StatusCode.UNSET,
    ]
    assert [attributes(leg).get("error.type") for leg in legs] == [
        "unavailable",
        "unavailable",
        None,
    ]
    assert {attributes(leg)["turncache.engine"] for leg in legs[:2]} == {"a", "b"}
    bad = next(s for s in calls if s.status.status_code is StatusCode.ERROR)
    assert attributes(bad)["error.type"] == "engine_error"
    assert attributes(bad)["http.response.status_code"] == 503
    # Nobody sent a context: each call is the root of a trace of its own.
    assert len({call.context.trace_id for call in calls}) == 2
    assert all(call.parent is None for call in calls)


@pytest.mark.parametrize("passed", [True, False])
@pytest.mark.parametrize("traced", [True, False])
async def test_engines_get_trace_context_only_if_that_is_set(
    spans: Spans, passed: bool, traced: bool
) -> None:
    """Without spans of the router's own it is the client's, as it is."""
    engine = FakeEngine()
    traces = spans.traces if traced else None
    async with (
        fake_engines(engine),
        bench(engine, traces=traces, pass_trace_context=passed) as running,
    ):
        await running.chat(headers=PARENT)
    (seen,) = engine.seen
    got = {name: seen.headers.get(name) for name in PARENT}
    if not passed:
        assert got == {"traceparent": None, "tracestate": None}
    elif traced:
        assert got["traceparent"] is not None
        assert got["traceparent"].split("-")[1] == TRACE
        assert got["traceparent"] != PARENT["traceparent"]
    else:
        assert got == PARENT


async def test_a_client_that_leaves_ends_its_spans(spans: Spans) -> None:
    """Nothing stays open, whatever ends a call."""
    engine = FakeEngine()
    engine.scripts.append(paused := Script(pause_after=1))
    async with fake_engines(engine), bench(engine, traces=spans.traces) as running:
        body = {"model": "fake", "messages": MESSAGES, "stream": True}
        async with running.http.stream("POST", "/v1/chat/completions", json=body) as answer:
            await anext(answer.aiter_bytes())
        leg, call = await spans.of(running)
        paused.resume.set()
    assert attributes(call)["http.response.status_code"] == 499
    assert attributes(leg)["error.type"] == attributes(call)["error.type"] == "client_gone"
    assert spans.traces._open == {}


async def test_spans_go_out_by_otlp(monkeypatch: pytest.MonkeyPatch) -> None:
    """To where OpenTelemetry's own variable says, the last ones when the router ends."""
    got: list[bytes] = []

    async def collect(request: web.Request) -> web.Response:
        got.append(await request.read())
        return web.Response()

    app = web.Application()
    app.add_routes([web.post("/v1/traces", collect)])
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{runner.addresses[0][1]}")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "none")
    engine = FakeEngine()
    try:
        async with fake_engines(engine):
            async with bench(engine, traces=True) as running:
                answer = await running.chat()
                await running.record(answer)
            await asyncio.sleep(0)
    finally:
        await runner.cleanup()
    body = b"".join(got)
    assert answer.headers["x-request-id"].encode() in body
    assert b"turncache-router" in body


async def test_a_collector_that_hangs_does_not_hold_up_the_end() -> None:
    """What it has not taken by then is lost."""
    hang = threading.Event()
    tracer = TracerProvider(shutdown_on_exit=False).get_tracer("test")
    await Traces(tracer, close=hang.wait, close_s=0.01).close()
    assert not hang.is_set()
    hang.set()


async def test_without_the_packages_the_router_says_which(monkeypatch: pytest.MonkeyPatch) -> None:
    """Traces are an extra."""
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(ConfigError, match=r"turncache\[router-otel\]"):
        async with bench(engines=NOBODY, traces=True):
            pass


@pytest.mark.parametrize("fails", [False, True])
async def test_a_repeat_is_a_span_beside_the_decode_leg(spans: Spans, fails: bool) -> None:
    """With a context of its own for the engine; one that fails says so."""
    settings = {"repeat_after_s": 0.005, "pass_trace_context": True}
    async with (
        fake_pair() as ([prefill], [decode]),
        bench(prefill, decode, traces=spans.traces, **settings) as running,
    ):
        prefill.loses = 1
        prefill.scripts = [Script(), Script(status=400 if fails else 200)]
        await running.chat(session="s", headers=PARENT)
        found = {span.name: span for span in await spans.of(running)}
        first, again = prefill.seen
        (leg,) = decode.seen
    assert found.keys() == {"leg prefill", "leg decode", "leg repeat", "call chat"}
    repeat, decoding = found["leg repeat"], found["leg decode"]
    assert repeat.parent == found["call chat"].context
    assert attributes(repeat)["turncache.engine"] == "prefill-0"
    assert attributes(repeat).get("error.type") == ("failed" if fails else None)
    assert decoding.start_time <= repeat.start_time <= repeat.end_time <= decoding.end_time
    for seen, span in ((first, found["leg prefill"]), (again, repeat), (leg, decoding)):
        assert seen.headers["traceparent"] == header_of(span)
