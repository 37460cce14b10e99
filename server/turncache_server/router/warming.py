"""Warm ahead: prefill computes what is known of a session's next prompt before its tools end.

In a tool wait the next prompt is known but for the results: the history and the model's answer.
Shortly before the wait is expected to end it is sent to the prefill engine that had the last
call, with empty results, as a request for one token: prefill pulls what decode has, and computes
what the template renders in another way than the model wrote it. It is a request like any other,
whose cost is counted; a session that is back sooner is not warmed.
"""

from __future__ import annotations

from typing import Final

from turncache.protocol import EngineHints, Plan, Reason
from turncache_server.router.errors import LegFailed
from turncache_server.router.events import WarmedAhead
from turncache_server.router.following import Said
from turncache_server.router.legs import leg_headers, prefill_body
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
    if call.api.next_messages is None or expect_s <= ahead_s:
        return
    messages = call.api.next_messages(call.body, said)

    def send() -> None:
        work = _warm(services, call, messages, prefill, source)
        services.background.spawn(work, "warm ahead")

    size_bytes = len(call.body.raw) + len(messages)
    if not services.next_prompts.later(call.tags.session_id, size_bytes, expect_s - ahead_s, send):
        services.events.emit(WarmedAhead(result="no_room"))


async def _warm(
    services: Services, call: CallInput, messages: str, prefill: EngineView, source: EngineView
) -> None:
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
    body = prefill_body(call.api, call.body, hints, salt=call.salt, more={"messages": messages})
    engines = services.snapshot().engines
    able = {e.name for e in engines if e.live and e.pulls and not e.draining}
    if not {prefill.name, source.name} <= able:
        services.events.emit(WarmedAhead(result="no_engine"))
        return
    hold = services.pool.hold([prefill.name])
    try:
        leg = await services.upstream.post(
            services.pool.config_of(prefill.name),
            call.api.path,
            body,
            lambda: leg_headers(
                call.headers,
                session=tags.session_id,
                request_id=f"{request}-w",
                engine_key=services.engine_key,
            ),
        )
        async with leg:
            await leg.rest(await leg.first_chunk(), services.config.max_answer_bytes)
        if leg.status != 200:
            services.events.emit(WarmedAhead(result="refused"))
            return
        services.pool.answered(prefill.name)
        asked = await _outcome(services, prefill, request)
    except LegFailed as failure:
        # Told like any other: an engine that breaks takes no calls for a while.
        if failure.engine_at_fault:
            services.pool.failed(prefill.name, failure.kind)
        services.events.emit(WarmedAhead(result="failed"))
        return
    finally:
        hold.release()
    services.events.emit(WarmedAhead(result="warmed", outcome=asked.outcome))


async def _outcome(services: Services, prefill: EngineView, request: str) -> Asked:
    address = services.pool.control_of(prefill.name)
    if address is None:
        return Asked()
    plan = CallPlan(label=Plan.RETURN, reason=Reason.OK, prefill=(prefill,), serve=())
    limit_s = services.config.control_timeout_s
    return await ask_outcome(services.control, address, request, plan, timeout_s=limit_s)
