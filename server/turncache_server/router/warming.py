"""Warm ahead: prefill computes what is known of a session's next prompt before its tools end.

In a tool wait the next prompt is known but for the results: the history and the model's answer.
Shortly before the wait is expected to end it is sent to the prefill engine that had the last
call, with empty results, as a request for one token: prefill pulls what decode has, and computes
what the template renders in another way than the model wrote it. It is a request like any other,
whose cost is counted; a session that is back sooner is not warmed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from turncache.protocol import MAX_RETAIN_S, EngineHints, Plan, Reason
from turncache_server.router.errors import LegFailed
from turncache_server.router.events import WarmedAhead
from turncache_server.router.following import Said
from turncache_server.router.legs import forwarded, leg_headers, prefill_body
from turncache_server.router.opening import CallInput
from turncache_server.router.outcomes import Asked, ask_outcome
from turncache_server.router.plan import CallPlan, EngineView
from turncache_server.router.services import Services

#: The prompt stays on prefill for this many times the time that it was sent ahead.
_KEPT_TIMES: Final = 3


def warm_later(
    services: Services,
    call: CallInput,
    said: Said,
    *,
    prefill: EngineView,
    source: EngineView,
    expect_s: float,
) -> None:
    """Send the next prompt of a call's session to prefill ahead of its time.

    Args:
        services: what every call uses.
        call: the call whose answer asks for tools.
        said: that answer.
        prefill: the engine that had its prompt.
        source: the engine that answered.
        expect_s: seconds that the tools are expected to take.
    """
    ahead_s = services.config.warm_ahead_s
    # Of a session that is away for longer decode keeps nothing.
    if call.api.next_messages is None or not ahead_s < expect_s < MAX_RETAIN_S:
        return
    ahead = _ahead(services, call, said, prefill, source)

    def send() -> None:
        services.background.spawn(_warm(services, ahead), "warm ahead")

    num_gone = services.next_prompts.later(
        call.tags.session_id,
        len(ahead.body),
        expect_s - ahead_s,
        send,
        tenant=call.caller.tenant,
    )
    for _ in range(num_gone):
        services.events.emit(WarmedAhead(result="no_room"))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ahead:
    """A request that waits for its time: its bytes, and nothing of the call that it is made of.

    What has been parsed of a prompt takes many times the memory of its bytes.

    Attributes:
        session: whose it is.
        request: minted for it.
        path: of the resource.
        body: JSON.
        headers: makes the headers of a try whose request id is given.
        prefill: name of the engine that it is for.
        source: name of the engine that it pulls from.
    """

    session: str
    request: str
    path: str
    body: bytes
    headers: Callable[[str], Mapping[str, str]]
    prefill: str
    source: str


def _ahead(
    services: Services, call: CallInput, said: Said, prefill: EngineView, source: EngineView
) -> _Ahead:
    assert call.api.next_messages is not None
    request = services.new_id()
    tags = call.tags
    hints = EngineHints(
        session=tags.session_id,
        parent=tags.parent_id,
        tenant=call.caller.label,
        retain_s=_KEPT_TIMES * services.config.warm_ahead_s,
        expect_s=services.config.warm_ahead_s,
        priority=tags.priority,
        source=source.engine_id,
        call="prefill",
        request=request,
    )
    more = {"messages": call.api.next_messages(call.body, said)}
    client, session = forwarded(call.headers), tags.session_id
    return _Ahead(
        session=session,
        request=request,
        path=call.api.path,
        body=prefill_body(call.api, call.body, hints, salt=call.salt, more=more),
        headers=lambda request_id: leg_headers(
            client, session=session, request_id=request_id, engine_key=services.engine_key
        ),
        prefill=prefill.name,
        source=source.name,
    )


async def _warm(services: Services, ahead: _Ahead) -> None:
    told = await _sent(services, ahead)
    if told.result != "warmed":
        services.next_prompts.came_to_nothing(ahead.session)
    services.events.emit(told)


async def _sent(services: Services, ahead: _Ahead) -> WarmedAhead:
    """Send a prompt; return what became of it."""
    snapshot = services.snapshot()
    able = {e.name for e in snapshot.engines if e.live and e.pulls and not e.draining}
    # Returns may have been switched off since the call, or the router may be on its way out.
    wanted = snapshot.return_enabled and not services.switches.draining
    if not wanted or not {ahead.prefill, ahead.source} <= able:
        return WarmedAhead(result="no_engine")
    tries = itertools.count(1)
    hold = services.pool.hold([ahead.prefill])
    try:
        leg = await services.upstream.post(
            services.pool.config_of(ahead.prefill),
            ahead.path,
            ahead.body,
            # As of any leg: an id that two tries share would let one end the other.
            lambda: ahead.headers(f"{ahead.request}-w{next(tries)}"),
            limit_s=services.config.prefill_timeout_s,
        )
        async with leg:
            await leg.rest(await leg.first_chunk(), services.config.max_answer_bytes)
        if leg.status != 200:
            return WarmedAhead(result="refused")
        services.pool.answered(ahead.prefill)
        asked = await _outcome(services, ahead)
    except LegFailed as failure:
        # Told like any other: an engine that breaks takes no calls for a while.
        if failure.engine_at_fault:
            services.pool.failed(ahead.prefill, failure.kind)
        return WarmedAhead(result="failed")
    finally:
        hold.release()
    return WarmedAhead(result="warmed", outcome=asked.outcome)


async def _outcome(services: Services, ahead: _Ahead) -> Asked:
    address = services.pool.control_of(ahead.prefill)
    if address is None:
        return Asked()
    plan = CallPlan(label=Plan.RETURN, reason=Reason.OK, prefill=(), serve=())
    limit_s = services.config.control_timeout_s
    return await ask_outcome(services.control, address, ahead.request, plan, timeout_s=limit_s)
