"""The log as a listener: one line per call, one per change of an engine."""

from __future__ import annotations

import logging

from turncache_server.router.events import (
    CallEnded,
    EngineChanged,
    EngineDrains,
    EnginePulls,
    EngineRestarted,
    EnginesRead,
    EnginesRefused,
    Event,
    LegFailure,
    OutcomeKnown,
    OutcomeMissing,
    WaitsExchanged,
)

logger = logging.getLogger("turncache.router")


def log_event(event: Event) -> None:
    """Write an event to the log; sessions appear as digests, prompts and keys never."""
    match event:
        case CallEnded():
            logger.log(
                logging.INFO if event.problem is None else logging.WARNING,
                "call %s session %s: plan=%s reason=%s code=%d%s%s ttft=%s total=%.3f s",
                event.request,
                event.session,
                event.plan.value,
                event.reason.value,
                event.code,
                "" if event.problem is None else f" problem={event.problem}",
                f" queued={event.queued_s:.3f}" if event.queued_s else "",
                "-" if event.ttft_s is None else f"{event.ttft_s:.3f}",
                event.total_s,
            )
        case OutcomeKnown():
            logger.info("call %s: %s", event.request, event.outcome.to_header())
        case OutcomeMissing():
            said = f": {event.detail}" if event.detail else ""
            logger.warning("call %s: outcome missing (%s)%s", event.request, event.why, said)
        case LegFailure():
            logger.warning(
                "call %s: leg on %s (%s) failed: %s%s",
                event.request,
                event.engine,
                event.side,
                event.kind,
                ", trying another" if event.retried else "",
            )
        case EnginePulls(pulls=False):
            logger.warning(
                "engine %s (%s) is in mode %s and pulls nothing: prompts are handed over as "
                "stock does, nothing is returned",
                event.engine,
                event.side,
                event.mode,
            )
        case EngineDrains():
            logger.info(
                "engine %s (%s) %s",
                event.engine,
                event.side,
                "drains: no session is placed on it" if event.draining else "drains no longer",
            )
        case EnginesRead() if event.joined or event.left:
            logger.info(
                "the list of engines has changed: joined: %s; left: %s",
                ", ".join(event.joined) or "none",
                ", ".join(event.left) or "none",
            )
        case EnginesRefused():
            logger.error("the engines in use stay: %s", event.why)
        case EngineChanged():
            logger.log(
                logging.INFO if event.live else logging.WARNING,
                "engine %s (%s) is %s: %s",
                event.engine,
                event.side,
                "live" if event.live else "down",
                event.why,
            )
        case WaitsExchanged(changed=True):
            _log_sharing(event.problem)
        case EngineRestarted():
            logger.warning(
                "engine %s (%s) was restarted: what it had is gone", event.engine, event.side
            )


def _log_sharing(problem: str | None) -> None:
    if problem is None:
        logger.info("tool waits are shared with the other routers")
    else:
        logger.warning("tool waits are not shared: %s; this router goes by its own", problem)
