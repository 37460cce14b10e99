"""``TurncacheConnector``: retention and the verified pull, on prefill and decode engines.

A thin facade over vLLM's NIXL pull connector: the scheduler side forwards to
:class:`~turncache_server.connector.pair_scheduler.PairScheduler`, the worker side to
:class:`~turncache_server.connector.worker.TurncacheWorker`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorRole,
    KVConnectorWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import NixlBaseConnector
from vllm.platforms import current_platform

from turncache.errors import ConfigError
from turncache_server.connector import _compat
from turncache_server.connector.config import Settings, parse_settings
from turncache_server.connector.metrics import NIXL, TurncacheMetrics, TurncacheStats
from turncache_server.connector.pair_scheduler import PairScheduler
from turncache_server.connector.worker import TurncacheWorker


class TurncacheConnector(NixlBaseConnector):
    """Pulls verified KV from peers, in both directions, and keeps sessions' KV."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        transfer = vllm_config.kv_transfer_config
        settings = parse_settings(transfer.kv_connector_extra_config)
        if transfer.kv_role != "kv_both":
            raise ConfigError(
                "kv_role",
                f"{transfer.kv_role!r}: an engine that loads runs as 'kv_both' (say what it is "
                "with turncache.side); as anything else vLLM does not fence reads against a "
                "step that is still writing",
            )
        if transfer.kv_load_failure_policy != "recompute":
            raise ConfigError(
                "kv_load_failure_policy",
                f"{transfer.kv_load_failure_policy!r}: expected 'recompute', with anything else "
                "a lost cache entry would fail the request",
            )
        if transfer.get_from_extra_config("bidirectional_kv_xfer", False):
            raise ConfigError(
                "bidirectional_kv_xfer",
                "True: the stock return path does not check content; remove it, "
                "TurncacheConnector returns KV itself",
            )
        if transfer.kv_buffer_device == "cpu" and current_platform.device_type != "cpu":
            raise ConfigError(
                "kv_buffer_device",
                f"'cpu' on {current_platform.device_type}: peers would read a host buffer that "
                f"nobody fills; expected {current_platform.device_type!r}",
            )
        super().__init__(vllm_config, role, kv_cache_config)
        if role is KVConnectorRole.SCHEDULER:
            self.connector_scheduler = self._make_scheduler(vllm_config, kv_cache_config, settings)
        else:
            self.connector_worker = TurncacheWorker(vllm_config, self.engine_id, kv_cache_config)

    def _make_scheduler(
        self, vllm_config: Any, kv_cache_config: Any, settings: Settings
    ) -> PairScheduler:
        """Make the scheduler side; where a test puts other peers and another clock."""
        return PairScheduler(vllm_config, self.engine_id, kv_cache_config, settings)

    @property
    def requires_kv_delivery(self) -> bool:
        """False: a lost hand-over is recomputed, so preempted requests keep their output."""
        return False

    # --- scheduler side ----------------------------------------------------------------------

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        """Take the free queue over and start answering."""
        super().bind_kv_cache_manager(kv_cache_manager)
        if self.connector_scheduler is not None:
            self.connector_scheduler.bind(kv_cache_manager.block_pool)

    def take_events(self) -> Iterable[Any]:
        """Mark what the oldest step has written; called once per processed step."""
        if self.connector_scheduler is not None:
            self.connector_scheduler.step_processed()
        return ()

    def has_pending_push_work(self) -> bool:
        """Say that a step is due, to learn whether an abandoned transfer is gone."""
        if self.connector_scheduler is None:
            return False
        return self.connector_scheduler.has_pending_push_work()

    # --- metrics ------------------------------------------------------------------------------

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """Return what vLLM is to carry to its ``/metrics``: ours, and on workers NIXL's."""
        if self.connector_scheduler is not None:
            return self.connector_scheduler.report()
        stock = super().get_kv_connector_stats()
        return None if stock is None else TurncacheStats(data={NIXL: stock.to_dict()})

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats:
        """Make a report of what has travelled between processes."""
        return TurncacheStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> TurncacheMetrics:
        """Make the Prometheus metrics, NIXL's too; called in the API server's process."""
        nixl = super().build_prom_metrics(
            vllm_config, metric_types, labelnames, per_engine_labelvalues
        )
        return TurncacheMetrics(
            vllm_config, metric_types, labelnames, per_engine_labelvalues, nixl=nixl
        )

    # --- worker side ---------------------------------------------------------------------------

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Start this step's reads."""
        if self.connector_worker is not None:
            self.connector_worker.start_load_kv(self._connector_metadata)

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """Report abandoned reads, and anything at all while verifications are pending."""
        worker: TurncacheWorker | None = self.connector_worker
        return None if worker is None else worker.take_report()


_compat.make_known(TurncacheConnector.__name__)
