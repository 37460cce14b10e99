"""Engines and the router in front of them, started, watched and stopped as one.

:func:`start` is the launcher's front door. A :class:`Stack` owns its child processes: when it
is stopped, left as a context manager, or when this program dies by whatever means, all of
them end with everything they started.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from turncache.errors import ConfigError, EngineFault
from turncache.spelling import none_of
from turncache_server.launch import preflight
from turncache_server.launch.engines import Engine, Part, start_engine, wait_healthy
from turncache_server.launch.machine import free_ports, inspect_environment, inspect_machine
from turncache_server.launch.models import cache_folder
from turncache_server.launch.processes import Supervised, stop_all
from turncache_server.launch.profiles import (
    EngineLaunch,
    Ports,
    count_ports,
    plan_engines,
    reachable,
    served_name,
)
from turncache_server.launch.router_config import router_config
from turncache_server.launch.spec import StackSpec
from turncache_server.launch.warmup import warm_up, warm_up_stock_pair

__all__ = ["Engine", "Stack", "StackSpec", "start"]

ROUTER: Final = "router"
ROUTER_MODULE: Final = "turncache_server.router"
_POLL_S: Final = 0.2
#: A dead engine is seen as dead when its reaper has taken everything of it down.
_DEATH_IS_SEEN_S: Final = 3.0
#: A hub model is downloaded first, a GPU compiles and captures graphs: death is watched
#: anyway, so this only ends a start that hangs.
START_TIMEOUT_S: Final = 1800.0

Progress = Callable[[str], None]


def start(spec: StackSpec, *, progress: Progress, timeout_s: float = START_TIMEOUT_S) -> Stack:
    """Start a stack and return it when it answers.

    Args:
        spec: what to start.
        progress: takes lines for people; never data.
        timeout_s: seconds for all engines together to become ready.

    Raises:
        ConfigError: the specification cannot work; nothing was started.
        EnvironmentFault: this machine or installation lacks something; nothing was started.
        EngineFault: a part ended or was not ready in time; everything was stopped, and the
            message has the last lines of its log.
    """
    environment = inspect_environment(spec.python)
    for note in preflight.check_environment(spec, environment):
        progress(note)
    preflight.check_settings(spec)
    preflight.check_fleet(spec)
    spec = replace(spec, model=preflight.resolve_model(spec, environment.python, progress))
    machine = inspect_machine()
    ports = count_ports(spec, free_ports(1 + 3 * len(spec.members)))
    launches = plan_engines(spec, machine=machine, environment=environment, ports=ports)
    preflight.check_ports(spec, launches, ports)
    preflight.check_memory(spec, machine, environment)
    stack = Stack(spec, launches, ports, python=environment.python, progress=progress)
    try:
        stack.bring_up(timeout_s)
    except BaseException:  # also Ctrl-C: whatever ends the start ends what was started
        stack.stop()
        raise
    return stack


class Stack:
    """Running engines, and the router where there is one. Made by :func:`start`.

    Attributes:
        spec: what was started; its model is resolved.
        model: name of the model in the API.
        base_url: where clients go, without ``/v1``: the router, the single engine, or the
            decode engine of a stock pair, which has no router.
        log_dir: folder of the logs and the router's configuration.
    """

    def __init__(
        self,
        spec: StackSpec,
        launches: tuple[EngineLaunch, ...],
        ports: Ports,
        *,
        python: str,
        progress: Progress,
    ) -> None:
        self.spec = spec
        self.model = served_name(spec)
        self.log_dir = _log_dir(spec, ports, launches)
        self._launches = {launch.name: launch for launch in launches}
        self._ports = ports
        self._python = python
        self._progress = progress
        self._parts: dict[str, Part] = {}
        if spec.has_router:
            self.base_url = f"http://{reachable(spec.host)}:{ports.router}"
        else:
            self.base_url = launches[-1].url if spec.is_pair else launches[0].url

    @property
    def engines(self) -> tuple[Engine, ...]:
        """The engines, prefill before decode."""
        return tuple(
            Engine(
                name=launch.name,
                side=launch.side,
                url=launch.url,
                control_address=launch.control_address,
                nixl_port=launch.nixl_port,
                log_path=self._parts[launch.name].process.log_path,
                pid=self._parts[launch.name].process.pid,
            )
            for launch in self._launches.values()
            if launch.name in self._parts
        )

    @property
    def router_pid(self) -> int | None:
        """Process id of the router, None without one."""
        part = self._parts.get(ROUTER)
        return None if part is None else part.process.pid

    def bring_up(self, timeout_s: float) -> None:
        """Start the engines side by side, then the router, then make the first calls."""
        deadline = time.monotonic() + timeout_s
        # Written first: a setting that the router refuses must not cost an engine's start.
        config = self._write_router_config() if self.spec.has_router else None
        for name in self._launches:
            self._start_engine(name)
        engines = list(self._parts.values())
        wait_healthy(engines, timeout_s=timeout_s, progress=self._progress)
        if config is not None:
            router = self._start_router(config)
            wait_healthy(
                [router],
                timeout_s=max(1.0, deadline - time.monotonic()),
                progress=self._progress,
                watch=engines,
            )
        if self.spec.warm_up:
            self._warm_up()
        for part in engines:
            part.pin()

    def check(self) -> None:
        """Raise when a part has ended.

        Raises:
            EngineFault: naming the part, with its exit code and the last lines of its log.
        """
        for part in self._parts.values():
            part.check("while serving")

    def wait(self) -> None:
        """Block until a part ends, then stop everything and raise.

        Raises:
            EngineFault: as :meth:`check`.
        """
        try:
            while True:
                self.check()
                time.sleep(_POLL_S)
        finally:
            self.stop()

    def restart(self, name: str, *, timeout_s: float = START_TIMEOUT_S) -> None:
        """Stop one part (``router`` or an engine's name), start it again, wait until it answers.

        Raises:
            ConfigError: there is no such part.
            EngineFault: it did not come back.
        """
        if name not in self._parts:
            raise ConfigError("name", none_of(name, self._parts))
        self._parts[name].process.stop()
        if name == ROUTER:
            part = self._start_router(self._write_router_config())
        else:
            part = self._start_engine(name)
        wait_healthy([part], timeout_s=timeout_s, progress=self._progress)
        router = self._parts.get(ROUTER)
        if router is not None and router is not part:
            # It may have seen the part down, and answers 503 until it has looked again.
            wait_healthy([router], timeout_s=timeout_s, progress=self._progress)

    def stop(self) -> None:
        """End every part and everything it started. May be called again."""
        # The router first: calls in flight can end while their engines are still there.
        router = [part.process for name, part in self._parts.items() if name == ROUTER]
        engines = [part.process for name, part in self._parts.items() if name != ROUTER]
        stop_all(router)
        stop_all(engines)

    def describe(self) -> dict[str, Any]:
        """Return the stack as plain data."""
        return {
            "base_url": self.base_url,
            "model": self.model,
            "kind": self.spec.kind,
            "log_dir": str(self.log_dir),
            "router_pid": self.router_pid,
            "engines": [
                {
                    "name": engine.name,
                    "side": engine.side,
                    "url": engine.url,
                    "control_address": engine.control_address,
                    "nixl_port": engine.nixl_port,
                    "log_path": str(engine.log_path),
                    "pid": engine.pid,
                }
                for engine in self.engines
            ],
        }

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def _start_engine(self, name: str) -> Part:
        launch = self._launches[name]
        part = start_engine(
            launch,
            python=self._python,
            log_dir=self.log_dir,
            grace_s=self.spec.stop_grace_s,
        )
        self._parts[name] = part
        self._progress(f"{name}: starting on {part.url}, log {part.process.log_path}")
        return part

    def _write_router_config(self) -> Path:
        path = self.log_dir / "router.toml"
        text = router_config(self.spec, self._ports.router, tuple(self._launches.values()))
        preflight.check_router_config(text)
        self.log_dir.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    def _start_router(self, config: Path) -> Part:
        process = Supervised(
            ROUTER,
            [sys.executable, "-m", ROUTER_MODULE, "--config", str(config)],
            environment=os.environ,
            log_path=self.log_dir / "router.log",
            grace_s=self.spec.stop_grace_s,
        )
        part = self._parts[ROUTER] = Part(process=process, url=self.base_url)
        return part

    def _warm_up(self) -> None:
        started = time.monotonic()
        try:
            skipped = self._warm_up_calls()
        except EngineFault:
            # An engine that died under the call says more than the call's error does.
            deadline = time.monotonic() + _DEATH_IS_SEEN_S
            while time.monotonic() < deadline:
                self.check()
                time.sleep(_POLL_S)
            raise
        self.check()
        took = f"took {time.monotonic() - started:.1f} s"
        self._progress(f"warm-up {took}" if skipped is None else f"warm-up skipped: {skipped}")

    def _warm_up_calls(self) -> str | None:
        if self.spec.is_pair and not self.spec.is_ours:
            first = next(launch for launch in self._launches.values() if launch.side == "prefill")
            return warm_up_stock_pair(first.url, self.base_url, self.model)
        return warm_up(self.base_url, self.model)


def _log_dir(spec: StackSpec, ports: Ports, launches: tuple[EngineLaunch, ...]) -> Path:
    if spec.log_dir is not None:
        return Path(spec.log_dir).expanduser().absolute()
    port = ports.router if spec.has_router else launches[0].port
    return cache_folder() / "logs" / str(port)
