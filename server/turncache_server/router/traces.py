"""OpenTelemetry spans as a listener: one per call, its legs as children.

:class:`Traces` owns the spans that are open. Of a call they hold what its log line and its
metrics hold, in the words that the client puts on its own span; no prompt, no answer, no key,
and of the session only the digest. What the conventions for GenAI and HTTP have a name for has
that name; so ``gen_ai.conversation.id``, which is the session's own id, is the client's to say.
The API and SDK of OpenTelemetry are imported where traces are asked for and nowhere else.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from turncache.errors import ConfigError
from turncache.protocol import Outcome
from turncache_server.router.config import RouterConfig
from turncache_server.router.events import (
    CallEnded,
    CallSettled,
    CallStarted,
    Event,
    LegFailure,
    LegStarted,
    OutcomeKnown,
    PrefillRepeated,
)

if TYPE_CHECKING:
    from opentelemetry.trace import Span, Tracer

_NS: Final = 1_000_000_000
_OUTCOME: Final = ("prompt", "local", "returned", "computed", "lost", "plan", "reason", "at")
#: What an API's calls are by the conventions; all others are chats.
_OPERATIONS: Final = {"completions": "text_completion"}
_PORTS: Final = {"http": 80, "https": 443}


@dataclass(slots=True)
class _Open:
    """The spans of a call that is not settled.

    Attributes:
        asked: attributes of what was asked for, which the legs' spans have as well.
        leg: of the leg that runs, None between two.
        repeat: of the prefill leg that is sent again beside it, None while none is.
        ended_ns: when the call was over, None while it runs.
    """

    call: Span
    asked: Mapping[str, Any]
    leg: Span | None = None
    repeat: Span | None = None
    ended_ns: int | None = None


class Traces:
    """Makes the spans of calls.

    Args:
        tracer: makes spans.
        close: sends what is left; may block.
        close_s: longest that the end waits for it.
        now_ns: wall time in nanoseconds.
    """

    def __init__(
        self,
        tracer: Tracer,
        *,
        close: Callable[[], object] = lambda: None,
        close_s: float = 2.0,
        now_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        from opentelemetry.trace.propagation import tracecontext  # noqa: PLC0415 - an extra

        self._tracer = tracer
        self._close = close
        self._close_s = close_s
        self._now_ns = now_ns
        self._propagator = tracecontext.TraceContextTextMapPropagator()
        self._open: dict[str, _Open] = {}

    def __call__(self, event: Event) -> None:
        """Begin, tell or end a span."""
        match event:
            case CallStarted():
                self._begin(event)
            case LegStarted() if event.request in self._open:
                self._begin_leg(self._open[event.request], event)
            case PrefillRepeated() if event.request in self._open:
                problem = None if event.result == "done" else event.result
                self._end_repeat(self._open[event.request], problem)
            case LegFailure() if event.request in self._open:
                self._end_leg(self._open[event.request], event.kind)
            case CallEnded() if event.request in self._open:
                self._end(self._open[event.request], event)
            case OutcomeKnown() if event.request in self._open:
                _set(self._open[event.request].call, _outcome(event.outcome))
            case CallSettled() if event.request in self._open:
                opened = self._open.pop(event.request)
                opened.call.end(opened.ended_ns)

    def headers(self, request: str, *, repeats: bool = False) -> dict[str, str]:
        """Return the trace context that a call's leg passes on to its engine.

        Args:
            request: the call's id.
            repeats: the leg is a prefill leg that is sent again.
        """
        from opentelemetry.trace import set_span_in_context  # noqa: PLC0415

        opened = self._open.get(request)
        headers: dict[str, str] = {}
        if opened is not None:
            span = (opened.repeat if repeats else opened.leg) or opened.call
            self._propagator.inject(headers, set_span_in_context(span))
        return headers

    async def close(self) -> None:
        """Send what is left; a collector that is away must not hold up the router's end."""
        loop, done = asyncio.get_running_loop(), asyncio.Event()

        def send() -> None:
            self._close()
            with contextlib.suppress(RuntimeError):  # nobody waits any more
                loop.call_soon_threadsafe(done.set)

        # Not the loop's own threads: it waits for them, and the exporter's retries take 10 s.
        threading.Thread(target=send, name="send spans", daemon=True).start()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._close_s):
                await done.wait()

    def _begin(self, event: CallStarted) -> None:
        from opentelemetry.context import Context  # noqa: PLC0415
        from opentelemetry.trace import SpanKind  # noqa: PLC0415

        asked = {
            "gen_ai.operation.name": _OPERATIONS.get(event.api, "chat"),
            "gen_ai.provider.name": "vllm",
        }
        if event.model is not None:
            asked["gen_ai.request.model"] = event.model
        span = self._tracer.start_span(
            f"call {event.api}",
            # Of the client, or the root of a trace of its own.
            context=self._propagator.extract(event.trace, Context()),
            kind=SpanKind.SERVER,
            start_time=self._now_ns() - int(event.elapsed_s * _NS),
            attributes={
                **asked,
                "turncache.request": event.request,
                "turncache.api": event.api,
                "http.request.method": "POST",
                "http.route": event.path,
            },
        )
        self._open[event.request] = _Open(span, asked)

    def _begin_leg(self, opened: _Open, event: LegStarted) -> None:
        from opentelemetry.trace import SpanKind, set_span_in_context  # noqa: PLC0415

        if event.kind != "repeat":
            self._end_leg(opened)
        url = urlsplit(event.url)
        span = self._tracer.start_span(
            f"leg {event.kind}",
            context=set_span_in_context(opened.call),
            kind=SpanKind.CLIENT,
            start_time=self._now_ns(),
            attributes={
                **opened.asked,
                "turncache.engine": event.engine,
                "server.address": url.hostname or "",
                "server.port": url.port or _PORTS.get(url.scheme, 0),
            },
        )
        if event.kind == "repeat":
            opened.repeat = span
        else:
            opened.leg = span

    def _end_repeat(self, opened: _Open, problem: str | None) -> None:
        repeat, opened.repeat = opened.repeat, None
        if repeat is not None:
            _fail(repeat, problem)
            repeat.end(self._now_ns())

    def _end_leg(self, opened: _Open, problem: str | None = None) -> None:
        leg, opened.leg = opened.leg, None
        if leg is not None:
            _fail(leg, problem)
            leg.end(self._now_ns())

    def _end(self, opened: _Open, event: CallEnded) -> None:
        self._end_leg(opened, event.problem)
        self._end_repeat(opened, "left")
        opened.ended_ns = self._now_ns()
        _set(
            opened.call,
            {
                "http.response.status_code": event.code,
                "turncache.session": event.session,
                "turncache.plan": event.plan.value,
                "turncache.reason": event.reason.value,
                "turncache.boundary": None if event.boundary is None else event.boundary.value,
                "turncache.prefill_s": event.prefill_s,
                "turncache.ttft_s": event.ttft_s,
                "turncache.overhead_s": event.overhead_s,
                "turncache.queued_s": event.queued_s or None,
                "gen_ai.usage.input_tokens": event.prompt_tokens,
                "gen_ai.usage.output_tokens": event.answer_tokens,
                "gen_ai.response.finish_reasons": None
                if event.finish_reason is None
                else (event.finish_reason,),
                "turncache.held_back_s": event.held_back_s or None,
                "turncache.repeats": event.repeats or None,
            },
        )
        _fail(opened.call, event.problem)


def otlp_traces(config: RouterConfig) -> Traces | None:
    """Make what the settings ask for: spans that go out by OTLP over HTTP, in batches.

    Where to, how many and under which name say OpenTelemetry's own variables (``OTEL_*``).

    Raises:
        ConfigError: packages are missing, or a variable cannot be used.
    """
    if not config.traces:
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import (  # noqa: PLC0415
            OTLPSpanExporter,
        )
        from opentelemetry.sdk.resources import Resource  # noqa: PLC0415
        from opentelemetry.sdk.trace import TracerProvider  # noqa: PLC0415
        from opentelemetry.sdk.trace.export import BatchSpanProcessor  # noqa: PLC0415
    except ImportError as error:
        raise ConfigError(
            "traces", "needs OpenTelemetry: pip install 'turncache[router-otel]'"
        ) from error
    try:
        provider = TracerProvider(
            # A name in OTEL_SERVICE_NAME or OTEL_RESOURCE_ATTRIBUTES wins.
            resource=Resource({"service.name": "turncache-router"}).merge(_named()),
            shutdown_on_exit=False,
        )
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    except ValueError as error:
        raise ConfigError("traces", f"OpenTelemetry's variables: {error}") from error
    return Traces(provider.get_tracer("turncache.router"), close=provider.shutdown)


def _named() -> Any:
    from opentelemetry.sdk.resources import OTELResourceDetector  # noqa: PLC0415

    return OTELResourceDetector().detect()


def _outcome(outcome: Outcome) -> dict[str, Any]:
    members = {f"turncache.outcome.{name}": getattr(outcome, name) for name in _OUTCOME}
    return {**members, "gen_ai.usage.cache_read.input_tokens": outcome.reused}


def _set(span: Span, attributes: Mapping[str, Any]) -> None:
    span.set_attributes({name: value for name, value in attributes.items() if value is not None})


def _fail(span: Span, problem: str | None) -> None:
    from opentelemetry.trace import Status, StatusCode  # noqa: PLC0415

    if problem is not None:
        span.set_attribute("error.type", problem)
        span.set_status(Status(StatusCode.ERROR))
