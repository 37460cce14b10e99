"""The log as a listener: one line per call, one per change of an engine.

A call's line is written when its outcome is known, or will not be; beside it there are lines of
what went wrong on the way (a leg that failed, an outcome that was missing).
"""

from __future__ import annotations

import logging
from typing import Final

from turncache.protocol import Outcome
from turncache_server.router.events import (
    CallEnded,
    CallRefused,
    CallSettled,
    CallStarted,
    EngineChanged,
    EngineDrains,
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
    WaitsExchanged,
)

logger = logging.getLogger("turncache.router")

_COUNTS: Final = ("prompt", "local", "returned", "computed", "lost", "at")


class Log:
    """Writes events to the log; sessions appear as digests, prompts and keys never.

    Owner of the calls that have ended and are not settled: a call is one line, with its outcome.
    """

    def __init__(self) -> None:
        self._ended: dict[str, CallEnded] = {}
        self._outcomes: dict[str, Outcome] = {}

    def __call__(self, event: Event) -> None:
        """Write an event, or keep it for the line that it belongs to."""
        match event:
            case CallStarted() | LegStarted():
                pass  # a call's line tells of it
            case CallEnded():
                self._ended[event.request] = event
            case OutcomeKnown() if event.request in self._ended:
                self._outcomes[event.request] = event.outcome
            case CallSettled() if event.request in self._ended:
                _log_call(self._ended.pop(event.request), self._outcomes.pop(event.request, None))
            case CallRefused():
                logger.log(
                    logging.WARNING if event.code >= 500 else logging.INFO,
                    "request %s refused: api=%s code=%d why=%s",
                    *(event.request, event.api, event.code, event.why),
                )
            case PassedOn():
                logger.info(
                    "request %s: api=%s engines=%s code=%d total=%.3f s",
                    *(event.request, event.api, event.engine, event.code, event.total_s),
                )
            case _:
                _log_other(event)


def _log_call(event: CallEnded, outcome: Outcome | None) -> None:
    """Write the line of a call: what is known of it, name by name."""
    level = logging.INFO if event.problem is None else logging.WARNING
    if not logger.isEnabledFor(level):
        return
    reason = event.reason if outcome is None else outcome.reason
    facts: dict[str, object] = {
        "api": event.api,
        "tenant": event.tenant,
        "plan": event.plan.value,
        "reason": reason.value,
        "engines": ",".join(event.engines) or None,
        "code": event.code,
        "problem": event.problem,
        "boundary": None if event.boundary is None else event.boundary.value,
        "queued": f"{event.queued_s:.3f}" if event.queued_s else None,
        "held_back": f"{event.held_back_s:.3f}" if event.held_back_s else None,
        "repeats": event.repeats or None,
        "ttft": None if event.ttft_s is None else f"{event.ttft_s:.3f}",
        "total": f"{event.total_s:.3f}",
        "answer": event.answer_tokens,
    }
    if outcome is not None:
        facts |= {name: getattr(outcome, name) for name in _COUNTS}
    logger.log(
        level,
        "call %s session %s: %s",
        event.request,
        event.session,
        " ".join(f"{name}={value}" for name, value in facts.items() if value is not None),
    )


def _log_other(event: Event) -> None:
    match event:
        case OutcomeMissing():
            said = f": {event.detail}" if event.detail else ""
            logger.warning("call %s: outcome missing (%s)%s", event.request, event.why, said)
        case LegFailure() | PrefillRepeated():
            _log_leg(event)
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


def _log_leg(event: LegFailure | PrefillRepeated) -> None:
    if isinstance(event, LegFailure):
        logger.warning(
            "call %s: leg on %s (%s) failed: %s%s",
            event.request,
            event.engine,
            event.side,
            event.kind,
            ", trying another" if event.retried else "",
        )
    else:
        logger.warning(
            "call %s: its prompt was lost before decode had it; prefill again%s: %s",
            event.request,
            "" if event.engine is None else f" on {event.engine}",
            event.result,
        )


def _log_sharing(problem: str | None) -> None:
    if problem is None:
        logger.info("tool waits are shared with the other routers")
    else:
        logger.warning("tool waits are not shared: %s; this router goes by its own", problem)
