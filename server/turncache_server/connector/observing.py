"""What an engine's connector makes for observing: a recorder, and the ghost that it feeds."""

from __future__ import annotations

import secrets

from turncache_server.connector.config import EngineFacts, Settings
from turncache_server.connector.extension import limits_of
from turncache_server.connector.ghost_process import GhostProcess, GhostTask, now_iso
from turncache_server.connector.recorder import Recorder
from turncache_server.retention.ghost import GhostSpec
from turncache_server.retention.trace import TraceHeader


def ghost_task(facts: EngineFacts, settings: Settings) -> GhostTask:
    """Return what the ghost of an engine is to do."""
    limits = limits_of(facts, settings)
    return GhostTask(
        spec=GhostSpec(
            limits=limits,
            policy=settings.policy,
            block_size=facts.block_size,
            block_bytes=facts.block_bytes,
            host_gb=settings.ghost_host_gb if facts.block_bytes else (),
        ),
        header=TraceHeader(
            trace=secrets.token_hex(8),
            started_at=now_iso(),
            mode=settings.mode.value,
            side=settings.side.value,
            vllm_version=facts.vllm_version,
            block_size=facts.block_size,
            num_blocks=facts.num_blocks,
            block_bytes=facts.block_bytes,
            policy=settings.policy,
            retain_budget=limits.retain_budget,
            tenant_budget=limits.tenant_budget,
            retain_default_s=limits.retain_default_s,
            retain_max_s=limits.retain_max_s,
            host_gb=settings.ghost_host_gb if facts.block_bytes else (),
        ),
        trace_file=settings.trace_file,
        trace_part_bytes=int(settings.trace_file_mb * 1e6),
    )


class Observer:
    """The recorder of one engine and its ghost, which starts with the first recording.

    An engine that is never observed has no further process and no thread.
    """

    def __init__(self, facts: EngineFacts, settings: Settings) -> None:
        self._process: GhostProcess | None = None
        self.recorder = Recorder(on_first=self._start)
        self._facts = facts
        self._settings = settings

    def _start(self) -> None:
        self._process = GhostProcess(self.recorder, ghost_task(self._facts, self._settings))
        self._process.start()

    def close(self) -> None:
        """Hand over what is there, and end the ghost."""
        if self._process is not None:
            self._process.close()
