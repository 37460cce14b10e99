"""What a call adds to the OpenTelemetry span around it, by the GenAI conventions.

No span is made and no package is imported: a span can only be current where somebody has
imported OpenTelemetry's API already. An instrumentation of openai makes its span around the
same call, so that the current span is the one of the call.

Attributes of the conventions: ``gen_ai.conversation.id`` (of sessions that somebody named:
an id made up here is none), ``gen_ai.conversation.compacted``,
``gen_ai.usage.cache_read.input_tokens``. Ours: ``turncache.turn``, ``turncache.call``,
``turncache.cause``, ``turncache.boundary``, ``turncache.parent_session.id`` and
``turncache.outcome.*`` with the members of ``Turncache-Outcome``.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Final

from turncache.protocol import Cause

if TYPE_CHECKING:
    from turncache.records import Call
    from turncache.sessions import Session

_API: Final = "opentelemetry.trace"
_OUTCOME: Final = ("prompt", "local", "returned", "computed", "lost", "plan", "reason", "at")


def current_span() -> Any:
    """Return the span that records the running code, or None."""
    api = sys.modules.get(_API)
    if api is None:
        return None
    span = api.get_current_span()
    return span if span.is_recording() else None


def tell_start(span: Any, call: Call, session: Session | None) -> None:
    """Add to ``span`` what is known when the call is made."""
    named = session is not None and not session.anonymous and not session.automatic
    _set(
        span,
        {
            "gen_ai.conversation.id": session.id if session is not None and named else None,
            # The convention knows true only.
            "gen_ai.conversation.compacted": True if call.cause is Cause.COMPACTION else None,
            "turncache.turn": call.turn,
            "turncache.call": call.call,
            "turncache.cause": None if call.cause is None else call.cause.value,
            "turncache.parent_session.id": None if session is None else session.parent_id,
        },
    )


def tell_outcome(span: Any, call: Call) -> None:
    """Add to ``span`` what the server said about the prompt's KV."""
    outcome = call.outcome()
    if outcome is None:
        return
    members = {f"turncache.outcome.{name}": getattr(outcome, name) for name in _OUTCOME}
    _set(span, {**members, "gen_ai.usage.cache_read.input_tokens": outcome.reused})


def tell_end(span: Any, call: Call) -> None:
    """Add to ``span`` how the call ended."""
    boundary = None if call.boundary is None else call.boundary.value
    cached = call.cached if call.outcome_text is None else None
    _set(
        span,
        {"turncache.boundary": boundary, "gen_ai.usage.cache_read.input_tokens": cached},
    )


def _set(span: Any, attributes: dict[str, Any]) -> None:
    # A span that has ended complains about attributes: a stream may outlive its span.
    if span.is_recording():
        span.set_attributes(
            {name: value for name, value in attributes.items() if value is not None}
        )
