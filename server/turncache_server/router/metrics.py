"""Prometheus metrics as a listener, in a registry of their own.

Labels are closed sets: words of the wire contract, HTTP status codes and names from the
configuration. A session id is never a label.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from turncache_server.router.admission import State
from turncache_server.router.events import (
    CallAdmitted,
    CallEnded,
    CallRefused,
    CallSettled,
    CallStarted,
    EngineChanged,
    EngineLeft,
    EnginePulls,
    EngineRestarted,
    EnginesRead,
    EnginesRefused,
    Event,
    LegFailure,
    LegStarted,
    OutcomeKnown,
    OutcomeMissing,
    PassedOn,
    PrefillRepeated,
    PromptHeldBack,
    SignalSent,
    WaitEnded,
    WaitsExchanged,
    WarmedAhead,
)
from turncache_server.router.untaken import Prompts

#: Content type of :meth:`Metrics.render`.
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_TTFT_S = (0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 25.6, 51.2, 102.4)
_QUEUE_S = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 60.0, 120.0, 300.0, 900.0)
_WAIT_S = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 60.0, 120.0, 300.0, 900.0, 3600.0)
#: Within a factor of two an expectation is worth half of clairvoyance, beyond three times
#: three times in a row an engine ignores it.
_RATIO = (0.1, 1 / 3, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 10.0)
_OVERHEAD_S = (0.0005, 0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.128)


class Metrics:
    """The router's metrics.

    Args:
        num_sessions: called when metrics are read; size of the session table.
    """

    def __init__(self, num_sessions: Callable[[], int]) -> None:
        self._registry = registry = CollectorRegistry()
        self._requests = Counter(
            "turncache_router_requests_total",
            "Requests by API, plan (none: refused by the router, or passed on) and HTTP status.",
            ("api", "plan", "code"),
            registry=registry,
        )
        self._problems = Counter(
            "turncache_router_failed_calls_total",
            "Calls that had a plan and did not end well.",
            ("problem",),
            registry=registry,
        )
        self._ttft = Histogram(
            "turncache_router_ttft_seconds",
            "Seconds to the engine's first byte.",
            ("plan",),
            buckets=_TTFT_S,
            registry=registry,
        )
        self._overhead = Histogram(
            "turncache_router_overhead_seconds",
            "Seconds to the first byte in which no engine was working on the call.",
            buckets=_OVERHEAD_S,
            registry=registry,
        )
        self._tokens = Counter(
            "turncache_prompt_tokens_total",
            "Prompt tokens by where their KV came from.",
            ("source",),
            registry=registry,
        )
        self._lost = Counter(
            "turncache_lost_tokens_total",
            "Computed tokens that an earlier call of the lineage had computed.",
            ("reason",),
            registry=registry,
        )
        self._missing = Counter(
            "turncache_router_outcome_missing_total",
            "Answers without a Turncache-Outcome header.",
            ("why",),
            registry=registry,
        )
        self._waits = Histogram(
            "turncache_router_tool_wait_seconds",
            "Seconds between a call that ended in tool calls and the one that brought results.",
            buckets=_WAIT_S,
            registry=registry,
        )
        self._ratio = Histogram(
            "turncache_expectation_ratio",
            "Tool waits in multiples of what was expected of them.",
            buckets=_RATIO,
            registry=registry,
        )
        self._warmed = Counter(
            "turncache_router_warm_ahead_total",
            "Prompts that were to be sent ahead of their call, by what became of them.",
            ("result",),
            registry=registry,
        )
        self._warm_tokens = Counter(
            "turncache_router_warm_ahead_tokens_total",
            "Tokens of prompts sent ahead, by where their KV came from.",
            ("source",),
            registry=registry,
        )
        self._resumed = Counter(
            "turncache_router_resumed_tokens_total",
            "Prompt tokens of calls that bring results of tools, by whether they were sent ahead.",
            ("warmed", "what"),
            registry=registry,
        )
        self._resumed_ttft = Histogram(
            "turncache_router_resumed_ttft_seconds",
            "Seconds to the first byte of calls that bring results of tools, likewise.",
            ("warmed",),
            buckets=_TTFT_S,
            registry=registry,
        )
        self._signals = Counter(
            "turncache_router_signals_total",
            "Signals about sessions to engines.",
            ("kind", "result"),
            registry=registry,
        )
        self._leg_failures = Counter(
            "turncache_router_leg_failures_total",
            "Legs without a usable answer.",
            ("side", "kind", "retried"),
            registry=registry,
        )
        self._repeats = Counter(
            "turncache_router_repeated_prefills_total",
            "Prefill legs of prompts that were lost before decode had them, by how they ended.",
            ("result",),
            registry=registry,
        )
        self._active = Gauge(
            "turncache_router_active_calls", "Calls being served.", registry=registry
        )
        self._live = Gauge(
            "turncache_router_engine_live",
            "Whether an engine takes calls.",
            ("engine", "side"),
            registry=registry,
        )
        self._pulls = Gauge(
            "turncache_router_engine_pulls",
            "Whether an engine takes and gives KV by verified pulls.",
            ("engine", "side"),
            registry=registry,
        )
        self._lists = Counter(
            "turncache_router_engine_lists_total",
            "States of the list of engines that were read or refused.",
            ("result",),
            registry=registry,
        )
        self._list_refused = Gauge(
            "turncache_router_engine_list_refused",
            "Whether the list of engines cannot be used at present, and the one before it stays.",
            registry=registry,
        )
        self._restarts = Counter(
            "turncache_router_engine_restarts_total",
            "Engines that came back as another process.",
            ("engine", "side"),
            registry=registry,
        )
        self._exchanges = Counter(
            "turncache_router_shared_exchanges_total",
            "Exchanges of tool waits with the other routers, over Redis.",
            ("result",),
            registry=registry,
        )
        self._shared = Counter(
            "turncache_router_shared_waits_total",
            "Tool waits that were sent to the other routers, taken from them, or dropped.",
            ("what",),
            registry=registry,
        )
        self._admitted = Counter(
            "turncache_router_admission_total",
            "Calls of sessions that were let in at once, after a wait, or not.",
            ("result",),
            registry=registry,
        )
        self._queue = Histogram(
            "turncache_router_queue_seconds",
            "Seconds that calls waited to be let in, of those that had to wait.",
            buckets=_QUEUE_S,
            registry=registry,
        )
        self._waiting = Gauge(
            "turncache_router_admission_waiting",
            "Calls that wait to be let in.",
            registry=registry,
        )
        self._working_set = Gauge(
            "turncache_router_admission_sessions",
            "Sessions that are expected back.",
            registry=registry,
        )
        self._set_tokens = Gauge(
            "turncache_router_admission_tokens",
            "Tokens of the sessions that are expected back, and those that fit (-1: unknown).",
            ("what",),
            registry=registry,
        )
        self._held_back = Histogram(
            "turncache_router_handover_queue_seconds",
            "Seconds that prompts waited because decode was behind, of those that had to wait.",
            ("result",),
            buckets=_QUEUE_S,
            registry=registry,
        )
        self._prompts_waiting = Gauge(
            "turncache_router_handover_waiting",
            "Prompts that wait because decode is behind.",
            ("engine",),
            registry=registry,
        )
        self._prompt_tokens = Gauge(
            "turncache_router_handover_tokens",
            "Tokens of prompts that prefill was asked for and decode has not taken, and how many "
            "there may be (-1: unknown).",
            ("engine", "what"),
            registry=registry,
        )
        self._prompts: Callable[[], Mapping[str, Prompts]] = dict
        sessions = Gauge(
            "turncache_router_sessions", "Sessions in the router's table.", registry=registry
        )
        sessions.set_function(num_sessions)

    def __call__(self, event: Event) -> None:
        """Count an event."""
        match event:
            case CallStarted() | LegStarted() | CallEnded() | CallSettled():
                self._with_a_plan(event)
            case CallRefused() | PassedOn() | CallAdmitted():
                self._without_a_plan(event)
            case PromptHeldBack() | PrefillRepeated():
                self._between_the_legs(event)
            case OutcomeKnown():
                self._outcome(event)
                if event.warmed is not None:
                    self._resumed_call("yes" if event.warmed else "no", event)
            case OutcomeMissing():
                self._missing.labels(event.why).inc()
            case WaitEnded() | WarmedAhead():
                self._between_calls(event)
            case SignalSent():
                self._signals.labels(event.kind, event.result).inc()
            case LegFailure():
                retried = "yes" if event.retried else "no"
                self._leg_failures.labels(event.side, event.kind, retried).inc()
            case WaitsExchanged():
                self._exchanged(event)
            case _:
                self._fleet(event)

    def _with_a_plan(self, event: CallStarted | LegStarted | CallEnded | CallSettled) -> None:
        if isinstance(event, CallStarted):
            self._active.inc()
        elif isinstance(event, CallEnded):
            self._ended(event)

    def _without_a_plan(self, event: CallRefused | PassedOn | CallAdmitted) -> None:
        if not isinstance(event, CallAdmitted):
            self._requests.labels(event.api, "none", str(event.code)).inc()
            return
        self._admitted.labels(event.result).inc()
        if event.result in ("in_turn", "late"):
            self._queue.observe(event.waited_s)

    def _between_the_legs(self, event: PromptHeldBack | PrefillRepeated) -> None:
        if isinstance(event, PromptHeldBack):
            self._held_back.labels(event.result).observe(event.waited_s)
        else:
            self._repeats.labels(event.result).inc()

    def _between_calls(self, event: WaitEnded | WarmedAhead) -> None:
        if isinstance(event, WaitEnded):
            self._waited(event)
        else:
            self._warmed_ahead(event)

    def _fleet(self, event: Event) -> None:
        match event:
            case EngineChanged():
                self._live.labels(event.engine, event.side).set(event.live)
            case EnginePulls():
                self._pulls.labels(event.engine, event.side).set(event.pulls)
            case EngineLeft():
                for metric in (self._live, self._pulls, self._restarts):
                    metric.remove(event.engine, event.side)
            case EnginesRead():
                self._lists.labels("read").inc()
                self._list_refused.set(0)
            case EnginesRefused():
                self._lists.labels("refused").inc()
                self._list_refused.set(1)
            case EngineRestarted():
                self._restarts.labels(event.engine, event.side).inc()

    def watch(self, state: Callable[[], State]) -> None:
        """Show the working set and the queue, as they are when metrics are read."""

        def fits() -> float:
            found = state().fits
            return -1 if found is None else found

        self._waiting.set_function(lambda: state().waiting)
        self._working_set.set_function(lambda: state().sessions)
        self._set_tokens.labels("expected").set_function(lambda: state().tokens)
        self._set_tokens.labels("fits").set_function(fits)

    def watch_prompts(self, states: Callable[[], Mapping[str, Prompts]]) -> None:
        """Show the prompts on their way from each prefill engine, when metrics are read."""
        self._prompts = states

    def render(self) -> bytes:
        """Return the metrics in Prometheus' text format."""
        # Engines come and go: those that are gone are not shown any more.
        self._prompts_waiting.clear()
        self._prompt_tokens.clear()
        for engine, state in self._prompts().items():
            self._prompts_waiting.labels(engine).set(state.waiting)
            self._prompt_tokens.labels(engine, "untaken").set(state.tokens)
            limit = -1 if state.limit is None else state.limit
            self._prompt_tokens.labels(engine, "limit").set(limit)
        return generate_latest(self._registry)

    def _ended(self, event: CallEnded) -> None:
        self._active.dec()
        self._requests.labels(event.api, event.plan.value, str(event.code)).inc()
        if event.problem is not None:
            self._problems.labels(event.problem).inc()
        if event.ttft_s is not None:
            self._ttft.labels(event.plan.value).observe(event.ttft_s)
        if event.overhead_s is not None:
            self._overhead.observe(event.overhead_s)

    def _waited(self, event: WaitEnded) -> None:
        self._waits.observe(event.seconds)
        if event.expect_s:
            self._ratio.observe(event.seconds / event.expect_s)

    def _exchanged(self, event: WaitsExchanged) -> None:
        self._exchanges.labels("ok" if event.problem is None else "failed").inc()
        self._shared.labels("sent").inc(event.num_sent)
        self._shared.labels("taken").inc(event.num_taken)
        self._shared.labels("dropped").inc(event.num_dropped)

    def _warmed_ahead(self, event: WarmedAhead) -> None:
        self._warmed.labels(event.result).inc()
        if (outcome := event.outcome) is not None:
            for source in ("local", "returned", "computed"):
                self._warm_tokens.labels(source).inc(getattr(outcome, source))

    def _resumed_call(self, warmed: str, event: OutcomeKnown) -> None:
        for what in ("prompt", "computed", "lost"):
            self._resumed.labels(warmed, what).inc(getattr(event.outcome, what))
        if event.ttft_s is not None:
            self._resumed_ttft.labels(warmed).observe(event.ttft_s)

    def _outcome(self, event: OutcomeKnown) -> None:
        outcome = event.outcome
        self._tokens.labels("local").inc(outcome.local)
        self._tokens.labels("returned").inc(outcome.returned)
        self._tokens.labels("computed").inc(outcome.computed)
        self._lost.labels(outcome.reason.value).inc(outcome.lost)
