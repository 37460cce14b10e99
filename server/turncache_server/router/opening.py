"""A call up to the first byte of its answer: the legs, in order, and their retries.

Another engine of the side is tried only when nothing was consumed by the last one: its
connection was refused, or it answered 503. What may have been consumed is not repeated:
the client decides, and its next try is a call of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Final, TypeVar

import msgspec

from turncache.protocol import CallTags, Cause, EngineHints
from turncache_server.router.apis.api import Api, CallRequest
from turncache_server.router.body import Body
from turncache_server.router.errors import EngineRefused, LegFailed
from turncache_server.router.events import LegFailure, LegStarted
from turncache_server.router.following import History
from turncache_server.router.keys import ANYBODY, Caller
from turncache_server.router.legs import (
    ANSWER_HEADERS,
    TRACE_HEADERS,
    forwarded,
    leg_headers,
    prefill_body,
    serving_body,
    transfer_params,
)
from turncache_server.router.plan import CallPlan, EngineView
from turncache_server.router.repeating import Watch
from turncache_server.router.services import Services
from turncache_server.router.upstream import EngineAnswer

T = TypeVar("T")

#: Largest body that is made before it can be sent: each waits in memory while prefill works.
_MAX_READY_BYTES: Final = 256 * 1024
#: Time for the end of a body whose last event has come.
_END_S: Final = 1.0


class CallInput(msgspec.Struct, frozen=True, kw_only=True):
    """One request, read and checked.

    Attributes:
        request: id of the call, minted by the router.
        api: the API that was called.
        asked: what the router reads of the request.
        tags: what the client said, with the namespaced session and parent.
        anonymous: the client named no session, and the router knows none.
        history: digests of the messages, None where nobody needs them.
        followed: the client named no session: its conversation is followed.
        root: namespaced id that the session is placed by.
        headers: the client's headers with lower-case names.
        started_s: when the request arrived.
        caller: whose call it is.
        salt: ``cache_salt`` of the call, None to leave the client's.
        queued_s: for which it waited to be let in.
        continues: an earlier call of its session may have left KV.
        warmed: its prompt was sent ahead, but for the results of tools that it brings.
        return_enabled: the switch at that moment.
    """

    request: str
    api: Api
    body: Body
    asked: CallRequest
    tags: CallTags
    anonymous: bool
    root: str
    headers: Mapping[str, str]
    started_s: float
    return_enabled: bool
    history: History | None = None
    followed: bool = False
    caller: Caller = ANYBODY
    salt: str | None = None
    queued_s: float = 0.0
    continues: bool = False
    warmed: bool = False


class Opened(msgspec.Struct, frozen=True, kw_only=True):
    """An answer that has begun.

    Attributes:
        engine: the engine that gives it.
        leg: its answer, to be closed by whoever holds this.
        first: the first bytes of its body.
    """

    engine: EngineView
    leg: EngineAnswer
    first: bytes


class Opening:
    """Runs a call's legs up to the first byte.

    Args:
        services: what every call uses.
        call: the request.
        plan: its plan.
        prefilled: called with the engine whose prefill leg has been answered.

    Attributes:
        engine_s: seconds in which an engine was working on the call.
        held_back_s: seconds that its prompt waited because decode was behind.
        prefill_s: seconds of the prefill leg and its repeats, None without one.
        num_repeats: how often the prefill leg was sent again.
    """

    def __init__(
        self,
        services: Services,
        call: CallInput,
        plan: CallPlan,
        prefilled: Callable[[EngineView], None],
    ) -> None:
        self._services = services
        self._call = call
        self._plan = plan
        self._prefilled = prefilled
        self._num_attempts = 0
        self._held: bytes | None = None
        self._tokens = call.body.likely_tokens
        self._source: EngineView | None = None
        # Of which source and promise it is, and the body.
        self._ready: tuple[tuple[str, bool], bytes] | None = None
        self.engine_s = 0.0
        self.held_back_s = 0.0
        self.prefill_s: float | None = None
        self.num_repeats = 0
        self._watch: Watch | None = None
        self._drains: asyncio.Task[None] | None = None

    async def run(self) -> Opened:
        """Run the legs.

        Raises:
            LegFailed: no engine of a side gave a usable answer.
            EngineRefused: an engine answered with an error.
        """
        if not self._plan.prefill:
            return await self._first_that_answers(
                "single", self._plan.serve, lambda engine: self._serve(engine, "single", None)
            )
        self._has_prompt(
            await self._first_that_answers("prefill", self._plan.prefill, self._prefill)
        )
        return await self._first_that_answers("decode", self._plan.serve, self._decode)

    def _has_prompt(self, engine: EngineView) -> None:
        """Take which prefill engine has computed the prompt last."""
        self._source = engine
        self._prefilled(engine)

    async def _first_that_answers(
        self,
        kind: str,
        engines: tuple[EngineView, ...],
        attempt: Callable[[EngineView], Awaitable[T]],
    ) -> T:
        left = list(engines[: self._services.config.max_attempts])
        while True:
            engine = left.pop(0)
            if kind == "prefill" and (waits := self._held_back(engine)) is not None:
                await self._wait(waits)
            self._tell_leg(kind, engine)
            began_s = self._services.clock()
            try:
                result = await attempt(engine)
            except LegFailed as failure:
                retried = bool(left) and not failure.consumed
                note_failure(self._services, self._call.request, engine, failure, retried)
                if not retried:
                    raise
            else:
                self._services.pool.answered(engine.name)
                return result
            finally:
                self.engine_s += self._services.clock() - began_s

    def _tell_leg(self, kind: str, engine: EngineView) -> None:
        url = self._services.pool.config_of(engine.name).url
        self._services.events.emit(
            LegStarted(request=self._call.request, engine=engine.name, kind=kind, url=url)
        )

    async def _prefill(self, engine: EngineView) -> EngineView:
        """Run the prefill leg and return its engine."""
        began_s = self._services.clock()
        hints = self._hints(
            "prefill",
            source=self._plan.source,
            also=self._plan.also,
            # While returns are on, decode keeps the session: it has the answer as well.
            retain_s=0.0 if self._call.return_enabled else self._call.tags.retain_s,
            handover=not self._plan.stock,
        )
        call = self._call
        body = prefill_body(call.api, call.body, hints, salt=call.salt)
        if not self._plan.stock and len(body) <= _MAX_READY_BYTES:
            # Runs once the request is out: decode's is ready before prefill has answered.
            asyncio.get_running_loop().call_soon(self._get_ready, engine.engine_id)
        async with await self._post(engine, "p", body) as leg:
            first = await self._checked(engine, leg)
            answer = await leg.rest(first, self._services.config.max_answer_bytes)
        collector = call.api.collector(1, False)
        collector.add(answer)
        ending = collector.ending()
        if ending.problem is not None:
            problem = f"failed to prefill: {ending.problem}"
            raise LegFailed(engine.name, "bad_answer", problem, consumed=True)
        if ending.usage is not None:
            self._tokens = ending.usage.prompt_tokens
            if self._services.pressure is not None:
                self._services.pressure.sized(call.request, self._tokens)
        if self._plan.stock:
            self._held = transfer_params(answer)
        self.prefill_s = (self.prefill_s or 0.0) + self._services.clock() - began_s
        return engine

    async def _wait(self, waits: asyncio.Future[None]) -> None:
        since_s = self._services.clock()
        try:
            await waits
        finally:
            self.held_back_s += self._services.clock() - since_s

    def _held_back(self, engine: EngineView) -> asyncio.Future[None] | None:
        """Ask whether the prompt may go to a prefill engine: what to await, None when at once."""
        pressure = self._services.pressure
        # Stock holds back by itself: a prompt's blocks are not free until decode has read them.
        if pressure is None or self._plan.stock:
            return None
        return pressure.ask(engine.name, self._call.request, self._tokens)

    async def _decode(self, engine: EngineView) -> Opened:
        """Run the decode leg up to its first byte; a prompt that is lost is prefilled again.

        Where that comes before any token, it is prefilled again until the call is over.
        """
        source = self._source
        assert source is not None, "its prefill leg has been answered"
        address = self._repeatable_at(engine)
        if address is None:
            return await self._serve(engine, "decode", source.engine_id)
        others = [each for each in self._plan.prefill if each is not source]
        self._watch = self._services.repeats.watch(
            address,
            self._call.request,
            (source, *others),
            room=lambda prefill: self._room(prefill, engine),
            repeat=self._repeat,
        )
        try:
            opened = await self._serve(engine, "decode", source.engine_id)
        except asyncio.CancelledError:
            self.left(self._drains)
            raise
        except BaseException:
            self.close()
            raise
        if not self._opens_before_a_token:
            self.close()
        return opened

    @property
    def _opens_before_a_token(self) -> bool:
        """Whether the first byte of the answer says nothing of what was computed."""
        return self._call.asked.stream and not self._call.api.opens_with_token

    def close(self) -> None:
        """Repeat nothing any more: the call is over, or decode has computed something."""
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.stop()

    def left(self, drains: asyncio.Task[None] | None) -> None:
        """Repeat nothing any more: the client has left.

        Args:
            drains: reads the decode leg to its end; None when that was cut off. It is cut off when
                decode still waits for the prompt: it holds nothing yet that an abort could harm.
        """
        watch, self._watch = self._watch, None
        if watch is None:
            return
        if drains is None:
            watch.stop()
        else:
            watch.leave(drains.cancel)
            drains.add_done_callback(lambda _: watch.stop())

    def _repeatable_at(self, engine: EngineView) -> str | None:
        """Return where a decode engine names the calls whose prompt is lost, None for nowhere."""
        if self._plan.stock or not self._services.config.repeat_prefill_s:
            return None
        address = self._services.pool.control_of(engine.name)
        heard = address is not None and self._services.repeats.hears(address)
        return address if heard else None

    async def _room(self, engine: EngineView, decode: EngineView) -> None:
        """Wait until the prompt fits on the prefill engine that is to compute it again.

        From then on it counts there. No part of ``held_back_s``: decode has the call meanwhile.
        """
        waits = self._held_back(engine)
        if waits is not None:
            try:
                await waits
            except asyncio.CancelledError:
                # Where it was it is lost, and here nobody will compute it.
                assert self._services.pressure is not None, "somebody waits"
                self._services.pressure.over(self._call.request)
                raise
        self._handed_to(decode)

    async def _repeat(self, engine: EngineView) -> bool:
        """Run the prefill leg again, beside a decode leg that waits for it."""
        self.num_repeats += 1
        self._tell_leg("repeat", engine)
        try:
            await self._prefill(engine)
        except LegFailed as failure:
            # No listener is told: a leg that fails is that of the call, and it goes on.
            if failure.engine_at_fault:
                self._services.pool.failed(engine.name, failure.kind)
            return False
        except EngineRefused:
            return False
        self._services.pool.answered(engine.name)
        self._has_prompt(engine)
        return True

    async def _serve(self, engine: EngineView, kind: str, source: str | None) -> Opened:
        """Run the serving leg up to the first byte of its answer."""
        ready, self._ready = self._ready, None
        promised = kind == "decode" and self._may_promise
        # An engine that has fallen silent since would wait for what nobody watches for.
        if ready is not None and ready[0] == (source, promised):
            body = ready[1]
        else:
            body = self._serving_body(kind, source, promised=promised)
        if source is not None:
            self._handed_to(engine)
        leg = await self._post(engine, kind[0], body)
        try:
            first = await self._checked(engine, leg)
        except asyncio.CancelledError:
            self._drains = abandon(self._services, leg)
            raise
        except BaseException:
            leg.close()
            raise
        if source is not None:
            self._begun()
        return Opened(engine=engine, leg=leg, first=first)

    def _handed_to(self, engine: EngineView) -> None:
        """Say whom to ask whether the prompt was taken, where the first byte comes too late."""
        call, pressure = self._call, self._services.pressure
        # A whole answer's comes when all of it has been generated.
        if pressure is not None and not (call.asked.stream and call.api.opens_with_token):
            pressure.sent_on(call.request, engine.name)

    def _begun(self) -> None:
        """Make room: decode has generated something. Of a response the first event says nothing."""
        if self._services.pressure is not None and not self._opens_before_a_token:
            self._services.pressure.over(self._call.request)

    def _get_ready(self, source: str) -> None:
        """Make the body of the decode leg, while prefill works."""
        if self.prefill_s is None:
            promised = self._may_promise
            body = self._serving_body("decode", source, promised=promised)
            self._ready = (source, promised), body

    @property
    def _may_promise(self) -> bool:
        """Whether whatever decode engine gets the call names it when its prompt is lost."""
        return all(map(self._repeatable_at, self._plan.serve))

    def _serving_body(self, kind: str, source: str | None, *, promised: bool) -> bytes:
        call, config = self._call, self._services.config
        hints = self._hints(kind, source=source, retain_s=call.tags.retain_s)
        if promised:
            hints = replace(
                hints, repeat_s=config.repeat_prefill_s, repeat_above=config.decode_tokens
            )
        return serving_body(call.api, call.body, hints, salt=call.salt, held=self._held)

    def _hints(
        self,
        kind: str,
        *,
        source: str | None,
        retain_s: float | None,
        also: tuple[str, ...] = (),
        handover: bool = False,
    ) -> EngineHints:
        tags = self._call.tags
        return EngineHints(
            session=tags.session_id,
            parent=tags.parent_id,
            tenant=self._call.caller.label,
            retain_s=retain_s,
            priority=tags.priority,
            source=source,
            also=also,
            handover=handover,
            call=kind,
            request=self._call.request,
            final=tags.final,
            compaction=tags.cause is Cause.COMPACTION,
            stock=self._plan.stock,
        )

    async def _post(self, engine: EngineView, kind: str, body: bytes) -> EngineAnswer:
        config = self._services.pool.config_of(engine.name)
        # Decode answers with a stream; prefill's one token is all that there is to wait for.
        limit_s = self._services.config.prefill_timeout_s if kind == "p" else None
        request = self._services.upstream.post(
            config,
            self._call.api.path,
            body,
            lambda: self._leg_headers(kind),
            limit_s=limit_s,
        )
        if self._services.config.on_disconnect == "cancel":
            return await request
        task = asyncio.ensure_future(request)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            drains = self._services.background.spawn(self._drain_task(task), "drain a leg")
            if kind == "d":
                self._drains = drains
            raise

    def _leg_headers(self, kind: str) -> dict[str, str]:
        self._num_attempts += 1
        return leg_headers(
            self._call.headers,
            session=self._call.tags.session_id,
            # An id that a client can choose, or that two attempts share, would let one
            # request end another: vLLM keys its state by it.
            request_id=f"{self._call.request}-{kind}{self._num_attempts}",
            engine_key=self._services.engine_key,
            trace=self._trace(repeats=kind == "p" and self.num_repeats > 0),
        )

    def _trace(self, *, repeats: bool) -> Mapping[str, str] | None:
        """Return the trace context of this leg: of its span, else as the client sent it."""
        if not self._services.config.pass_trace_context:
            return None
        traces = self._services.traces
        if traces is None:
            return forwarded(self._call.headers, TRACE_HEADERS)
        return traces.headers(self._call.request, repeats=repeats)

    async def _drain_task(self, task: asyncio.Future[EngineAnswer]) -> None:
        try:
            async with asyncio.timeout(self._services.config.disconnect_drain_s):
                leg = await task
        except (TimeoutError, LegFailed):
            return
        await _drain(leg, self._services.config.disconnect_drain_s)

    async def _checked(self, engine: EngineView, leg: EngineAnswer) -> bytes:
        """Return the first bytes of an answer with status 200."""
        first = await leg.first_chunk()
        if leg.status == 200 and first:
            return first
        if leg.status < 400:
            problem = "answered with nothing" if leg.status == 200 else f"answered {leg.status}"
            raise LegFailed(engine.name, "bad_answer", problem, consumed=True)
        body = await leg.rest(first, self._services.config.max_answer_bytes) if first else b""
        refusal = EngineRefused(engine.name, leg.status, leg.headers(ANSWER_HEADERS), body)
        if leg.status == 503:
            raise LegFailed(
                engine.name, "unavailable", "is overloaded", consumed=False, refusal=refusal
            )
        # Any other status shows an engine that works: nothing for the circuit breaker.
        self._services.pool.answered(engine.name)
        raise refusal


def note_failure(
    services: Services, request: str, engine: EngineView, failure: LegFailed, retried: bool
) -> None:
    """Tell pool and listeners of a leg that failed."""
    if failure.engine_at_fault:
        services.pool.failed(engine.name, failure.kind)
    services.events.emit(
        LegFailure(
            request=request,
            engine=engine.name,
            side=engine.side.value,
            kind=failure.kind,
            retried=retried,
        )
    )


def abandon(services: Services, leg: EngineAnswer) -> asyncio.Task[None] | None:
    """Give up an answer whose client has left: cut it off, or drain it, by configuration.

    Cutting it off frees the engine at once. Draining is for engines that do not survive
    aborts: the answer is read to its end, within a bound.

    Returns:
        What drains it, None when it was cut off.
    """
    if services.config.on_disconnect == "cancel":
        leg.close()
        return None
    limit_s = services.config.disconnect_drain_s
    return services.background.spawn(_drain(leg, limit_s), "drain a leg")


def finish(services: Services, leg: EngineAnswer) -> None:
    """Read the end of an answer that is complete, so that its connection serves another call."""
    services.background.spawn(_drain(leg, _END_S), "finish a leg")


async def _drain(leg: EngineAnswer, limit_s: float) -> None:
    async with leg:
        try:
            async with asyncio.timeout(limit_s):
                while await leg.chunk():
                    pass
        except (TimeoutError, LegFailed):
            return
