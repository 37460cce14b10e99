"""Copies between a rank's memory and the host, below vLLM's own offloading worker."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Final

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker import OffloadingConnectorWorker
from vllm.v1.kv_offload.base import TransferResult

from tests.builders.content import Memory

#: What vLLM's offloading connector gives a block on the host, by its own alignment.
HOST_BLOCK_BYTES: Final = 4096


class HostCopies:
    """Stands for the copies between a rank's memory and the host that vLLM starts on a GPU.

    A copy happens as late as it may: when it is waited for, or a step after it was ordered.
    """

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._host: dict[int, list[int]] = {}
        self._ordered: dict[int, Callable[[], None]] = {}
        self._new: set[int] = set()
        self._done: list[int] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        """Order a copy to the host."""

        def copy() -> None:
            for block_id, place in zip(src_spec.block_ids, dst_spec.block_ids, strict=True):
                self._host[int(place)] = list(self._memory.slots[int(block_id)])

        return self._order(job_id, copy)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        """Order a copy from the host."""

        def copy() -> None:
            for place, block_id in zip(src_spec.block_ids, dst_spec.block_ids, strict=True):
                self._memory.slots[int(block_id)][:] = self._host[int(place)]

        return self._order(job_id, copy)

    def _order(self, job_id: int, copy: Callable[[], None]) -> bool:
        self._ordered[job_id] = copy
        self._new.add(job_id)
        return True

    def wait(self, job_ids: set[int]) -> None:
        """Copy now."""
        for job_id in sorted(job_ids & set(self._ordered)):
            self._ordered.pop(job_id)()
            self._done.append(job_id)

    def get_finished(self) -> list[TransferResult]:
        """Copy what was ordered a step ago, and report."""
        new, self._new = self._new, set()
        self.wait(set(self._ordered) - new)
        done, self._done = self._done, []
        return [TransferResult(job_id=job_id, success=True) for job_id in done]


def host_tier(memory: Memory) -> OffloadingConnectorWorker:
    """Make vLLM's own worker side of offloading, over copies of ours."""
    spec = SimpleNamespace(
        replicated_layout=False,
        config=SimpleNamespace(canonical_layout=False, parallel=SimpleNamespace(rank=0)),
    )
    worker = OffloadingConnectorWorker(spec, None, None)  # type: ignore[arg-type]
    worker.worker = HostCopies(memory)  # type: ignore[assignment]
    return worker
