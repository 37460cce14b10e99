"""Our connectors with the test's clock, and another one beside them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    SupportsHMA,
)

from tests.builders.configuration import BLOCK
from turncache_server.connector.pair_scheduler import PairScheduler
from turncache_server.connector.retention_connector import RetentionConnector
from turncache_server.connector.turncache_connector import TurncacheConnector

if TYPE_CHECKING:
    from tests.builders.engines import Engine

#: Engines under construction, by engine id: vLLM makes connectors by class name alone.
MAKING: dict[str, Engine] = {}


class WiredConnector(TurncacheConnector):
    """``TurncacheConnector`` with the test's clock and, where it has some, peers."""

    def _make_scheduler(self, vllm_config: Any, kv_cache_config: Any, settings: Any) -> Any:
        engine = MAKING[self.engine_id]
        return PairScheduler(
            vllm_config,
            self.engine_id,
            kv_cache_config,
            settings,
            peers=engine.peers,  # type: ignore[arg-type]  # stands for PeerBook
            directory=engine.directory,
            clock=lambda: engine.world.now_s,
        )


class ClockedRetention(RetentionConnector):
    """``RetentionConnector`` with the test's clock."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        engine = MAKING[str(vllm_config.kv_transfer_config.engine_id)]
        assert self._extension is not None
        assert self._reporter is not None
        self._extension._clock = self._reporter._clock = lambda: engine.world.now_s


@dataclass
class SiblingLoads(KVConnectorMetadata):
    """One step's loads of a :class:`Sibling`: (request, block ids, whether they arrive)."""

    loads: list[tuple[str, list[int], bool]] = field(default_factory=list)


class Sibling(KVConnectorBase_V1, SupportsHMA):
    """Another connector beside ours in a ``MultiConnector``; its loads are armed by the test.

    Attributes:
        armed: request id to (tokens in all, loads synchronously, whether they arrive).
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.armed: dict[str, tuple[int, bool, bool]] = {}
        self._loads: list[tuple[str, list[int], bool]] = []
        self.seen_params: list[Any] = []

    def on_new_request(self, request: Any) -> None:
        """Keep what reaches it."""
        self.seen_params.append(request.kv_transfer_params)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Offer what is armed, once."""
        count, synchronous, _ = self.armed.get(request.request_id, (0, True, True))
        return max(0, count - num_computed_tokens), not synchronous

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Load into the blocks that follow the local hit."""
        if num_external_tokens:
            count, _, arrives = self.armed.pop(request.request_id)
            first = (count - num_external_tokens) // BLOCK
            ids = [block.block_id for block in blocks.blocks[0][first : count // BLOCK]]
            self._loads.append((request.request_id, ids, arrives))

    def build_connector_meta(self, scheduler_output: Any) -> SiblingLoads:
        """Give the workers this step's loads."""
        loads, self._loads = self._loads, []
        return SiblingLoads(loads)

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        """Nothing is kept."""
        return False, None

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """The engine's model of memory does it."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Likewise."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **k: Any) -> None:
        """Saves nothing."""

    def wait_for_save(self) -> None:
        """Saves nothing."""
