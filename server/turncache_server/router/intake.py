"""From a request that has been read to a call with a plan: whose it is, and what is known of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from turncache.errors import ProtocolError
from turncache.protocol import CallTags, check_session_id, identify, tags_from_headers
from turncache_server.router.admission import Arrival
from turncache_server.router.alone import (
    all_tokens,
    front_of,
    kept_tokens,
    least_new_tokens,
)
from turncache_server.router.apis.api import Api, CallRequest
from turncache_server.router.body import Body
from turncache_server.router.errors import invalid
from turncache_server.router.events import WaitEnded, WarmedAhead
from turncache_server.router.following import History
from turncache_server.router.gate import Gate
from turncache_server.router.keys import Caller, salt_of
from turncache_server.router.opening import CallInput
from turncache_server.router.plan import (
    CallPlan,
    PlanHints,
    Side,
    Snapshot,
    check_model,
    make_plan,
)
from turncache_server.router.services import Services
from turncache_server.router.sessions import SessionEntry, answer_key, namespaced
from turncache_server.router.stream import ClientAnswer


class Intake:
    """Makes calls of requests.

    Args:
        services: what every call uses.
    """

    def __init__(self, services: Services) -> None:
        self._services = services

    async def planned(
        self,
        api: Api,
        body: Body,
        *,
        headers: Mapping[str, str],
        caller: Caller,
        request_id: str,
        started_s: float,
        answer: ClientAnswer,
    ) -> tuple[CallInput, CallPlan]:
        """Read a request and plan its call.

        Args:
            api: the API that was called.
            body: of the request.
            headers: the client's headers with lower-case names.
            caller: whose call it is.
            request_id: minted by the router.
            started_s: when the request arrived.
            answer: to the client; kept alive while the call waits to be let in.

        Raises:
            ApiError: the request is impossible, nobody can serve it, or too many wait.
        """
        services = self._services
        asked = api.read(body)
        tags, anonymous = tags_of(
            headers,
            body,
            request_id,
            caller.tenant,
            own_header=services.config.session_header.lower(),
        )
        snapshot = await self._snapshot_with(asked.model)
        check_model(asked, snapshot)
        history = None
        followed = anonymous and services.config.follow_conversations
        if followed or services.config.may_decode_alone:
            history = api.history(f"{caller.tenant}\0{asked.model}", body)
        if followed and history is not None:
            tags, anonymous = self._followed(body, history, tags)
        root, entry = self._place(asked, tags, caller)
        queued_s, continues = 0.0, asked.has_answers or entry is not None
        if services.gate is not None and not anonymous:
            arrival = Arrival(
                call=request_id,
                session=tags.session_id,
                tenant=caller.tenant,
                tokens=body.likely_tokens,
                above=tuple(each for each in (tags.parent_id, root) if each is not None),
                urgent=asked.brings_results or tags.final,
            )
            ping_s = services.config.ping_s if asked.stream else 0.0
            queued_s = await _let_in(services.gate, arrival, answer, ping_s)
        if queued_s:
            # Meanwhile engines may have come and gone.
            snapshot = await self._snapshot_with(asked.model)
            root, entry = self._place(asked, tags, caller)
        if services.next_prompts.drop(tags.session_id):
            services.events.emit(WarmedAhead(result="overtaken"))
        warmed = services.next_prompts.was_sent(tags.session_id)
        call = CallInput(
            request=request_id,
            api=api,
            body=body,
            asked=asked,
            tags=tags,
            anonymous=anonymous,
            followed=followed,
            root=root,
            history=history,
            caller=caller,
            salt=salt_of(
                caller,
                root if services.config.cache_salt == "session" else None,
                body.get("cache_salt"),
            ),
            headers=headers,
            started_s=started_s,
            return_enabled=snapshot.return_enabled,
            queued_s=queued_s,
            continues=continues,
            warmed=warmed,
        )
        if asked.brings_results:
            self._end_wait(call)
        hints = PlanHints(
            root=root,
            served_by=None if entry is None else entry.served_by,
            behind=entry is not None and entry.is_behind(asked.num_answers),
            new_tokens=await self._new_tokens(call, entry, snapshot),
            all_tokens=all_tokens(body) if snapshot.decode_limit else 0,
        )
        return call, make_plan(asked, hints, snapshot)

    async def _new_tokens(
        self, call: CallInput, entry: SessionEntry | None, snapshot: Snapshot
    ) -> int | None:
        """Return the most that the session's decode engine would compute, when it says so."""
        services, limit = self._services, snapshot.decode_limit
        if entry is None or call.history is None or call.asked.one_engine or not limit:
            return None
        last = entry.answered
        new = least_new_tokens(
            call.history, front_of(call.body), last, in_turn=call.asked.brings_results
        )
        if last is None or new is None or new > limit:
            return None
        if entry.served_by not in {engine.name for engine in snapshot.of_side(Side.DECODE)}:
            return None
        address = services.pool.config_of(entry.served_by).control
        if address is None:
            return None
        kept = await kept_tokens(
            services.control,
            address,
            call.tags.session_id,
            timeout_s=services.config.control_timeout_s,
        )
        return None if kept is None else new + max(0, last.prompt_tokens - kept)

    def _followed(self, body: Body, history: History, tags: CallTags) -> tuple[CallTags, bool]:
        """Say which conversation a call continues: (tags, whether it is nobody's).

        Nobody knows whether a first call will be continued. One that offers tools probably
        will: it is an agent's, and kept. Others are kept from their second call on.
        """
        known = self._services.conversations.session_of(history)
        if known is not None:
            return CallTags(session_id=known), False
        if body.get("tools"):
            return dataclasses.replace(tags, retain_s=None), False
        return tags, True

    def _place(
        self, asked: CallRequest, tags: CallTags, caller: Caller
    ) -> tuple[str, SessionEntry | None]:
        """Return what the call is placed by, and what is known of whom it continues."""
        sessions = self._services.sessions
        continued = asked.continues
        kept = None if continued is None else sessions.get(answer_key(continued, caller.tenant))
        if kept is not None:
            return kept.root, kept
        entry = sessions.get(tags.session_id)
        return sessions.root_of(tags.session_id, tags.parent_id), entry

    def _end_wait(self, call: CallInput) -> None:
        ended = self._services.forecast.ends(
            call.tags.session_id, num_answers=call.asked.num_answers, now_s=call.started_s
        )
        if ended is not None:
            self._services.events.emit(
                WaitEnded(
                    request=call.request,
                    tenant=call.caller.label,
                    tool_names=ended.tool_names,
                    seconds=ended.seconds,
                    expect_s=ended.expect_s,
                )
            )

    async def _snapshot_with(self, model: str | None) -> Snapshot:
        """Return a snapshot; the engines are asked again when none is known to serve it."""
        snapshot = self._services.snapshot()
        if model is None or any(model in engine.models for engine in snapshot.engines):
            return snapshot
        await self._services.pool.refresh_models()
        return self._services.snapshot()


async def _let_in(gate: Gate, arrival: Arrival, answer: ClientAnswer, ping_s: float) -> float:
    """Wait until a call's session may come in; returns for how many seconds it was."""
    waits = gate.ask(arrival)
    if waits is None:
        return 0.0
    async with answer.pinged(ping_s):
        return await waits


def tags_of(
    headers: Mapping[str, str],
    body: Body,
    request_id: str,
    tenant: str | None,
    *,
    own_header: str,
) -> tuple[CallTags, bool]:
    """Read what the client says about the call: (tags, whether it named no session).

    Args:
        headers: the client's headers with lower-case names.
        body: of the request.
        request_id: minted by the router.
        tenant: whose call it is.
        own_header: ``session_header`` in lower case.

    Raises:
        ApiError: 400, when it says something impossible.
    """
    values: dict[str, Any] = {name: member.value for name, member in body.members.items()}
    try:
        identity = identify(headers, values, own_header=own_header)
        if identity is None:
            # Never a fingerprint of the content: two users who begin alike are not one.
            session_id = check_session_id(f"anonymous-{request_id}")
            return CallTags(session_id=session_id, retain_s=0.0), True
        tags = tags_from_headers(headers, identity)
    except ProtocolError as error:
        raise invalid(f"{error}.", param=error.field) from error
    if tenant is None:
        return tags, False
    parent = tags.parent_id
    return dataclasses.replace(
        tags,
        session_id=namespaced(tags.session_id, tenant=tenant),
        parent_id=None if parent is None else namespaced(parent, tenant=tenant),
    ), False
