"""The worker's side of the verified pull, on top of vLLM's NIXL pull worker.

What it adds: a read past its deadline is abandoned, not cancelled (its handles are kept
and polled until the transfer is really gone, because a late write must hit nobody); whole
requests fail, never block ids; ids that the scheduler side refused after verification are
reported as finished and failed.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import (
    NixlConnectorMetadata,
    ReqMeta,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker import (
    NixlPullConnectorWorker,
)
from vllm.platforms import current_platform

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerEndpoint:
    """Where a peer's NIXL side channel listens."""

    engine_id: str
    host: str
    port: int
    tp_size: int


class TurncacheMetadata(NixlConnectorMetadata):
    """One step's orders to the workers.

    Attributes:
        deadlines_s: remaining seconds by request, for the reads that start in this step.
        attempts: which read of its request it is, likewise.
        failures: requests to report as finished and failed: verify refused them.
        handshakes: peers to shake hands with before the first read needs it.
        report: answer with a report even when there is nothing to say, so that the
            scheduler-side hook runs in every step.
    """

    def __init__(self) -> None:
        super().__init__()
        self.deadlines_s: dict[str, float] = {}
        self.attempts: dict[str, int] = {}
        self.failures: set[str] = set()
        self.handshakes: tuple[PeerEndpoint, ...] = ()
        self.report = False


#: A read: request id and attempt. The transfers of two attempts end in any order.
ReadKey = tuple[str, int]


@dataclass(slots=True, kw_only=True)
class WorkerReport(KVConnectorWorkerMetadata):
    """What the ranks say about abandoned reads: how many of them, by read.

    Attributes:
        abandoned: ranks that abandoned the read in this step.
        released: ranks on which an abandoned read's transfer is gone.
    """

    abandoned: dict[ReadKey, int] = field(default_factory=dict)
    released: dict[ReadKey, int] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Add another rank's counts."""
        if isinstance(other, WorkerReport):
            for mine, theirs in (
                (self.abandoned, other.abandoned),
                (self.released, other.released),
            ):
                for read, ranks in theirs.items():
                    mine[read] = mine.get(read, 0) + ranks
        return self


#: Begins the name under which a source is told that a pull has read: it held nothing for it.
PULL_PREFIX: Final = "tc-"


class WithoutOurNotices:
    """A NIXL agent whose notices of pulls are dropped.

    A stock hand-over's notice releases what was held for it; one of a pull would be taken
    for a reader that came after everything had expired.

    Args:
        agent: vLLM's NIXL agent.
    """

    def __init__(self, agent: Any) -> None:
        self._agent = agent

    def __getattr__(self, name: str) -> Any:
        return getattr(self._agent, name)

    def get_new_notifs(self) -> dict[str, list[bytes]]:
        """Return what readers have sent, by agent."""
        ours = PULL_PREFIX.encode()
        return {
            agent: [notice for notice in notices if not notice.startswith(ours)]
            for agent, notices in self._agent.get_new_notifs().items()
        }


@dataclass(slots=True)
class _Abandoned:
    """Transfers of an abandoned read that may still write."""

    engine_id: str
    handles: list[int]


class TurncacheWorker(NixlPullConnectorWorker):
    """NIXL reads with deadlines; runs in each worker process, on its main thread."""

    nixl_wrapper: Any

    def __init__(self, vllm_config: Any, engine_id: str, kv_cache_config: Any) -> None:
        affinity = os.sched_getaffinity(0)
        super().__init__(vllm_config, engine_id, kv_cache_config)
        if current_platform.device_type == "cpu":
            # The stock worker moves itself to the last core of each NUMA node, where the
            # workers of two engines on one machine starve each other.
            os.sched_setaffinity(0, affinity)
        self._init_ours(time.perf_counter)

    def _init_ours(self, clock: Callable[[], float]) -> None:
        """Set our own state, apart from what the stock worker needs."""
        self.nixl_wrapper = WithoutOurNotices(self.nixl_wrapper)
        self._clock = clock
        self._deadlines: dict[str, float] = {}
        self._attempts: dict[str, int] = {}
        self._abandoned: dict[ReadKey, _Abandoned] = {}
        self._report = WorkerReport()
        self._must_report = False
        self._failures: set[str] = set()

    def start_load_kv(self, metadata: NixlConnectorMetadata) -> None:
        """Start this step's reads and take its orders."""
        if isinstance(metadata, TurncacheMetadata):
            now = self._clock()
            for request_id, left_s in metadata.deadlines_s.items():
                self._deadlines[request_id] = now + left_s
            self._attempts.update(metadata.attempts)
            self._failures |= metadata.failures
            self._must_report = metadata.report
            for peer in metadata.handshakes:
                self._ensure_handshake(peer.engine_id, peer.host, peer.port, peer.tp_size)
        super().start_load_kv(metadata)

    def _read_blocks_for_req(self, req_id: str, meta: ReqMeta) -> None:
        # A handshake can end after its request was abandoned; by then the blocks belong
        # to somebody else, or to a second pull of the same request. What awaits nothing (a
        # stock hand-over that found all in the own cache) only lets the source go.
        if not meta.awaiting_kvs or self._recving_metadata.get(req_id) is meta:
            super()._read_blocks_for_req(req_id, meta)

    def get_transfer_results(self) -> KVConnectorTransferResults:
        """Report what has finished, what was abandoned and what was refused."""
        results = super().get_transfer_results()
        for request_id in results.finished_recving:
            self._deadlines.pop(request_id, None)
            self._attempts.pop(request_id, None)
        # Only now: after a long step a read that is done in time is looked at late.
        late = self._abandon_late()
        self._poll_abandoned()
        failed = late | self._failures
        self._failures = set()
        results.finished_recving |= failed
        results.failed_recving |= failed
        return results

    def _abandon_late(self) -> set[str]:
        now = self._clock()
        late = {request_id for request_id, at in self._deadlines.items() if at <= now}
        gone: set[str] = set()
        for request_id in late:
            del self._deadlines[request_id]
            read = (request_id, self._attempts.pop(request_id, 0))
            meta = self._recving_metadata.pop(request_id, None)
            if meta is None or meta.remote is None:
                continue
            handles = self._recving_transfers.pop(request_id, [])
            self._pending_recv_notifs.pop(request_id, None)
            logger.warning(
                "turncache: the read for %s passed its deadline and is abandoned; "
                "%d transfers are still open",
                request_id,
                len(handles),
            )
            if handles:
                self._abandoned[read] = _Abandoned(meta.remote.engine_id, handles)
                self._report.abandoned[read] = 1
            gone.add(request_id)
        return gone

    def _poll_abandoned(self) -> None:
        for read, abandoned in list(self._abandoned.items()):
            abandoned.handles = [h for h in abandoned.handles if not self._is_gone(h)]
            if not abandoned.handles:
                del self._abandoned[read]
                self._report.released[read] = 1

    def _is_gone(self, handle: int) -> bool:
        try:
            if self.nixl_wrapper.check_xfer_state(handle) == "PROC":
                return False
        except Exception:
            logger.debug("turncache: state of an abandoned transfer is unknown", exc_info=True)
        # An error state does not mean that the backend has stopped writing: only a
        # handle that can be released proves it.
        return self._try_release_xfer_handle("abandoned", handle)

    def _engines_with_inflight_transfers(self) -> set[str]:
        engines: set[str] = super()._engines_with_inflight_transfers()
        return engines | {abandoned.engine_id for abandoned in self._abandoned.values()}

    def _cleanup_remote_engines(self) -> None:
        # Of replaced peers vLLM spares those whose reads it knows; the descriptors that an
        # abandoned transfer uses must live as long as the transfer. Invalid peers it spares
        # by _engines_with_inflight_transfers.
        known = self._engine_by_address.values()
        if all(abandoned.engine_id in known for abandoned in self._abandoned.values()):
            super()._cleanup_remote_engines()

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Report none: whole requests fail, because block ids are ambiguous across groups."""
        super().get_block_ids_with_load_errors()
        return set()

    def take_report(self) -> WorkerReport | None:
        """Return what is to be told to the scheduler side, None for nothing."""
        if not (
            self._must_report or self._report.abandoned or self._report.released or self._abandoned
        ):
            return None
        report, self._report = self._report, WorkerReport()
        return report

    def shutdown(self) -> None:
        """Release what was abandoned, then everything else."""
        for abandoned in getattr(self, "_abandoned", {}).values():
            for handle in abandoned.handles:
                self._try_release_xfer_handle("abandoned", handle)
        super().shutdown()
