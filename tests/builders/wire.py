"""The wire: reads between engines, and vLLM's NIXL worker with ours on top of it."""

from __future__ import annotations

import functools
import queue
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from tests.builders.configuration import BLOCK
from tests.builders.content import Memory
from turncache_server.connector.worker import PULL_PREFIX, TurncacheWorker

if TYPE_CHECKING:
    from tests.builders.engines import World


@dataclass(eq=False)
class Transfer:
    """One read on the wire.

    Attributes:
        pieces: (source block, destination block, half) that were not copied yet.
        told: tells the source, once, that it has been read.
        stock: it is of a stock hand-over.
        state: what NIXL says of it: ``PROC``, ``DONE`` or ``ERR``.
        releasable: whether the backend gives the handle up in its present state.
        released: the handle was given back.
    """

    source: Memory
    destination: Memory
    pieces: list[tuple[int, int, int]]
    told: Callable[[], None] = lambda: None
    stock: bool = False
    state: str = "PROC"
    releasable: bool = True
    released: bool = False

    def advance(self, count: int | None = None) -> None:
        """Copy some half blocks, all of them by default; the last one completes the read."""
        half = BLOCK // 2
        count = len(self.pieces) if count is None else count
        for source, destination, which in self.pieces[:count]:
            at = slice(which * half, (which + 1) * half)
            self.destination.slots[destination][at] = self.source.slots[source][at]
        del self.pieces[:count]
        if not self.pieces and self.state == "PROC":
            self.state = "DONE"
            self.told()

    def fail(self, *, still_writing: bool = False) -> None:
        """End in an error, with or without the backend still writing."""
        self.state = "ERR"
        self.releasable = not still_writing

    def stop_writing(self) -> None:
        """Let the backend be done with it, whatever has arrived."""
        self.pieces.clear()
        self.releasable = True
        if self.state == "PROC":
            self.state = "DONE"


class Wire:
    """Stands for the NIXL agent of one rank, as vLLM's worker calls it."""

    def __init__(self, world: World, memory: Memory, rank: int) -> None:
        self._world = world
        self._memory = memory
        self._rank = rank
        self.transfers: dict[int, Transfer] = {}
        self.notices: list[bytes] = []

    def make_prepped_xfer(
        self,
        operation: str,
        local_handle: Any,
        local_ids: Any,
        remote_handle: str,
        remote_ids: Any,
        *,
        notif_msg: bytes,
    ) -> int:
        assert operation == "READ"
        source = self._world.engines[remote_handle].memories[self._rank]
        pieces = [
            (int(there), int(here), half)
            for here, there in zip(local_ids, remote_ids, strict=True)
            for half in (0, 1)
        ]
        self._world.shuffle(pieces)
        handle = self._world.next_handle()
        tell = functools.partial(self.send_notif, f"agent-{remote_handle}", notif_msg)
        self.transfers[handle] = Transfer(
            source, self._memory, pieces, tell, stock=not notif_msg.startswith(PULL_PREFIX.encode())
        )
        return handle

    def transfer(self, handle: int) -> None:
        self._world.transfer_started(self.transfers[handle])

    def check_xfer_state(self, handle: int) -> str:
        return self.transfers[handle].state

    def get_xfer_telemetry(self, handle: int) -> None:
        assert self.transfers[handle].state == "DONE"

    def release_xfer_handle(self, handle: int) -> None:
        transfer = self.transfers[handle]
        if transfer.state == "PROC" or not transfer.releasable:
            raise RuntimeError("the backend still writes")
        transfer.released = True
        del self.transfers[handle]

    def check_remote_metadata(self, agent: str) -> bool:
        return True

    def get_new_notifs(self) -> dict[str, list[bytes]]:
        notices, self.notices = self.notices, []
        return {"peer": notices} if notices else {}

    def send_notif(self, agent: str, notif_msg: bytes) -> None:
        source = self._world.engines[agent.removeprefix("agent-")].workers[self._rank]
        source.nixl_wrapper.notices.append(notif_msg)


class _NoStats:
    """Takes what NIXL would count."""

    def __getattr__(self, name: str) -> Any:
        return (lambda: True) if name == "is_empty" else (lambda *_: None)


class WiredWorker(TurncacheWorker):
    """Our worker and vLLM's NIXL worker below it, on a wire of ours instead of an agent.

    Made without vLLM's constructor, which wants a device; the attributes are those that its
    pull path reads after a handshake with peers of equal shape.
    """

    def __init__(self, world: World, memory: Memory, rank: int) -> None:
        self.nixl_wrapper = Wire(world, memory, rank)
        self.xfer_stats = _NoStats()
        self.engine_id = "self"
        self.block_size = BLOCK
        self.kv_cache_config = SimpleNamespace(transfer_groups=[object()])
        self.transfer_topo = SimpleNamespace(
            get_engine_info=lambda _: SimpleNamespace(
                remote_tp_size=1,
                remote_dcp_size=1,
                remote_block_size=BLOCK,
                remote_physical_blocks_per_logical=1,
            ),
            tp_ratio=lambda _: 1,
            block_size_ratio=lambda _: 1,
            unregister_remote_engine=lambda _: None,
        )
        self.tp_rank = rank
        for name in ("pcp_rank", "_lease_extension", "_engine_ttl"):
            setattr(self, name, 0)
        for name in ("dcp_size", "_physical_blocks_per_logical_kv_block", "num_regions"):
            setattr(self, name, 1)
        for name in (
            "pcp_dcp_sharded", "use_mla", "_has_mamba", "_mixed_mem_types", "use_host_buffer",
            "_bidirectional_kv_xfer_enabled", "_uses_region_group_mapping", "_skip_dram_xfer",
            "enable_permute_local_kv", "enable_heterogeneous_attn_post_process",
            "_is_hma_required", "_hb_handshake_notif_only",
        ):  # fmt: skip
            setattr(self, name, False)
        for name in (
            "_recving_metadata", "_recving_transfers", "_pending_recv_notifs", "_reqs_to_send",
            "_remote_agents", "_engine_last_active", "_engine_by_address", "tp_mappings",
            "dst_xfer_side_handles", "dst_num_blocks", "dst_region_num_blocks",
            "dst_region_group_ids", "dst_uses_region_group_mapping", "dst_region_mem_types",
            "kv_caches_base_addr", "_engine_clock_offset", "_invalid_engine_backoff",
            "_handshake_futures",
        ):  # fmt: skip
            setattr(self, name, {})
        for name in (
            "_recv_failures", "_replicated_pcp_done_sending", "_invalid_remote_engines",
            "_failed_remote_engines", "_reqs_to_process",
        ):  # fmt: skip
            setattr(self, name, set())
        for name in ("_ready_requests", "_failed_recv_reqs", "_invalid_block_ids"):
            setattr(self, name, queue.Queue())
        self.consumer_notification_counts_by_req: Counter[str] = Counter()
        self.expected_consumer_notifications_by_req: dict[str, int] = {}
        self._transfer_layer_group_ids: list[int] = []
        self.region_group_ids = [0]
        self.block_len_per_layer = [1]
        self._handshake_lock = threading.RLock()
        self.src_xfer_handles_by_block_size = {BLOCK: "local"}
        self.dst_num_blocks["self"] = len(memory.slots)
        self.greeted: list[str] = []
        self._init_ours(lambda: world.now_s)

    def _log_failure(self, *args: Any, **kwargs: Any) -> None:
        """Keep quiet: failures are made on purpose."""

    def greet(self, engine_id: str, num_blocks: int) -> None:
        """Be as after a handshake."""
        self._remote_agents[engine_id] = {(0, 0): f"agent-{engine_id}"}
        self._engine_by_address[engine_id, 1] = engine_id
        self.tp_mappings[engine_id] = SimpleNamespace(
            all_source_ranks=[0], source_ranks_per_group=[[0]], local_consumers=1
        )
        self.dst_xfer_side_handles[engine_id] = {0: engine_id}
        self.dst_num_blocks[engine_id] = num_blocks
        self.dst_region_group_ids[engine_id] = [0]
        self.dst_uses_region_group_mapping[engine_id] = False

    def _ensure_handshake(self, engine_id: str, *args: Any, **kwargs: Any) -> None:
        self.greeted.append(engine_id)

    def shutdown(self) -> None:
        """Nothing to give back."""
