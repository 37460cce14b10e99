"""OpenTelemetry: attributes on the span around a call, and nothing without one."""

from __future__ import annotations

import asyncio
import inspect
import re
from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes

import turncache
import turncache.spans
from tests.sdk.support import HELLO, HTTPX, Recorder, printed_by, result
from turncache.protocol import CALL_HEADER, Cause
from turncache.testing import FakeServer, Reply

OURS = ("gen_ai.", "turncache.")
TOOL = {"type": "function", "function": {"name": "search", "parameters": {"type": "object"}}}


class Spans:
    """A tracer, and the attributes of the spans that it has ended."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        provider = TracerProvider(shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.tracer = provider.get_tracer("test")

    def attributes(self) -> dict[str, Any]:
        """Return ours, of the only span."""
        [span] = self.exporter.get_finished_spans()
        attributes = dict(span.attributes or {})
        return {name: value for name, value in attributes.items() if name.startswith(OURS)}


@pytest.fixture
def spans() -> Iterator[Spans]:
    """Give a tracer of the test's own: no global provider is set."""
    yield Spans()
    assert not trace.get_current_span().is_recording()


def test_a_call_in_a_named_session(
    client: turncache.OpenAI, server: FakeServer, spans: Spans
) -> None:
    """Conversation, place, cause, boundary and outcome are on the current span."""
    ask = client.chat.completions.create
    with turncache.session("ticket") as parent, parent.child("researcher"):
        answer = ask(model="m", messages=HELLO, tools=[TOOL])
        message = answer.choices[0].message
        history = [*HELLO, message, result(message.tool_calls[0].id)]
        with spans.tracer.start_as_current_span("chat m"):
            answer = ask(model="m", messages=history, tools=[TOOL])
    outcome = turncache.outcome(answer)
    assert outcome is not None
    assert outcome.local > 0
    assert spans.attributes() == {
        "gen_ai.conversation.id": "ticket/researcher",
        "gen_ai.usage.cache_read.input_tokens": outcome.local,
        "turncache.parent_session.id": "ticket",
        "turncache.turn": 1,
        "turncache.call": 2,
        "turncache.cause": "tool",
        "turncache.boundary": "user",
        "turncache.outcome.prompt": outcome.prompt,
        "turncache.outcome.local": outcome.local,
        "turncache.outcome.returned": 0,
        "turncache.outcome.computed": outcome.computed,
        "turncache.outcome.lost": 0,
        "turncache.outcome.plan": "single",
        "turncache.outcome.reason": "ok",
    }


@pytest.mark.parametrize("anonymous", [True, False], ids=["anonymous", "automatic"])
def test_an_id_that_nobody_gave_is_no_conversation(
    client: turncache.OpenAI, spans: Spans, anonymous: bool
) -> None:
    """The conventions forbid a made-up conversation id: sessions without a name have none."""
    with spans.tracer.start_as_current_span("chat m"):
        if anonymous:
            with turncache.session():
                client.chat.completions.create(model="m", messages=HELLO)
        else:
            client.chat.completions.create(model="m", messages=HELLO)
    attributes = spans.attributes()
    assert "gen_ai.conversation.id" not in attributes
    assert attributes["turncache.turn"] == 1


def test_a_compaction_is_marked(client: turncache.OpenAI, spans: Spans) -> None:
    """A history that was replaced is a compacted conversation."""
    headers = {CALL_HEADER: f"v=1, cause={Cause.COMPACTION}"}
    with spans.tracer.start_as_current_span("chat m"), turncache.session("ticket"):
        client.chat.completions.create(model="m", messages=HELLO, extra_headers=headers)
    assert spans.attributes()["gen_ai.conversation.compacted"] is True


def test_a_providers_usage_is_on_the_span(spans: Spans) -> None:
    """Without our server the answer's usage says what was cached; the provider gets nothing."""
    usage = {
        "prompt_tokens": 90,
        "completion_tokens": 1,
        "total_tokens": 91,
        "prompt_tokens_details": {"cached_tokens": 64},
    }
    choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "x"}}
    body = {"id": "a", "object": "chat.completion", "created": 1, "model": "m"}
    recorder = Recorder(
        lambda _: HTTPX.Response(200, json={**body, "choices": [choice], "usage": usage})
    )
    with (
        recorder.client(turncache.OpenAI) as hosted,
        spans.tracer.start_as_current_span("chat m"),
        turncache.session("ticket"),
    ):
        hosted.chat.completions.create(model="m", messages=HELLO)
    attributes = spans.attributes()
    assert attributes["gen_ai.usage.cache_read.input_tokens"] == 64
    assert not any("outcome" in name for name in attributes)
    assert not any("turncache" in name for name in recorder.requests[0].headers)


def test_a_stream_tells_its_end_while_the_span_is_open(
    client: turncache.OpenAI, spans: Spans
) -> None:
    """A stream that is read inside the span adds its boundary."""
    with spans.tracer.start_as_current_span("chat m"), turncache.session("ticket"):
        list(client.chat.completions.create(model="m", messages=HELLO, stream=True))
    assert spans.attributes()["turncache.boundary"] == "user"


def test_a_stream_that_outlives_its_span_is_quiet(
    client: turncache.OpenAI, spans: Spans, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing is set on a span that has ended: the SDK would complain on every stream."""
    with turncache.session("ticket"):
        with spans.tracer.start_as_current_span("chat m"):
            stream = client.chat.completions.create(model="m", messages=HELLO, stream=True)
        list(stream)
    assert "turncache.boundary" not in spans.attributes()
    assert "turncache.outcome.prompt" in spans.attributes()
    assert caplog.text == ""


def test_async_calls_have_their_own_spans(server: FakeServer, spans: Spans) -> None:
    """Tasks at once: each call is told on the span of its task."""

    async def main() -> None:
        async with turncache.AsyncOpenAI(base_url=server.url, api_key="-") as client:

            async def one(name: str) -> None:
                with spans.tracer.start_as_current_span(name), turncache.session(name):
                    await client.chat.completions.create(model="m", messages=HELLO)

            await asyncio.gather(*(one(f"s{at}") for at in range(8)))

    asyncio.run(main())
    ended = spans.exporter.get_finished_spans()
    ids = {span.name: (span.attributes or {})["gen_ai.conversation.id"] for span in ended}
    assert ids == {f"s{at}": f"s{at}" for at in range(8)}


def test_no_text_is_on_a_span(client: turncache.OpenAI, server: FakeServer, spans: Spans) -> None:
    """Attributes hold numbers, names and ids, and nothing of what was said."""
    server.script(Reply(text="geheim answer", tools=[("search", '{"q": "geheim"}')]))
    with spans.tracer.start_as_current_span("chat m"), turncache.session("ticket"):
        client.chat.completions.create(
            model="m", messages=[{"role": "user", "content": "geheim question"}], tools=[TOOL]
        )
    assert "geheim" not in str(spans.attributes())


def test_without_opentelemetry_nothing_is_imported(server: FakeServer) -> None:
    """An application that does not trace pays no import, installed or not."""
    code = (
        "import sys, turncache\n"
        "client = turncache.OpenAI(base_url=sys.argv[1], api_key='-')\n"
        "client.chat.completions.create(model='m', messages=[{'role': 'user', 'content': 'x'}])\n"
        "print([name for name in sys.modules if name.startswith('opentelemetry')])\n"
    )
    assert printed_by(code, server.url) == "[]\n"


#: Attributes that are in the conventions' own repository, and not yet in the package that is
#: made of them. This list may only shrink.
NOT_RELEASED = {"gen_ai.conversation.compacted"}


def test_attributes_of_the_conventions_are_in_them() -> None:
    """Every gen_ai.* name that we use is in the newest release of the conventions."""
    used = set(re.findall(r'"(gen_ai\.[a-z_.]+)"', inspect.getsource(turncache.spans)))
    known = {name for name in vars(gen_ai_attributes).values() if isinstance(name, str)}
    assert len(used) >= 3
    assert used - known == NOT_RELEASED
