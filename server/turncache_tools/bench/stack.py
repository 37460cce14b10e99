"""A running stack: what it is, switching its arms, reading its counters, emptying its cache."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from turncache.errors import EngineFault, TurncacheError
from turncache.protocol import Mode
from turncache_server.control.client import ControlClient, switch_mode
from turncache_server.control.keys import FleetKeys
from turncache_server.control.messages import ModeReply, SetMode, Stats, StatsReply
from turncache_tools.bench.arms import Arm, StackFacts
from turncache_tools.bench.client import Client
from turncache_tools.bench.counters import (
    added,
    difference,
    prefix_caching,
    read_counters,
    read_gauge,
)

_CONTROL_TIMEOUT_S: Final = 10.0
_SAMPLE_EVERY_S: Final = 1.0
#: Many of a router's default health checks.
_NOTICED_S: Final = 30.0
_LOOK_EVERY_S: Final = 0.1
_SMI: Final = (
    "--query-gpu=utilization.gpu,power.draw",
    "--format=csv,noheader,nounits",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Where the parts of a stack are.

    Attributes:
        url: base URL for calls.
        controls: control sockets of the engines.
        engines: base URLs of the engines, for their counters.
        keys: of the control plane.
    """

    url: str
    controls: Sequence[str] = ()
    engines: Sequence[str] = ()
    keys: FleetKeys | None = None


@dataclass(slots=True)
class Sampled:
    """What a block cost: counters as differences, gauges as means."""

    counters: dict[str, float] = field(default_factory=dict)
    gauges: dict[str, float] = field(default_factory=dict)


class Stack:
    """The stack under test.

    Args:
        client: for HTTP.
        places: of its parts.
    """

    def __init__(self, client: Client, places: Places) -> None:
        self._client = client
        self._places = places
        self._smi = shutil.which("nvidia-smi")
        self._modes_before: dict[str, str] = {}
        self._returns_before: bool | None = None
        self._emptying = asyncio.Lock()

    async def facts(self, *, ours: bool) -> StackFacts:
        """Find out what this stack is; remembers how it was found.

        Raises:
            EngineFault: a named control socket or engine does not answer.
        """
        pair, returns = None, None
        status, health = await self._client.json("GET", f"{self._places.url}/health")
        if status in (200, 503) and isinstance(health, dict):
            sides = health.get("sides") or {}
            pair = "prefill" in sides if sides else None
            returns = health.get("return_enabled")
        for address in self._places.controls:
            reply = await self._control(partial(_mode_of, address))
            self._modes_before[address] = reply.mode
        admin = False
        if ours and isinstance(returns, bool):
            status, _ = await self._client.json(
                "POST", f"{self._places.url}/admin/return", {"enabled": returns}
            )
            admin = status == 200
            self._returns_before = returns if admin else None
        return StackFacts(
            ours=ours,
            pair=pair,
            controls=len(self._places.controls),
            admin=admin,
            returns=returns,
            metrics=len(self._places.engines),
        )

    async def described(self) -> dict[str, Any]:
        """Return what readers must know of the stack: its prefix caches, by engine."""
        out: dict[str, Any] = {}
        for url, text in (await self._metrics()).items():
            known = prefix_caching(text)
            out[f"prefix caching of {url}"] = "not said" if known is None else known
        return out

    async def switch(self, arm: Arm) -> None:
        """Bring the stack into an arm's state.

        Raises:
            EngineFault: a part did not do it.
        """
        if arm.url != self._places.url:
            return
        if arm.mode is not None:
            for address in self._places.controls:
                await self._to_mode(address, arm.mode)
        if arm.returns is not None:
            await self._to_returns(arm.returns)
        if arm.mode is not None and self._places.controls:
            await self._until_noticed(arm.mode is Mode.ON)

    async def _until_noticed(self, pulling: bool) -> None:
        """Wait until the router plans by the engines' new mode; calls before that are stock's.

        It reads modes with its health checks. A server that says nothing of them, or has engines
        that are not switched, is not waited for.
        """
        end_s = time.monotonic() + _NOTICED_S
        url = f"{self._places.url}/health"
        while True:
            _, health = await self._client.json("GET", url)
            sides = (health.get("sides") or {}) if isinstance(health, dict) else {}
            told = [sides.get(side) or {} for side in ("prefill", "decode")]
            live = sum(side.get("live", 0) for side in told)
            found = [side["pulling"] for side in told if "pulling" in side]
            if len(found) < len(told) or live != len(self._places.controls):
                return
            if sum(found) == (live if pulling else 0):
                return
            if time.monotonic() > end_s:
                raise EngineFault(url, f"the engines' mode is not noticed after {_NOTICED_S:g} s")
            await asyncio.sleep(_LOOK_EVERY_S)

    async def restore(self) -> None:
        """Bring the stack back to how it was found."""
        for address, mode in self._modes_before.items():
            await self._to_mode(address, mode)
        if self._returns_before is not None:
            await self._to_returns(self._returns_before)

    async def _to_mode(self, address: str, mode: str) -> None:
        def switch(client: ControlClient) -> ModeReply:
            now = client.ask(address, SetMode(), ModeReply, timeout_s=_CONTROL_TIMEOUT_S)
            if now.mode == mode:
                return now
            return switch_mode(client, address, mode, timeout_s=_CONTROL_TIMEOUT_S)

        reply = await self._control(switch)
        if reply.mode != mode:
            raise EngineFault(
                address, f"stayed in mode {reply.mode} instead of {mode}: {reply.why}"
            )

    async def _to_returns(self, enabled: bool) -> None:
        url = f"{self._places.url}/admin/return"
        status, _ = await self._client.json("POST", url, {"enabled": enabled})
        if status != 200:
            raise EngineFault(url, f"answered {status} instead of switching returns")

    async def _control(self, ask: Callable[[ControlClient], Any]) -> Any:
        def work() -> Any:
            with closing(ControlClient(self._places.keys)) as client:
                return ask(client)

        return await asyncio.to_thread(work)

    async def empty(self, url: str, *, external: bool) -> None:
        """Empty an engine's prefix cache.

        Raises:
            EngineFault: it refused. Some versions say so with status 200 and ``success``
                false, because blocks are in use.
        """
        query = "?reset_external=true" if external else ""
        async with self._emptying:
            status, found = await self._client.json("POST", f"{url}/reset_prefix_cache{query}")
        refused = isinstance(found, dict) and found.get("success") is False
        if status != 200 or refused:
            said = "success: false" if refused else f"status {status}"
            raise EngineFault(
                url,
                f"did not empty its prefix cache ({said}): it needs VLLM_SERVER_DEV_MODE=1 and no "
                "block in use; --miss-by flood needs neither",
            )

    # --- counters ---------------------------------------------------------------------------

    async def _metrics(self) -> dict[str, str]:
        out = {}
        for url in self._places.engines:
            status, text = await self._client.text("GET", f"{url}/metrics")
            if status != 200:
                raise EngineFault(url, f"answered {status} to /metrics")
            out[url] = text
        return out

    async def during(self, work: Awaitable[None]) -> Sampled:
        """Run a block and return what it cost."""
        before = {url: read_counters(text) for url, text in (await self._metrics()).items()}
        cpu_before = _cpu_jiffies()
        gauges: defaultdict[str, list[float]] = defaultdict(list)
        sampler = asyncio.create_task(self._sample(gauges))
        try:
            await work
        finally:
            sampler.cancel()
            with suppress(asyncio.CancelledError):
                await sampler
        after = {url: read_counters(text) for url, text in (await self._metrics()).items()}
        means = {name: sum(values) / len(values) for name, values in gauges.items()}
        share = _busy_share(cpu_before, _cpu_jiffies())
        if share is not None and self._is_here():
            means["cpu_share"] = share
        return Sampled(added(difference(before[url], after[url]) for url in after), means)

    def _is_here(self) -> bool:
        hosts = {urlsplit(url).hostname for url in (self._places.url, *self._places.engines)}
        return hosts <= {"localhost", "127.0.0.1", "::1"}

    async def _sample(self, gauges: Mapping[str, list[float]]) -> None:
        while True:
            with suppress(TurncacheError):
                await self._sample_once(gauges)
            await asyncio.sleep(_SAMPLE_EVERY_S)

    async def _sample_once(self, gauges: Mapping[str, list[float]]) -> None:
        used = [
            value
            for text in (await self._metrics()).values()
            if (value := read_gauge(text, "vllm:kv_cache_usage_perc")) is not None
        ]
        if used:
            gauges["kv_usage"].append(100 * sum(used) / len(used))
        shares = []
        for address in self._places.controls:
            reply = await self._control(partial(_stats_of, address))
            blocks = reply.gauges.get("blocks") or 0.0
            if blocks:
                shares.append(100 * reply.gauges.get("retained_blocks", 0.0) / blocks)
        if shares:
            gauges["retained_share"].append(sum(shares) / len(shares))
        if self._smi is not None and self._is_here():
            for name, value in (await asyncio.to_thread(_gpus, self._smi)).items():
                gauges[name].append(value)


def _mode_of(address: str, client: ControlClient) -> ModeReply:
    return client.ask(address, SetMode(), ModeReply, timeout_s=_CONTROL_TIMEOUT_S)


def _stats_of(address: str, client: ControlClient) -> StatsReply:
    return client.ask(address, Stats(), StatsReply, timeout_s=_CONTROL_TIMEOUT_S)


def _gpus(smi: str) -> dict[str, float]:
    """Return utilisation (mean) and power (sum) of the GPUs; empty when they do not say."""
    try:
        done = subprocess.run(  # noqa: S603 - found on the path, fixed arguments
            [smi, *_SMI], check=True, capture_output=True, text=True, timeout=5
        )
        rows = [[float(v) for v in line.split(",")] for line in done.stdout.splitlines() if line]
    except (OSError, ValueError, subprocess.SubprocessError):
        return {}
    if not rows:
        return {}
    return {
        "gpu_utilisation": sum(row[0] for row in rows) / len(rows),
        "gpu_power_w": sum(row[1] for row in rows),
    }


def _cpu_jiffies() -> tuple[int, int] | None:
    """Return (busy, all) of this machine; None where there is no such file."""
    try:
        first = Path("/proc/stat").read_text().splitlines()[0].split()[1:9]
        numbers = [int(number) for number in first]
    except (OSError, ValueError, IndexError):
        return None
    return sum(numbers) - numbers[3] - numbers[4], sum(numbers)


def _busy_share(before: tuple[int, int] | None, after: tuple[int, int] | None) -> float | None:
    if before is None or after is None or after[1] == before[1]:
        return None
    return 100 * (after[0] - before[0]) / (after[1] - before[1])
