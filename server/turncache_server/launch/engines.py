"""Starting one part of a stack under the reaper, and waiting until it answers."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from turncache.errors import ConfigError, EngineFault, TurncacheError
from turncache_server.launch.affinity import pin_tree
from turncache_server.launch.explain import explain
from turncache_server.launch.loopback import is_healthy
from turncache_server.launch.processes import NUM_TAIL_LINES, Supervised
from turncache_server.launch.profiles import SERVER_MODULE, EngineLaunch
from turncache_server.launch.spec import Side

_POLL_S: Final = 0.05
#: A start that takes minutes says what it is at.
_WORD_INTERVAL_S: Final = 30.0
_WORD_CHARS: Final = 160
#: An engine core's own traceback is followed by those of everybody who waited for it.
_NUM_SEARCHED_LINES: Final = 2000
_HEALTH_INTERVAL_S: Final = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """A running engine.

    Attributes:
        name: such as ``prefill-0``.
        side: ``prefill``, ``decode`` or ``single``.
        url: base URL of its HTTP server.
        control_address: of its control socket, None for stock engines.
        nixl_port: of its NIXL side channel, None without disaggregation.
        log_path: newest log file.
        pid: process id of vLLM's API server, the root of the engine's process tree.
    """

    name: str
    side: Side
    url: str
    control_address: str | None
    nixl_port: int | None
    log_path: Path
    pid: int


@dataclass(slots=True, kw_only=True)
class Part:
    """An engine or the router while it runs: its process and how to ask it.

    Attributes:
        process: the program under the reaper.
        url: base URL; ``/health`` answers 200 when it is ready.
        cores: cores to pin its threads to; empty for no pinning.
    """

    process: Supervised
    url: str
    cores: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        """Name for messages."""
        return self.process.name

    def check(self, when: str) -> None:
        """Raise when the program has ended.

        Raises:
            EngineFault: with the exit code, the cause as far as the log tells, the way out
                and the last lines of the log.
            ConfigError: instead, when vLLM refused its command line.
        """
        code = self.process.poll()
        if code is not None:
            raise _fault(self.process, f"ended with exit code {code} {when}", code)

    def pin(self) -> None:
        """Pin every thread to the part's cores."""
        pin_tree(self.process.pid, self.cores)


def start_engine(launch: EngineLaunch, *, python: str, log_dir: Path, grace_s: float) -> Part:
    """Start an engine; it is not ready yet.

    Raises:
        EnvironmentFault: the reaper could not be started.
    """
    process = Supervised(
        launch.name,
        [python, "-m", SERVER_MODULE, *launch.arguments],
        environment=merge_environment(os.environ, launch.environment),
        log_path=log_dir / f"{launch.name}.log",
        grace_s=grace_s,
    )
    return Part(process=process, url=launch.url, cores=launch.cores)


def merge_environment(outer: Mapping[str, str], ours: Mapping[str, str]) -> dict[str, str]:
    """Lay our variables over the caller's; our ``PYTHONPATH`` goes in front of theirs."""
    merged = {**outer, **ours}
    if outer.get("PYTHONPATH") and "PYTHONPATH" in ours:
        merged["PYTHONPATH"] = os.pathsep.join((ours["PYTHONPATH"], outer["PYTHONPATH"]))
    return merged


def wait_healthy(
    parts: Sequence[Part],
    *,
    timeout_s: float,
    progress: Callable[[str], None],
    watch: Sequence[Part] = (),
) -> None:
    """Wait until every part answers ``/health``, while watching all of them for death.

    Args:
        parts: what is being started.
        timeout_s: seconds from now for all of them together.
        progress: takes a line when a part is ready.
        watch: further parts that must stay alive meanwhile.

    Raises:
        EngineFault: a part ended or was not ready in time.
        ConfigError: vLLM refused its command line.
    """
    started = time.monotonic()
    next_health = started
    next_word = started + _WORD_INTERVAL_S
    waiting = list(parts)
    while waiting:
        now = time.monotonic()
        for part in (*parts, *watch):
            part.check("during start")
        if now - started > timeout_s:
            late = waiting[0]
            raise _fault(
                late.process,
                f"was not ready within {timeout_s:g} s (--timeout gives it more)",
                None,
            )
        if now >= next_word:
            next_word = now + _WORD_INTERVAL_S
            for part in waiting:
                last = (part.process.tail(1) or ["nothing logged yet"])[0]
                progress(f"{part.name}: {now - started:.0f} s, {last.strip()[:_WORD_CHARS]}")
        if now >= next_health:
            next_health = now + _HEALTH_INTERVAL_S
            for part in list(waiting):
                part.pin()
                if is_healthy(part.url):
                    part.pin()
                    waiting.remove(part)
                    progress(f"{part.name}: ready after {now - started:.0f} s on {part.url}")
        if waiting:
            time.sleep(_POLL_S)


def _fault(process: Supervised, problem: str, exit_code: int | None) -> TurncacheError:
    lines = process.tail(_NUM_SEARCHED_LINES)
    explanation = explain(lines, exit_code)
    shown = lines[-NUM_TAIL_LINES:]
    message = f"{problem}: {explanation.what}" if explanation.what else problem
    message += f"; {explanation.way_out}\n"
    if explanation.line and explanation.line not in "\n".join(shown):
        message += f"The cause, further up in its log:\n  {explanation.line}\n"
    message += "\n  ".join((f"Last lines of {process.log_path}:", *shown))
    if explanation.is_usage:
        return ConfigError(f"engine_args ({process.name})", message)
    return EngineFault(process.name, message)
