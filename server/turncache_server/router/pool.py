"""The engines: which are live, what they serve, whether they pull and whether they drain.

Owner of that state. An engine is live when its last health check succeeded and its circuit
is closed. A connection that is refused counts as a failed health check, and starts the next
one at once.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import Any

from turncache.errors import EngineFault
from turncache_server.control.messages import ModeReply, SetMode
from turncache_server.router.breaker import Breaker
from turncache_server.router.config import EngineConfig, RouterConfig
from turncache_server.router.errors import LegFailed
from turncache_server.router.events import (
    EngineChanged,
    EngineDrains,
    EnginePulls,
    EngineRestarted,
    Events,
)
from turncache_server.router.outcomes import AsksControl
from turncache_server.router.plan import EngineView, Snapshot
from turncache_server.router.upstream import Upstream

#: Shortest time between two questions for models because a client named an unknown one.
_MODELS_REFRESH_S = 1.0


class _Engine:
    """What is known about one engine at present."""

    def __init__(self, config: EngineConfig, breaker: Breaker) -> None:
        self.config = config
        self.breaker = breaker
        self.healthy = False
        self.models: Mapping[str, int | None] = {}
        self.pulls = True
        self.draining = False
        self.start_id = ""
        self.told_live: bool | None = None
        self.check_now = asyncio.Event()


class Pool:
    """The configured engines and their state.

    Args:
        config: the router's settings.
        upstream: connections to the engines.
        control: asks engines for their mode.
        events: told when an engine becomes live or stops being it.
        clock: monotonic seconds.
        engine_key: the router's own key for engines, if it has one.
    """

    def __init__(
        self,
        config: RouterConfig,
        upstream: Upstream,
        control: AsksControl,
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
        self._engines = {
            engine.name: _Engine(engine, Breaker(config.breaker_failures, config.breaker_open_s))
            for engine in config.engines
        }
        self._checks: list[asyncio.Task[None]] = []
        self._models_asked_at_s = -_MODELS_REFRESH_S
        self._refresh = asyncio.Lock()

    async def start(self) -> None:
        """Check every engine once, then go on checking in the background."""
        await asyncio.gather(*(self._check(engine) for engine in self._engines.values()))
        self._checks = [
            asyncio.create_task(self._watch(engine), name=f"health {name}")
            for name, engine in self._engines.items()
        ]

    async def close(self) -> None:
        """Stop checking."""
        for task in self._checks:
            task.cancel()
        await asyncio.gather(*self._checks, return_exceptions=True)

    def snapshot(self, *, return_enabled: bool) -> Snapshot:
        """Return the pool as it is now."""
        return Snapshot(
            engines=tuple(self._view(engine) for engine in self._engines.values()),
            return_enabled=return_enabled,
            decode_alone_tokens=self._config.decode_alone_tokens,
            max_new_tokens_on_decode=self._config.max_new_tokens_on_decode,
            serve_on_prefill=self._config.serve_on_prefill,
        )

    def config_of(self, name: str) -> EngineConfig:
        """Return an engine's settings."""
        return self._engines[name].config

    def answered(self, name: str) -> None:
        """Note that an engine has answered, whatever the status."""
        engine = self._engines[name]
        engine.breaker.succeeded()
        self._tell(engine, "answered a call")

    def failed(self, name: str, kind: str) -> None:
        """Note that a leg got no answer, for a reason that is the engine's."""
        engine = self._engines[name]
        engine.breaker.failed(self._clock())
        if kind == "refused":
            engine.healthy = False
        engine.check_now.set()
        self._tell(engine, kind)

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
            engine.healthy = False
            self._tell(engine, str(failure))
            return
        before = engine.start_id
        if status == HTTPStatus.OK:
            await self._ask_mode(engine)
        # A process may die and come back between two checks.
        restarted = before not in ("", engine.start_id)
        recovered = status == HTTPStatus.OK and (restarted or not engine.healthy)
        engine.healthy = status == HTTPStatus.OK
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
        address = engine.config.control
        if address is None:
            return
        try:
            reply = await self._control.ask(
                address, SetMode(), ModeReply, timeout_s=self._config.control_timeout_s
            )
        except EngineFault:
            return
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

    def _view(self, engine: _Engine) -> EngineView:
        return EngineView(
            name=engine.config.name,
            engine_id=engine.config.engine_id,
            side=engine.config.side,
            live=self._live(engine),
            pulls=engine.pulls,
            draining=engine.draining,
            models=engine.models,
        )

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
