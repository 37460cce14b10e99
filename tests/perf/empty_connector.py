"""A connector that does nothing: what vLLM does for having one is all that it costs."""

from __future__ import annotations

from typing import Any, Final

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    SupportsHMA,
)

_NOTHING: Final = KVConnectorMetadata()


class EmptyConnector(KVConnectorBase_V1, SupportsHMA):
    """Finds, loads, saves and delays nothing."""

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Find nothing."""
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Note nothing."""

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """Tell the workers nothing."""
        return _NOTHING

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        """Delay nothing."""
        return False, None

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Load nothing."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Load nothing."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **k: Any) -> None:
        """Save nothing."""

    def wait_for_save(self) -> None:
        """Save nothing."""
