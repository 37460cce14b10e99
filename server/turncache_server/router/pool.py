"""The engines: which are live, what they serve, whether they pull and whether they drain.

Owner of that state, and of which engines there are. One that is taken off the list is in no
snapshot any more, and known by name only until the calls that were planned with it have
ended. An engine is live when its last health check succeeded and its circuit
is closed. A connection that is refused counts as a failed health check, and starts the next
one at once.

One that is not live gets no new calls, but what hangs on it already is not given up for one slow
answer: it is *there* until nobody listens at its address, its circuit opens, or as many checks in a
row have failed as open a circuit. An engine under pressure answers late, and that is when the
prompts on it must be bounded, and those that it has lost repeated.
"""

from __future__ import annotations

import asyncio
import json
import operator
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from http import HTTPStatus
from typing import Any, Protocol

from turncache.errors import EngineFault
from turncache_server.control.messages import Hello, HelloReply, ModeReply, Request, SetMode
from turncache_server.router.breaker import Breaker
from turncache_server.router.config import EngineConfig, RouterConfig
from turncache_server.router.errors import LegFailed
from turncache_server.router.events import (
    EngineChanged,
    EngineDrains,
    EngineLeft,
    EnginePulls,
    EngineRestarted,
    EnginesRead,
    Events,
)
from turncache_server.router.outcomes import AsksControl, R
from turncache_server.router.plan import EngineView, Side, Snapshot
from turncache_server.router.upstream import Upstream

#: Shortest time between two questions for models because a client named an unknown one.
_MODELS_REFRESH_S = 1.0


class ControlsFleet(AsksControl, Protocol):
    """The part of :class:`turncache_server.control.client.AsyncControlClient` used here."""

    def expect(self, address: str, engine_id: str) -> None:
        """Mean this engine at an address."""
        ...

    def forget(self, address: str) -> None:
        """Close the connection to an address."""
        ...


class _Engine:
    """What is known about one engine at present.

    Attributes:
        num_missed: health checks in a row that have failed; None before the first that succeeds,
            and when nobody listens at its address.
    """

    def __init__(self, config: EngineConfig, breaker: Breaker) -> None:
        self.config = config
        self.breaker = breaker
        self.healthy = False
        self.num_missed: int | None = None
        self.models: Mapping[str, int | None] = {}
        self.pulls = True
        self.told = False
        self.draining = False
        self.start_id = ""
        self.kept_tokens: int | None = None
        self.sized_start_id: str | None = None
        self.told_live: bool | None = None
        self.check_now = asyncio.Event()
        self.checks: asyncio.Task[None] | None = None
        self.num_calls = 0
        self._view: EngineView | None = None

    def checked(self, failure: str | None) -> None:
        """Note a health check, and how it has failed."""
        self.healthy = failure is None
        if failure is None:
            self.num_missed = 0
        elif failure == "refused":
            self.num_missed = None
        elif self.num_missed is not None:
            self.num_missed += 1

    def view(self, live: bool, there: bool) -> EngineView:
        """Return it as it is now: the same object, while nothing has changed."""
        view = self._view
        if (
            view is None
            or view.live is not live
            or view.there is not there
            or view.pulls is not self.pulls
            or view.told is not self.told
            or view.draining is not self.draining
            or view.models is not self.models
        ):
            self._view = view = EngineView(
                name=self.config.name,
                engine_id=self.config.engine_id,
                side=self.config.side,
                live=live,
                there=there,
                pulls=self.pulls,
                told=self.told,
                draining=self.draining,
                models=self.models,
            )
        return view


class Hold:
    """Engines that a call was planned with: known by name until it has ended."""

    def __init__(self, engines: Sequence[_Engine], ended: Callable[[_Engine], None]) -> None:
        self._engines = engines
        self._ended = ended
        for engine in engines:
            engine.num_calls += 1

    def release(self) -> None:
        """Let go of them, once."""
        engines, self._engines = self._engines, ()
        for engine in engines:
            engine.num_calls -= 1
            self._ended(engine)


class Pool:
    """The configured engines and their state.

    Args:
        config: the router's settings.
        upstream: connections to the engines.
        control: asks engines for their mode; told which engine is meant at an address.
        events: told when an engine becomes live or stops being it.
        clock: monotonic seconds.
        engine_key: the router's own key for engines, if it has one.
    """

    def __init__(
        self,
        config: RouterConfig,
        upstream: Upstream,
        control: ControlsFleet,
        *,
        events: Events,
        clock: Callable[[], float],
        engine_key: str | None = None,
    ) -> None:
        self._config = config
        self._upstream = upstream
        self._control = control
        self._events = events
        self._clock = clock
        self._headers = {} if engine_key is None else {"authorization": f"Bearer {engine_key}"}
        self._engines: dict[str, _Engine] = {}
        self._leaving: list[_Engine] = []
        self._ending: set[asyncio.Task[None]] = set()
        for engine in config.engines:
            self._add(engine)
        self._models_asked_at_s = -_MODELS_REFRESH_S
        self._latest: Snapshot | None = None
        self._refresh = asyncio.Lock()

    async def start(self) -> None:
        """Check every engine once, then go on checking in the background."""
        await asyncio.gather(*(self._check(engine) for engine in self._engines.values()))
        for engine in self._engines.values():
            self._go_on_checking(engine, self._watch(engine))

    async def close(self) -> None:
        """Stop checking."""
        for engine in self._engines.values():
            self._stop_checking(engine)
        await asyncio.gather(*self._ending, return_exceptions=True)

    def adopt(self, engines: Sequence[EngineConfig]) -> EnginesRead:
        """Make ``engines`` the list, after :meth:`start`, and return what that has changed.

        An engine whose settings are as before keeps its state. One whose settings differ is
        another engine of the same name. A new one gets calls once it has been found healthy.
        """
        listed = {engine.name: engine for engine in engines}
        left = [e for name, e in self._engines.items() if listed.get(name) != e.config]
        for engine in left:
            self._remove(engine)
        joined = [self._add(config) for config in engines if config.name not in self._engines]
        for engine in joined:
            self._go_on_checking(engine, self._greet(engine))
        return EnginesRead(
            joined=tuple(engine.config.name for engine in joined),
            left=tuple(engine.config.name for engine in left),
        )

    def hold(self, names: Iterable[str]) -> Hold:
        """Keep engines known by name, until the hold is released."""
        return Hold([self._engines[name] for name in names], self._forget_idle)

    def snapshot(self, *, return_enabled: bool) -> Snapshot:
        """Return the pool as it is now: the same object, while nothing has changed."""
        engines = tuple(
            [
                engine.view(self._live(engine), self._there(engine))
                for engine in self._engines.values()
            ]
        )
        latest = self._latest
        if (
            latest is not None
            and latest.return_enabled is return_enabled
            and len(latest.engines) == len(engines)
            and all(map(operator.is_, latest.engines, engines))
        ):
            return latest
        self._latest = latest = Snapshot(
            engines=engines,
            return_enabled=return_enabled,
            decode_alone_tokens=self._config.decode_alone_tokens,
            max_new_tokens_on_decode=self._config.max_new_tokens_on_decode,
            serve_on_prefill=self._config.serve_on_prefill,
        )
        return latest

    def config_of(self, name: str) -> EngineConfig:
        """Return the settings of an engine of the list, or of one that a call still holds."""
        return self._find(name).config

    def control_of(self, name: str) -> str | None:
        """Return the address of an engine's control socket, None without one."""
        try:
            return self._find(name).config.control
        except KeyError:
            return None  # it has left

    def answered(self, name: str) -> None:
        """Note that an engine has answered, whatever the status."""
        engine = self._engines.get(name)
        if engine is None:
            return
        engine.breaker.succeeded()
        self._tell(engine, "answered a call")

    def failed(self, name: str, kind: str) -> None:
        """Note that a leg got no answer, for a reason that is the engine's."""
        engine = self._engines.get(name)
        if engine is None:
            return
        engine.breaker.failed(self._clock())
        if kind == "refused":
            engine.checked(kind)
        engine.check_now.set()
        self._tell(engine, kind)

    def kept_tokens(self) -> int | None:
        """Return how many tokens the pools of the live engines hold that keep sessions.

        Those are single and decode engines. One that has never said counts for nothing; None
        when none of them has. Asked for with ``admission`` only.
        """
        found = [
            engine.kept_tokens
            for engine in self._engines.values()
            if engine.config.side is not Side.PREFILL
            and engine.kept_tokens is not None
            and self._live(engine)
        ]
        return sum(found) if found else None

    def prefill_tokens(self, name: str) -> int | None:
        """Return how many tokens the pool of a prefill engine holds, None when nobody knows.

        Nor does anybody of one that is not there. Asked for with ``handover_share`` only.
        """
        engine = self._engines.get(name)
        return None if engine is None or not self._there(engine) else engine.kept_tokens

    async def refresh_models(self) -> None:
        """Ask the live engines for their models again, at most once a second."""
        async with self._refresh:
            now_s = self._clock()
            if now_s - self._models_asked_at_s < _MODELS_REFRESH_S:
                return
            self._models_asked_at_s = now_s
            await asyncio.gather(
                *(self._learn(engine) for engine in self._engines.values() if engine.healthy)
            )

    def _add(self, config: EngineConfig) -> _Engine:
        breaker = Breaker(self._config.breaker_failures, self._config.breaker_open_s)
        engine = self._engines[config.name] = _Engine(config, breaker)
        self._upstream.meet(config.url)
        if config.control is not None:
            self._control.expect(config.control, config.engine_id)
        return engine

    def _remove(self, engine: _Engine) -> None:
        del self._engines[engine.config.name]
        self._stop_checking(engine)
        self._events.emit(EngineLeft(engine=engine.config.name, side=engine.config.side.value))
        self._leaving.append(engine)
        self._forget_idle(engine)

    def _forget_idle(self, engine: _Engine) -> None:
        """Forget an engine that has left, unless a call still holds it."""
        if engine.num_calls or engine not in self._leaving:
            return
        self._leaving.remove(engine)
        url, address = engine.config.url, engine.config.control
        others = [other.config for other in (*self._engines.values(), *self._leaving)]
        if all(other.url != url for other in others):
            self._upstream.leave(url)
        if address is not None and all(other.control != address for other in others):
            self._control.forget(address)

    def _find(self, name: str) -> _Engine:
        if name in self._engines:
            return self._engines[name]
        for engine in reversed(self._leaving):
            if engine.config.name == name:
                return engine
        raise KeyError(name)

    def _go_on_checking(self, engine: _Engine, checks: Coroutine[Any, Any, None]) -> None:
        engine.checks = asyncio.create_task(checks, name=f"health {engine.config.name}")

    def _stop_checking(self, engine: _Engine) -> None:
        if engine.checks is not None:
            engine.checks.cancel()
            self._ending.add(engine.checks)
            engine.checks.add_done_callback(self._ending.discard)

    async def _greet(self, engine: _Engine) -> None:
        await self._check(engine)
        await self._watch(engine)

    async def _watch(self, engine: _Engine) -> None:
        while True:
            try:
                async with asyncio.timeout(self._config.health_interval_s):
                    await engine.check_now.wait()
                # A burst of failures must not become a burst of checks.
                await asyncio.sleep(min(0.05, self._config.health_interval_s))
            except TimeoutError:
                pass
            engine.check_now.clear()
            await self._check(engine)

    async def _check(self, engine: _Engine) -> None:
        try:
            status, _ = await self._upstream.get(
                engine.config, "/health", self._headers, timeout_s=self._config.health_timeout_s
            )
        except LegFailed as failure:
            engine.checked(failure.kind)
            self._tell(engine, str(failure))
            return
        before = engine.start_id
        if status == HTTPStatus.OK:
            await self._ask_mode(engine)
            if self._config.admission or (
                self._config.handover_share and engine.config.side is Side.PREFILL
            ):
                await self._ask_size(engine)
        # A process may die and come back between two checks.
        restarted = before not in ("", engine.start_id)
        recovered = status == HTTPStatus.OK and (restarted or not engine.healthy)
        engine.checked(None if status == HTTPStatus.OK else "unavailable")
        if recovered:
            # Perhaps another process: what broke before says nothing about it, and it may
            # serve other models.
            engine.breaker.succeeded()
        if recovered or (engine.healthy and not engine.models):
            await self._learn(engine)
        self._tell(engine, f"/health answered {status}")
        if restarted:
            self._events.emit(
                EngineRestarted(engine=engine.config.name, side=engine.config.side.value)
            )

    async def _ask_mode(self, engine: _Engine) -> None:
        """Ask whether it pulls and drains; one that does not say keeps what it said before."""
        reply = await self._asked(engine, SetMode(), ModeReply)
        if reply is None:
            return
        engine.told = True
        engine.start_id = reply.start_id or engine.start_id
        if reply.draining is not engine.draining:
            engine.draining = reply.draining
            self._events.emit(
                EngineDrains(
                    engine=engine.config.name,
                    side=engine.config.side.value,
                    draining=reply.draining,
                )
            )
        if reply.pulls is not engine.pulls:
            engine.pulls = reply.pulls
            self._events.emit(
                EnginePulls(
                    engine=engine.config.name,
                    side=engine.config.side.value,
                    mode=reply.mode,
                    pulls=reply.pulls,
                )
            )

    async def _ask_size(self, engine: _Engine) -> None:
        """Ask once per start how large its pool is."""
        if engine.sized_start_id == engine.start_id:
            return
        reply = await self._asked(engine, Hello(), HelloReply)
        if reply is None:
            return
        engine.sized_start_id = engine.start_id
        engine.kept_tokens = reply.num_blocks * reply.block_size or None

    async def _asked(self, engine: _Engine, question: Request, kind: type[R]) -> R | None:
        """Ask an engine's control socket; None when it has none, or does not answer as such."""
        address = engine.config.control
        if address is None:
            return None
        try:
            return await self._control.ask(
                address, question, kind, timeout_s=self._config.control_timeout_s
            )
        except EngineFault:
            return None

    async def _learn(self, engine: _Engine) -> None:
        try:
            status, body = await self._upstream.get(
                engine.config, "/v1/models", self._headers, timeout_s=self._config.health_timeout_s
            )
        except LegFailed:
            return  # the health check says what is wrong with the engine
        if status == HTTPStatus.OK:
            engine.models = _models(body)

    def _live(self, engine: _Engine) -> bool:
        return engine.healthy and not engine.breaker.is_open(self._clock())

    def _there(self, engine: _Engine) -> bool:
        """Whether it lives, as far as a short silence can tell."""
        missed, most = engine.num_missed, self._config.breaker_failures
        return missed is not None and missed < most and not engine.breaker.is_open(self._clock())

    def _tell(self, engine: _Engine, why: str) -> None:
        live = self._live(engine)
        if live is not engine.told_live:
            engine.told_live = live
            self._events.emit(
                EngineChanged(
                    engine=engine.config.name, side=engine.config.side.value, live=live, why=why
                )
            )


def _models(body: bytes) -> dict[str, int | None]:
    """Read served names and context lengths; what is no list of models has none."""
    try:
        data: Any = json.loads(body)
    except ValueError:
        return {}
    cards = data.get("data") if isinstance(data, dict) else None
    out: dict[str, int | None] = {}
    for card in cards if isinstance(cards, list) else ():
        if isinstance(card, dict) and isinstance(card.get("id"), str):
            length = card.get("max_model_len")
            out[card["id"]] = length if isinstance(length, int) else None
    return out
