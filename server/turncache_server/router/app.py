"""The composition root: the only place that wires the router, starts and ends it."""

from __future__ import annotations

import asyncio
import errno
import functools
import gc
import logging
import os
import secrets
import signal
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import uvloop
from aiohttp import web

from turncache.errors import ConfigError
from turncache.protocol import CALL_HEADER, PROTOCOL_VERSION, REQUEST_ID_HEADER
from turncache_server.control.client import AsyncControlClient
from turncache_server.router.admission import Admission
from turncache_server.router.apis import APIS
from turncache_server.router.background import Background
from turncache_server.router.checks import engine_key, without_effect
from turncache_server.router.config import RouterConfig, fleet_keys
from turncache_server.router.engines_file import engines_followed
from turncache_server.router.engines_kubernetes import kubernetes_followed
from turncache_server.router.errors import SERVER_ERROR, ApiError, shutting_down
from turncache_server.router.events import CallRefused, Events, Listener
from turncache_server.router.following import Conversations
from turncache_server.router.forecast import Forecast
from turncache_server.router.gate import Gate
from turncache_server.router.handlers import (
    CALLER,
    REQUEST_ID,
    Handlers,
    credential_of,
    error_response,
    unauthorized,
)
from turncache_server.router.keys import ANYBODY, Caller, KeyFile
from turncache_server.router.limits import (
    BoundedRunner,
    InFlight,
    check_headers,
    close_unread,
    more_files,
)
from turncache_server.router.logs import Log
from turncache_server.router.metrics import Metrics
from turncache_server.router.next_prompts import NextPrompts
from turncache_server.router.outcomes import AsksControl
from turncache_server.router.plan import Side
from turncache_server.router.pool import Pool
from turncache_server.router.pressure import BackPressure, asks_decode
from turncache_server.router.records import CallRecords
from turncache_server.router.repeating import Repeats
from turncache_server.router.services import Services, Switches
from turncache_server.router.sessions import SessionTable
from turncache_server.router.shared import shared_waits, waits_shared
from turncache_server.router.tls import ServerCertificate
from turncache_server.router.traces import Traces, otlp_traces
from turncache_server.router.untaken import Prompts
from turncache_server.router.upstream import Upstream

logger = logging.getLogger(__name__)

_API_NAMES: Final = frozenset(api.name for api in APIS)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

#: The HTTP parser's own limits lie a little above ours, so that the answer is ours.
_PARSER_SLACK: Final = 2
#: Objects made, beyond those freed, before the garbage collector looks at the young ones: a call
#: makes hundreds, and next to none of them in cycles.
_GC_THRESHOLD: Final = 10_000
#: What to change when an address cannot be listened on, by the system's error.
_WAYS_OUT: Final = {
    errno.EADDRINUSE: ("port", "choose a free port"),
    errno.EACCES: ("port", "choose one above 1023, which an ordinary user may take"),
}
#: Fewer open files than a thousand streams need, each with a client, an engine and an idle one.
_FEW_FILES: Final = 4096
#: Agents come in bursts; a connection that does not fit waits a second for its next try.
_BACKLOG: Final = 4096


class Router:
    """A router that is serving.

    Attributes:
        url: base URL, without ``/v1``.
        config: its settings.
    """

    def __init__(self, url: str, services: Services) -> None:
        self.url = url
        self.config = services.config
        self._services = services

    @property
    def return_enabled(self) -> bool:
        """Whether prefill is told to pull from decode."""
        return self._services.switches.return_enabled

    @return_enabled.setter
    def return_enabled(self, enabled: bool) -> None:
        self._services.switches.return_enabled = enabled


@asynccontextmanager
async def serving(
    config: RouterConfig,
    *,
    listeners: Sequence[Listener] = (),
    clock: Callable[[], float] = time.monotonic,
    new_id: Callable[[], str] = lambda: secrets.token_hex(16),
    traces: Traces | None = None,
    kubernetes: Any | None = None,
    hurry: asyncio.Event | None = None,
) -> AsyncIterator[Router]:
    """Serve on the configured address for the length of the block, then drain.

    Args:
        config: the settings; port 0 lets the system choose.
        listeners: told every event, beside log and metrics.
        clock: monotonic seconds.
        new_id: makes the ids of calls.
        traces: makes the spans, instead of what the settings say.
        kubernetes: client of the API that ``kubernetes_selector`` asks, instead of the pod's.
        hurry: set to end the drain before its time.

    Raises:
        ConfigError: the address cannot be bound, a setting names a variable that there is not,
            the fleet's secret or Redis' URL cannot be used, or a package is missing.
    """
    sessions = SessionTable(config.max_sessions)
    metrics = Metrics(lambda: len(sessions))
    forecast = Forecast(config.max_sessions)
    shared = shared_waits(config, forecast.learn)
    traces = traces or otlp_traces(config)
    own = [each for each in (Log(), metrics, shared, traces) if each is not None]
    events = Events((*own, *listeners))
    own_key = engine_key(config)
    keys = fleet_keys(config)
    upstream = Upstream(config)
    control = AsyncControlClient(keys)
    pool = Pool(config, upstream, control, events=events, clock=clock, engine_key=own_key)
    gate = _gate(config, pool, events, clock)
    if gate is not None:
        metrics.watch(gate.state)
    switches, background = Switches(return_enabled=config.return_enabled), Background()
    pressure = _pressure(config, pool, control, events=events, background=background, clock=clock)
    services = Services(
        config=config,
        switches=switches,
        pool=pool,
        upstream=upstream,
        control=control,
        sessions=sessions,
        conversations=Conversations(config.max_sessions),
        forecast=forecast,
        next_prompts=NextPrompts(config.max_ahead_bytes),
        records=CallRecords(config.max_calls),
        events=events,
        background=background,
        clock=clock,
        new_id=new_id,
        engine_key=own_key,
        keys=KeyFile(Path(config.keys_file), clock) if config.keys_file else None,
        in_flight=InFlight(config.max_tenant_calls, config.retry_after_s),
        repeats=Repeats(
            config,
            control,
            events=events,
            background=background,
            snapshot=lambda: pool.snapshot(return_enabled=switches.return_enabled),
        ),
        gate=gate,
        pressure=pressure,
        traces=traces,
    )
    if pressure is not None:
        metrics.watch_prompts(functools.partial(_prompts, pressure, services))
    edge = _Edge(services)
    runner = BoundedRunner(
        _application(services, metrics, edge),
        header_timeout_s=config.header_timeout_s,
        keepalive_timeout=config.keep_alive_s,
        access_log=None,
        handler_cancellation=True,
        auto_decompress=False,
        shutdown_timeout=1.0,
        max_line_size=_PARSER_SLACK * config.max_header_bytes,
        max_field_size=_PARSER_SLACK * config.max_header_bytes,
        max_headers=_PARSER_SLACK * config.max_headers,
    )
    try:
        await runner.setup()
        await services.pool.start()
        site = await _listen(runner, config, clock)
        router = Router(_url(runner, config), services)
        logger.info("router listens on %s", router.url)
        for sentence in without_effect(config):
            logger.warning("%s", sentence)
        async with (
            engines_followed(config, services.pool, events),
            kubernetes_followed(config, services.pool, events, kubernetes),
            waits_shared(shared, events, config.redis_interval_s),
        ):
            try:
                yield router
            finally:
                services.switches.draining = True
                if gate is not None:
                    gate.close()
                await site.stop()
                await edge.drain(config.shutdown_s, hurry or asyncio.Event())
    finally:
        await runner.cleanup()
        services.next_prompts.close()
        await services.background.close(1.0)
        await services.pool.close()
        await control.close()
        await upstream.close()
        if traces is not None:
            await traces.close()


def _gate(
    config: RouterConfig, pool: Pool, events: Events, clock: Callable[[], float]
) -> Gate | None:
    """Make what new sessions wait at, None when they never do."""
    if not config.admission:
        return None

    def fits() -> int | None:
        if config.admission_tokens:
            return config.admission_tokens
        kept = pool.kept_tokens()
        return None if kept is None else int(config.admission_share * kept)

    core = Admission(
        idle_s=config.admission_idle_s,
        wait_s=config.admission_wait_s,
        max_waiting=config.admission_max_waiting,
    )
    return Gate(core, fits=fits, clock=clock, events=events, retry_after_s=config.retry_after_s)


def _pressure(
    config: RouterConfig,
    pool: Pool,
    control: AsksControl,
    *,
    events: Events,
    background: Background,
    clock: Callable[[], float],
) -> BackPressure | None:
    """Make what holds prompts back while decode is behind, None when nothing does."""
    if not config.handover_share:
        return None

    def limit(engine: str) -> int | None:
        tokens = pool.prefill_tokens(engine)
        return None if tokens is None else int(config.handover_share * tokens)

    return BackPressure(
        limit=limit,
        taken=asks_decode(control, pool.control_of, config.control_timeout_s),
        wait_s=config.handover_wait_s,
        clock=clock,
        events=events,
        background=background,
    )


def _prompts(pressure: BackPressure, services: Services) -> dict[str, Prompts]:
    """Return what is on its way from each prefill engine."""
    engines = services.snapshot().of_side(Side.PREFILL)
    return {engine.name: pressure.state(engine.name) for engine in engines}


def run(config: RouterConfig, *, ready: Callable[[str], None] | None = None) -> None:
    """Serve until SIGTERM, SIGINT or SIGHUP, then drain and return; a second one ends the drain.

    On uvloop, whose reads and writes take half the time of asyncio's own; nothing here
    depends on it.

    Args:
        config: the settings.
        ready: called with the base URL once the router serves.
    """
    num_files = more_files()
    if num_files < _FEW_FILES:
        logger.warning(
            "this process may have %d open files, and a call needs up to three: raise the hard "
            "limit (ulimit -Hn, LimitNOFILE=)",
            num_files,
        )
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_run(config, ready))


async def _run(config: RouterConfig, ready: Callable[[str], None] | None) -> None:
    stop, hurry = asyncio.Event(), asyncio.Event()

    def told() -> None:
        (hurry if stop.is_set() else stop).set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        # Under nohup it is to outlive its terminal.
        if number is not signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
            loop.add_signal_handler(number, told)
    async with serving(config, hurry=hurry) as router:
        # What has been loaded stays: a collection that walks it in the middle of a call is felt.
        gc.collect()
        gc.freeze()
        gc.set_threshold(_GC_THRESHOLD)
        if ready is not None:
            ready(router.url)
        await stop.wait()
        logger.info("router drains for at most %g s", config.shutdown_s)


class _Edge:
    """The middleware: ids, limits, errors in the shape of the API; and who is being served."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._active: set[asyncio.Task[object]] = set()
        self._idle = asyncio.Event()
        self._idle.set()

    async def drain(self, timeout_s: float, hurry: asyncio.Event) -> None:
        """Wait until the requests are answered, or it is to hurry; then cancel what is left."""
        ends = [asyncio.create_task(event.wait()) for event in (self._idle, hurry)]
        await asyncio.wait(ends, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        for each in ends:
            each.cancel()
        await asyncio.gather(*ends, return_exceptions=True)
        for task in self._active:
            task.cancel()

    @web.middleware
    async def __call__(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Serve one request."""
        request[REQUEST_ID] = self._services.new_id()
        task = asyncio.current_task()
        assert task is not None
        self._active.add(task)
        self._idle.clear()
        try:
            return await self._answered(request, handler)
        finally:
            self._active.discard(task)
            if not self._active:
                self._idle.set()

    async def _answered(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            config = self._services.config
            check_headers(
                request,
                max_bytes=config.max_header_bytes,
                max_headers=config.max_headers,
                own_header=config.session_header,
            )
            request[CALLER] = self._caller(request)
            self._check_draining(request)
            return await handler(request)
        except ApiError as error:
            return self._refused(request, error)
        except web.HTTPException as error:
            answer = self._refused(request, _http_error(request, error))
            if (allowed := error.headers.get("allow")) is not None:
                answer.headers["allow"] = allowed
            return answer
        except Exception:
            logger.exception("request %s failed", request[REQUEST_ID])
            if request.writer.output_size > 0:
                raise  # the connection breaks: the client must not take it for an end
            return self._refused(
                request,
                ApiError(500, "The router failed on this request.", kind=SERVER_ERROR),
            )

    def _caller(self, request: web.Request) -> Caller:
        keys = self._services.keys
        # Balancers ask for health without a key, and learn nothing but counts.
        if keys is None or request.path == "/health":
            return ANYBODY
        key = credential_of(request)
        if key is None:
            raise unauthorized("A key is missing: send Authorization: Bearer KEY.")
        caller = keys.caller_of(key)
        if caller is None:
            raise unauthorized("The key is not known here.")
        return caller

    def _check_draining(self, request: web.Request) -> None:
        if self._services.switches.draining and request.path not in ("/health", "/metrics"):
            raise shutting_down(self._services.config.retry_after_s)

    def _refused(self, request: web.Request, error: ApiError) -> web.Response:
        name = request.match_info.route.name
        api = name if name in _API_NAMES else "other"
        self._services.events.emit(
            CallRefused(
                api=api,
                code=error.status,
                request=request[REQUEST_ID],
                why=error.code or error.kind,
            )
        )
        if error.status == 503 and error.retry_after_s is None:
            error.retry_after_s = self._services.config.retry_after_s
        answer = error_response(request.path, error)
        close_unread(request, answer)
        return answer


def _http_error(request: web.Request, error: web.HTTPException) -> ApiError:
    if error.status == 404:
        message = f"No such path: {request.path[:200]!r}. This router serves a fixed list."
        if not request.path.startswith("/v1/"):
            message += " The APIs are below /v1: does the client's base URL end in it?"
    elif error.status == 405:
        message = f"{request.method} is not allowed on {request.path[:200]!r}."
    else:
        message = error.reason
    return ApiError(error.status, message, code="not_found" if error.status == 404 else None)


def _application(services: Services, metrics: Metrics, edge: _Edge) -> web.Application:
    app = web.Application(middlewares=[edge.__call__])
    app.add_routes(Handlers(services, metrics).routes())
    app.on_response_prepare.append(_mark)
    return app


async def _mark(request: web.Request, response: web.StreamResponse) -> None:
    response.headers["server"] = "turncache"
    if REQUEST_ID in request:
        response.headers[CALL_HEADER] = f"v={PROTOCOL_VERSION}"
        response.headers[REQUEST_ID_HEADER] = request[REQUEST_ID]


async def _listen(
    runner: web.AppRunner, config: RouterConfig, clock: Callable[[], float]
) -> web.TCPSite:
    tls = _tls(config, clock)
    site = web.TCPSite(runner, config.host, config.port, backlog=_BACKLOG, ssl_context=tls)
    try:
        await site.start()
    except OSError as error:
        # asyncio's own text says the address once more; names that are unknown have no errno.
        number = error.errno or 0
        why = os.strerror(number) if number > 0 else error.strerror or error
        setting, way_out = _WAYS_OUT.get(number, ("host", "name an address of this machine"))
        raise ConfigError(
            setting, f"cannot listen on {config.host}:{config.port}: {why}; {way_out}"
        ) from error
    if not (config.private or config.keys_file):
        logger.warning(
            "the router listens on %s without keys: whoever reaches it can use the engines",
            config.host,
        )
    return site


def _url(runner: web.AppRunner, config: RouterConfig) -> str:
    port = runner.addresses[0][1]
    host = f"[{config.host}]" if ":" in config.host else config.host
    return f"http{'s' if config.tls_cert_file else ''}://{host}:{port}"


def _tls(config: RouterConfig, clock: Callable[[], float]) -> ssl.SSLContext | None:
    if not config.tls_cert_file:
        return None
    files = Path(config.tls_cert_file), Path(config.tls_key_file)
    return ServerCertificate(*files, clock).context
