"""HTTP handlers: from a request to a call, and the small endpoints beside it."""

from __future__ import annotations

import dataclasses
import ipaddress
import math
from collections.abc import Awaitable, Callable
from typing import Final

from aiohttp import web

from turncache.protocol import MAX_RETAIN_S
from turncache_server.control.messages import Signal, session_digest
from turncache_server.router import metrics
from turncache_server.router.apis import APIS, errors_of
from turncache_server.router.apis.api import Api
from turncache_server.router.body import Body
from turncache_server.router.calls import CLIENT_GONE, PlannedCall
from turncache_server.router.config import EngineConfig
from turncache_server.router.errors import SERVER_ERROR, ApiError, LegFailed, invalid
from turncache_server.router.events import CallRefused, PassedOn
from turncache_server.router.gate import Gate
from turncache_server.router.intake import Intake, tags_of
from turncache_server.router.keys import Caller
from turncache_server.router.legs import ANSWER_HEADERS, TRACE_HEADERS, forwarded
from turncache_server.router.limits import continue_later, read_body
from turncache_server.router.metrics import Metrics
from turncache_server.router.place import rank
from turncache_server.router.plan import Readiness, Side
from turncache_server.router.pressure import BackPressure
from turncache_server.router.services import Services
from turncache_server.router.signals import holders, send_signal
from turncache_server.router.stream import ClientAnswer, ClientGone
from turncache_server.router.turns import Turns

#: Key of a request under which the middleware leaves its id.
REQUEST_ID: Final = web.RequestKey("turncache_request_id", str)
#: Likewise, who makes the request.
CALLER: Final = web.RequestKey("turncache_caller", Caller)
_MAX_LISTED: Final = 1000

#: What one engine answers without a plan: nothing is generated.
PASSED_ON: Final = (
    "/v1/embeddings",
    "/v1/messages/count_tokens",
    "/tokenize",
    "/detokenize",
)

#: What may be said of a session between two calls (the kinds of signals that engines know).
NOTICES: Final = ("wait", "resume", "final", "compaction", "cancel")


class Handlers:
    """The endpoints.

    Args:
        services: what every call uses.
        metrics: rendered by ``/metrics``.
    """

    def __init__(self, services: Services, metrics: Metrics) -> None:
        self._services = services
        self._metrics = metrics
        self._intake = Intake(services)
        self._turns = Turns()

    def routes(self) -> list[web.RouteDef]:
        """Return the allow-list: every other path is 404, vLLM has some that change weights."""
        later = {"expect_handler": continue_later}
        routes = [
            *(web.post(api.path, self._planned(api), name=api.name, **later) for api in APIS),
            *(web.post(path, self.pass_on, **later) for path in self._passed_on()),
            web.post("/v1/sessions", self.notice, name="sessions", **later),
            web.get("/v1/sessions", self.sessions),
            web.get("/v1/models", self.models, name="models"),
            web.get("/v1/calls/{request_id}", self.call_record, name="calls"),
            web.get("/health", self.health, name="health"),
            web.get("/metrics", self.metrics, name="metrics"),
        ]
        if self._services.config.admin:
            routes.append(web.post("/admin/return", self.switch_return, name="admin", **later))
        return routes

    def _passed_on(self) -> tuple[str, ...]:
        """Return the paths that need no plan; what is served otherwise is not among them."""
        served = {api.path for api in APIS} | {"/v1/sessions", "/admin/return"}
        paths = dict.fromkeys((*PASSED_ON, *self._services.config.other_paths))
        return tuple(path for path in paths if path not in served)

    def _planned(self, api: Api) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        async def serve(request: web.Request) -> web.StreamResponse:
            with self._services.in_flight.one_more(request[CALLER].tenant):
                return await self._serve(api, request)

        return serve

    async def _serve(self, api: Api, request: web.Request) -> web.StreamResponse:
        """Serve a call of a planned API."""
        services = self._services
        started_s = services.clock()
        await self._turns.come()
        headers = self._headers(request)
        body = Body.parse(await self._json_body(request), max_depth=services.config.max_body_depth)
        answer = ClientAnswer(request, api.errors, stall_s=services.config.client_stall_s)
        try:
            call, plan = await self._intake.planned(
                api,
                body,
                headers=headers,
                caller=request[CALLER],
                request_id=request[REQUEST_ID],
                started_s=started_s,
                answer=answer,
            )
            return await PlannedCall(services, call, plan, answer).run()
        except ApiError as error:
            if not answer.started:
                raise
            # A stream that was kept alive while it waited to be let in.
            services.events.emit(
                CallRefused(
                    api=api.name,
                    code=error.status,
                    request=request[REQUEST_ID],
                    why=error.code or error.kind,
                )
            )
            return await _failed(answer, error)
        finally:
            if services.gate is not None:
                services.gate.left(request[REQUEST_ID])

    async def pass_on(self, request: web.Request) -> web.Response:
        """Serve what needs no plan: one engine's answer, in one piece."""
        services, started_s = self._services, self._services.clock()
        body = Body.parse(await self._json_body(request), max_depth=services.config.max_body_depth)
        headers = {**self._engine_headers(request), "content-type": "application/json"}
        clean = body.edited(put={})
        engines = self._serving_engines(body.get("model"), request[REQUEST_ID])
        for engine in engines:
            try:
                leg = await services.upstream.post(engine, request.path, clean, lambda: headers)
                async with leg:
                    first = await leg.first_chunk()
                    whole = await leg.rest(first, services.config.max_answer_bytes)
            except LegFailed as failure:
                services.pool.failed(engine.name, failure.kind)
                if failure.consumed:
                    raise failure.to_api_error(services.config.retry_after_s) from failure
                continue
            if leg.status == 503 and engine is not engines[-1]:
                continue  # it has too much to do, and has done nothing
            services.events.emit(
                PassedOn(
                    request=request[REQUEST_ID],
                    api=request.path.rpartition("/")[2],
                    engine=engine.name,
                    code=leg.status,
                    total_s=services.clock() - started_s,
                )
            )
            return web.Response(status=leg.status, body=whole, headers=leg.headers(ANSWER_HEADERS))
        raise self._no_engine()

    async def notice(self, request: web.Request) -> web.Response:
        """Serve ``POST /v1/sessions``: what a client says of a session between two calls."""
        services = self._services
        empty = Body.parse(b"{}", max_depth=4)
        tags, anonymous = tags_of(
            self._headers(request),
            empty,
            "",
            request[CALLER].tenant,
            own_header=services.config.session_header.lower(),
        )
        if anonymous:
            raise invalid("X-Session-ID: a notice is about a session; name it.", param="session")
        body = Body.parse(await self._json_body(request), max_depth=4)
        kind, expect_s = body.get("notice"), body.get("expect_s")
        if kind not in NOTICES:
            raise invalid(f"notice: expected one of {', '.join(NOTICES)}.", param="notice")
        if expect_s is not None and (
            isinstance(expect_s, bool)
            or not isinstance(expect_s, (int, float))
            or not 0 <= expect_s < math.inf
        ):
            raise invalid("expect_s: expected seconds from 0.", param="expect_s")
        entry = services.sessions.get(tags.session_id)
        root = services.sessions.root_of(tags.session_id, tags.parent_id)
        names = holders(self._services.snapshot(), root, None if entry is None else entry.served_by)
        if kind == "final":
            services.sessions.forget(tags.session_id)
            services.forecast.forget(tags.session_id)
        elif kind == "wait":
            services.forecast.expects(tags.session_id, expect_s)
        if services.gate is not None and (
            kind == "final" or (kind == "wait" and (expect_s or 0) >= MAX_RETAIN_S)
        ):
            services.gate.forget(tags.session_id)
        self._time_prompt(tags.session_id, kind, expect_s)
        signal = Signal(session=tags.session_id, kind=kind, expect_s=expect_s)
        reply = await send_signal(services, names, signal)
        return web.json_response(
            {"accepted": reply.accepted, "clipped_s": reply.clipped_s, "why": reply.why or None},
            status=202,
        )

    def _time_prompt(self, session: str, kind: str, expect_s: float | None) -> None:
        """Let a prompt that is to be sent ahead follow what the client says of the wait."""
        prompts, ahead_s = self._services.next_prompts, self._services.config.warm_ahead_s
        if kind != "wait" or (expect_s is not None and not ahead_s < expect_s < MAX_RETAIN_S):
            # It is back, its history changes, or nobody waits for it for so long.
            prompts.drop(session)
        elif expect_s is not None:
            prompts.move(session, expect_s - ahead_s)

    async def sessions(self, request: web.Request) -> web.Response:
        """Serve ``GET /v1/sessions``: the latest sessions, by hash, for an admin."""
        self._check_admin(request)
        table = self._services.sessions
        listed = [
            {
                "session": session_digest(name),
                "served_by": entry.served_by,
            }
            for name, entry in table.newest(_MAX_LISTED)
        ]
        found: dict[str, object] = {"num_sessions": len(table), "sessions": listed}
        if self._services.gate is not None:
            found["admission"] = _admission(self._services.gate)
        if (pressure := self._services.pressure) is not None:
            prefill = self._services.snapshot().of_side(Side.PREFILL)
            found["handover"] = [_handover(pressure, engine.name) for engine in prefill]
        return web.json_response(found)

    async def models(self, request: web.Request) -> web.Response:
        """Serve ``GET /v1/models`` from an engine that answers clients."""
        for engine in self._serving_engines(key=request[REQUEST_ID]):
            try:
                status, body = await self._services.upstream.get(
                    engine,
                    "/v1/models",
                    self._engine_headers(request),
                    timeout_s=self._services.config.health_timeout_s,
                )
            except LegFailed as failure:
                self._services.pool.failed(engine.name, failure.kind)
                continue
            return web.Response(status=status, body=body, content_type="application/json")
        raise self._no_engine()

    async def call_record(self, request: web.Request) -> web.Response:
        """Serve ``GET /v1/calls/{request_id}``."""
        record = self._services.records.get(request.match_info["request_id"])
        caller = request[CALLER]
        if record is None or not (caller.admin or record.tenant == caller.tenant):
            raise ApiError(
                404,
                "No call with this id is on record. The id is the X-Request-Id of the call's "
                f"answer; the last {self._services.config.max_calls} calls are kept.",
                code="call_not_found",
            )
        return web.json_response(record.to_dict())

    async def health(self, _: web.Request) -> web.Response:
        """Serve ``GET /health``: 200 when calls can be served, if only some by a policy."""
        snapshot = self._services.snapshot()
        sides = {
            side.value: {
                "live": sum(engine.live for engine in snapshot.of_side(side)),
                "engines": len(snapshot.of_side(side)),
                "pulling": sum(engine.pulls and engine.told for engine in snapshot.of_side(side)),
            }
            for side in snapshot.needed_sides
        }
        draining = self._services.switches.draining
        able = not draining and snapshot.readiness is not Readiness.UNAVAILABLE
        word = "draining" if draining else snapshot.readiness.value
        return web.json_response(
            {"status": word, "sides": sides, "return_enabled": snapshot.return_enabled},
            status=200 if able else 503,
        )

    async def metrics(self, _: web.Request) -> web.Response:
        """Serve ``GET /metrics``."""
        return web.Response(
            body=self._metrics.render(), headers={"content-type": metrics.CONTENT_TYPE}
        )

    async def switch_return(self, request: web.Request) -> web.Response:
        """Serve ``POST /admin/return``, from loopback only."""
        self._check_admin(request)
        body = Body.parse(await self._json_body(request), max_depth=4)
        enabled = body.get("enabled")
        if not isinstance(enabled, bool):
            raise invalid('enabled: expected {"enabled": true} or false.', param="enabled")
        self._services.switches.return_enabled = enabled
        return web.json_response({"return_enabled": enabled})

    def _headers(self, request: web.Request) -> dict[str, str]:
        """Return the headers by lower-case names; keys of ours are for nobody else."""
        headers = {name.lower(): value for name, value in request.headers.items()}
        if self._services.keys is not None:
            headers.pop("authorization", None)
        return headers

    def _check_admin(self, request: web.Request) -> None:
        if self._services.keys is None and not _from_loopback(request):
            raise ApiError(
                403,
                "Without keys admin endpoints answer on loopback only, and to no proxy.",
                code="forbidden",
            )
        if self._services.keys is not None and not request[CALLER].admin:
            raise ApiError(403, "This needs an admin's key.", code="forbidden")

    def _serving_engines(self, model: object = None, key: str = "") -> list[EngineConfig]:
        """Return the engines that answer clients: the live ones, or all when none is.

        Args:
            model: that is asked for: those that serve it, where one is known to.
            key: spreads requests: another one for each.
        """
        snapshot = self._services.snapshot()
        side = Side.SINGLE if Side.SINGLE in snapshot.needed_sides else Side.DECODE
        engines = snapshot.of_side(side)
        live = [engine for engine in engines if engine.live] or engines
        able = [engine for engine in live if isinstance(model, str) and model in engine.models]
        names = [engine.name for engine in able or live]
        return [self._services.pool.config_of(name) for name in rank(key, names)]

    def _engine_headers(self, request: web.Request) -> dict[str, str]:
        client = self._headers(request)
        headers = forwarded(client)
        if self._services.config.pass_trace_context:
            headers |= forwarded(client, TRACE_HEADERS)
        if self._services.engine_key is not None:
            headers["authorization"] = f"Bearer {self._services.engine_key}"
        return headers

    def _no_engine(self) -> ApiError:
        return ApiError(
            503,
            "No engine that answers clients can be reached at present. Try again.",
            kind=SERVER_ERROR,
            code="no_engine",
            retry_after_s=self._services.config.retry_after_s,
        )

    async def _json_body(self, request: web.Request) -> bytes:
        """Read a body within its limit.

        Raises:
            ApiError: 408, 413 or 415.
        """
        if request.content_type != "application/json":
            # Also what keeps a web page from posting here: this type needs a preflight.
            sent = repr(request.content_type) if "content-type" in request.headers else "missing"
            raise ApiError(415, f"content-type: {sent}: expected 'application/json'.")
        encoding = request.headers.get("content-encoding", "identity")
        if encoding.lower() != "identity":
            raise ApiError(415, f"content-encoding: {encoding[:40]!r}: expected 'identity'.")
        config = self._services.config
        return await read_body(
            request, max_bytes=config.max_body_bytes, timeout_s=config.body_timeout_s
        )


def _admission(gate: Gate) -> dict[str, object]:
    """Return the working set, and who waits to be let in: for how long, and of which tenant."""
    state = dataclasses.asdict(gate.state())
    queues = gate.queues()
    return {
        **state,
        "longest_wait_s": max((queue.longest_wait_s for queue in queues), default=0.0),
        "tenants": [queue._asdict() for queue in queues],
    }


def _handover(pressure: BackPressure, engine: str) -> dict[str, object]:
    """Return what is on its way from a prefill engine, and who waits for it."""
    state = dataclasses.asdict(pressure.state(engine))
    return {"engine": engine, **state, "longest_wait_s": pressure.longest_wait_s(engine)}


async def _failed(answer: ClientAnswer, error: ApiError) -> web.StreamResponse:
    try:
        return await answer.fail(error)
    except ClientGone:
        return web.Response(status=CLIENT_GONE)


def error_response(path: str, error: ApiError) -> web.Response:
    """Make the answer for an error of the router's own, in the shape of the path's API."""
    headers = {}
    if error.retry_after_s is not None:
        headers["retry-after"] = f"{error.retry_after_s:g}"
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    return web.Response(
        status=error.status,
        body=errors_of(path).body(error),
        content_type="application/json",
        headers=headers,
    )


def credential_of(request: web.Request) -> str | None:
    """Return the key that a request carries, None without one.

    Raises:
        ApiError: 401, when it carries two that differ.
    """
    given = {
        value.removeprefix("Bearer ").strip()
        for value in request.headers.getall("authorization", ())
    }
    given.update(request.headers.getall("x-api-key", ()))
    if len(given) > 1:
        raise unauthorized("Two keys that differ: send one.")
    return given.pop() if given else None


def unauthorized(message: str) -> ApiError:
    """Make the error for a request without a key that counts."""
    return ApiError(401, message, kind="authentication_error", code="invalid_api_key")


#: Headers by which a proxy says that it asks for somebody else.
_OF_PROXIES: Final = ("forwarded", "via", "x-forwarded-for", "x-real-ip")


def _from_loopback(request: web.Request) -> bool:
    # The address of the connection, never one in a header: those are the client's to choose. But
    # behind a proxy on this machine everybody comes from loopback.
    if any(name in request.headers for name in _OF_PROXIES):
        return False
    peer = None if request.transport is None else request.transport.get_extra_info("peername")
    return isinstance(peer, tuple) and ipaddress.ip_address(peer[0]).is_loopback
