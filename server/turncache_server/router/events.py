"""What the router has to tell: frozen records, for any number of listeners.

Logs, metrics and traces are listeners; the logic emits and knows none of them. No record
holds a prompt, an answer or a key.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

import msgspec

from turncache.protocol import Boundary, Outcome, Plan, Reason

logger = logging.getLogger(__name__)


class CallRefused(msgspec.Struct, frozen=True, kw_only=True):
    """The router answered a request itself, without a plan.

    Attributes:
        why: a word of a closed list: code or type of the error.
    """

    api: str
    code: int
    request: str = ""
    why: str = ""


class PassedOn(msgspec.Struct, frozen=True, kw_only=True):
    """A request that needs no plan was answered by an engine.

    Attributes:
        api: last part of its path.
    """

    request: str
    api: str
    engine: str
    code: int
    total_s: float


class CallAdmitted(msgspec.Struct, frozen=True, kw_only=True):
    """A call of a session was let in, or will not be; only with ``admission``.

    Attributes:
        result: ``at_once``; after a wait ``in_turn``, or ``late`` when it was the longest that
            is allowed; ``refused`` by a full queue; ``left``: nobody waits for it any more.
        waited_s: seconds in the queue, 0 of a call that has left it.
    """

    request: str
    result: str
    waited_s: float


class CallStarted(msgspec.Struct, frozen=True, kw_only=True):
    """A call has a plan.

    Attributes:
        tenant: what engines know its tenant by, None without keys.
        elapsed_s: seconds since the request has arrived.
        trace: the client's headers of trace context, by lower-case names.
        path: of the API.
        model: that was asked for, None for the engine's default.
    """

    request: str
    api: str
    tenant: str | None
    elapsed_s: float
    trace: Mapping[str, str]
    path: str = ""
    model: str | None = None


class PromptHeldBack(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt had to wait because decode was behind, and waits no longer.

    Attributes:
        engine: name of the prefill engine that it was for.
        result: ``in_turn``: there was room; ``late``: it was the longest wait that is allowed;
            ``crowded``: it had waited longest of more than may; ``left``: nobody waits for it any
            more.
        waited_s: seconds that it waited.
    """

    request: str
    engine: str
    result: str
    waited_s: float


class LegStarted(msgspec.Struct, frozen=True, kw_only=True):
    """A call's next leg begins; the one before it is over.

    Attributes:
        kind: ``prefill``, ``decode``, ``single``, or ``repeat``: a prefill leg that is sent again
            beside the decode leg, which goes on, until :class:`PrefillRepeated`.
        url: of the engine.
    """

    request: str
    engine: str
    kind: str
    url: str = ""


class CallEnded(msgspec.Struct, frozen=True, kw_only=True):
    """A call that had a plan is over for the client.

    Attributes:
        request: the call's id.
        session: digest of the session id.
        code: HTTP status, 499 when the client left.
        problem: kind of failure, None when the call ended well. A stream that broke after
            its first byte has one beside code 200.
        prefill_s: seconds of the prefill leg and its repeats, None without one.
        ttft_s: seconds to the engine's first byte, None when there was none.
        total_s: seconds until the last byte.
        overhead_s: part of ``ttft_s`` that no engine was working, None without a first byte;
            without ``queued_s`` and ``held_back_s``.
        queued_s: part of ``ttft_s`` that the call waited to be let in.
        tenant: what engines know its tenant by, None without keys.
        engines: names of those that have served it, in the order of its legs.
        finish_reason: in the words of its API.
        prompt_tokens: as the engine that answered counts them, None when it has not said.
        answer_tokens: likewise.
        held_back_s: part of ``ttft_s`` that its prompt waited because decode was behind.
        repeats: how often its prefill leg was sent again.
    """

    request: str
    session: str
    api: str
    plan: Plan
    reason: Reason
    code: int
    problem: str | None
    boundary: Boundary | None
    tool_names: tuple[str, ...]
    prefill_s: float | None
    ttft_s: float | None
    total_s: float
    overhead_s: float | None
    queued_s: float = 0.0
    tenant: str | None = None
    engines: tuple[str, ...] = ()
    finish_reason: str | None = None
    prompt_tokens: int | None = None
    answer_tokens: int | None = None
    held_back_s: float = 0.0
    repeats: int = 0


class CallSettled(msgspec.Struct, frozen=True, kw_only=True):
    """Nothing more will be told of a call that had a plan."""

    request: str


class OutcomeKnown(msgspec.Struct, frozen=True, kw_only=True):
    """The final outcome of a call: once per call at most.

    Attributes:
        warmed: of a call that brings results of tools, whether its prompt was sent ahead; None
            of any other, and where no prompts are sent ahead.
        ttft_s: seconds to its first byte, None when there was none.
    """

    request: str
    outcome: Outcome
    warmed: bool | None = None
    ttft_s: float | None = None


class OutcomeMissing(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome was not known when a call's headers had to go out.

    Attributes:
        why: ``no_answer``, ``refused``, ``unknown_call`` or ``implausible``.
    """

    request: str
    why: str
    detail: str = ""


class WaitEnded(msgspec.Struct, frozen=True, kw_only=True):
    """A call brought the results of the tools that its session waited for.

    Attributes:
        tenant: what engines know its tenant by, None without keys.
        tool_names: the tools that it was for.
        seconds: length of the wait.
        expect_s: what was expected of it, None when nobody knew.
    """

    request: str
    tenant: str | None
    tool_names: tuple[str, ...]
    seconds: float
    expect_s: float | None


class WarmedAhead(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a prompt that was to be sent ahead.

    Attributes:
        result: ``warmed``, ``overtaken`` (the session was back first), ``no_room``,
            ``no_engine`` (one that it needs is not there, or returns are off by now),
            ``refused`` or ``failed``.
        outcome: what it has cost, None when that is not known.
    """

    result: str
    outcome: Outcome | None = None


class SignalSent(msgspec.Struct, frozen=True, kw_only=True):
    """An engine was told what happens to a session.

    Attributes:
        kind: ``wait`` or another kind of signal.
        result: ``accepted``, ``refused`` or ``no_answer``.
    """

    engine: str
    kind: str
    result: str


class LegFailure(msgspec.Struct, frozen=True, kw_only=True):
    """A leg got no usable answer.

    Attributes:
        kind: see :class:`turncache_server.router.errors.LegFailed`.
        retried: another engine is tried.
    """

    request: str
    engine: str
    side: str
    kind: str
    retried: bool


class PrefillRepeated(msgspec.Struct, frozen=True, kw_only=True):
    """A call's prompt was lost before decode had it, and prefill was to compute it again.

    Attributes:
        engine: who was to, None for ``no_engine``.
        result: ``done``; ``failed``; ``late``: decode had waited for long enough before it was
            its turn; ``left``: the call did not wait for its end; or ``no_engine``: nobody was
            left who could have helped, and decode computes.
    """

    request: str
    engine: str | None
    result: str


class EngineChanged(msgspec.Struct, frozen=True, kw_only=True):
    """An engine became live or stopped being it."""

    engine: str
    side: str
    live: bool
    why: str


class EnginePulls(msgspec.Struct, frozen=True, kw_only=True):
    """An engine begins to pull, or stops.

    Attributes:
        mode: of its extension.
    """

    engine: str
    side: str
    mode: str
    pulls: bool


class EngineDrains(msgspec.Struct, frozen=True, kw_only=True):
    """An engine begins to hand its sessions to the others, or stops."""

    engine: str
    side: str
    draining: bool


class EngineLeft(msgspec.Struct, frozen=True, kw_only=True):
    """An engine is no longer one of the fleet: it gets no new calls."""

    engine: str
    side: str


class EngineRestarted(msgspec.Struct, frozen=True, kw_only=True):
    """Another process answers for an engine: what the last one had computed is gone."""

    engine: str
    side: str


class EnginesRead(msgspec.Struct, frozen=True, kw_only=True):
    """The list of the engines was read, from its file or from Kubernetes.

    Attributes:
        joined: names of engines that are new, or have other settings.
        left: names of engines that are gone, or had other settings.
    """

    joined: tuple[str, ...]
    left: tuple[str, ...]


class EnginesRefused(msgspec.Struct, frozen=True, kw_only=True):
    """The list of the engines cannot be read or used; the engines before it stay."""

    why: str


class WaitsExchanged(msgspec.Struct, frozen=True, kw_only=True):
    """The router has shared its tool waits with the other replicas, or has tried to.

    Attributes:
        num_sent: waits of its own that the others can read from now on.
        num_taken: waits of others that it has learnt from.
        num_dropped: waits that nobody will read: too many came while there was nobody to take
            them, or they were unreadable.
        problem: why nothing was exchanged, None when it was.
        changed: the exchange before this one ended otherwise, or there was none.
    """

    num_sent: int
    num_taken: int
    num_dropped: int
    problem: str | None
    changed: bool


Event = (
    CallRefused
    | PassedOn
    | CallAdmitted
    | CallStarted
    | PromptHeldBack
    | LegStarted
    | CallEnded
    | CallSettled
    | OutcomeKnown
    | OutcomeMissing
    | WaitEnded
    | WarmedAhead
    | SignalSent
    | LegFailure
    | PrefillRepeated
    | EngineChanged
    | EnginePulls
    | EngineDrains
    | EngineLeft
    | EnginesRead
    | EnginesRefused
    | EngineRestarted
    | WaitsExchanged
)
Listener = Callable[[Event], None]


class Events:
    """Hands every event to every listener, in order."""

    def __init__(self, listeners: Sequence[Listener]) -> None:
        self._listeners = tuple(listeners)

    def emit(self, event: Event) -> None:
        """Tell the listeners; one that fails is logged and must not fail a call."""
        for listener in self._listeners:
            try:
                listener(event)
            except Exception:
                logger.exception("a listener failed on %s", type(event).__name__)
