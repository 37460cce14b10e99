"""Asking an engine what happened to a call's KV."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeVar

from turncache.errors import EngineFault, EngineRefusal, ProtocolError
from turncache.protocol import Outcome, Plan, Reason
from turncache_server.control.messages import Call, CallReply, Reply, Request
from turncache_server.router.plan import CallPlan

R = TypeVar("R", bound=Reply)


class AsksControl(Protocol):
    """The part of :class:`turncache_server.control.client.AsyncControlClient` used here."""

    async def ask(self, address: str, request: Request, kind: type[R], *, timeout_s: float) -> R:
        """Ask and await the answer; raises EngineFault when there is none of this kind."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """Result of a question.

    Attributes:
        outcome: what happened, None when that is not known.
        done: the engine will not change it any more.
        why: ``no_answer``, ``refused``, ``unknown_call`` or ``implausible``, None with an outcome.
        detail: the engine's own words, for the log.
    """

    outcome: Outcome | None = None
    done: bool = False
    why: str | None = None
    detail: str = ""


async def ask_outcome(
    control: AsksControl, address: str, request: str, plan: CallPlan, *, timeout_s: float
) -> Asked:
    """Ask the engine at ``address`` for the outcome of a call; failing is a result too."""
    try:
        reply = await control.ask(address, Call(request=request), CallReply, timeout_s=timeout_s)
    except EngineRefusal as error:
        return Asked(why="refused", detail=str(error))
    except EngineFault:
        return Asked(why="no_answer")
    return judge(reply, plan.label, plan.reason)


def judge(reply: CallReply, label: Plan, reason: Reason) -> Asked:
    """Turn an engine's answer into an outcome; one that does not add up is dropped.

    Args:
        reply: the engine's answer.
        label: the plan's label.
        reason: the plan's reason; it wins unless it is ``ok``, because an engine cannot
            know why it was not told to pull.
    """
    if not reply.found:
        return Asked(why="unknown_call")
    if reason is Reason.OK:
        reason = Reason(reply.reason) if reply.reason in set(Reason) else Reason.ERROR
    try:
        outcome = Outcome(
            prompt=reply.prompt,
            local=reply.local,
            returned=reply.returned,
            computed=reply.computed,
            lost=reply.lost,
            plan=label,
            reason=reason,
            at=reply.at if reason is Reason.DIVERGED else None,
        )
    except ProtocolError:
        return Asked(why="implausible")
    return Asked(outcome=outcome, done=reply.done)
