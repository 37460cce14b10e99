"""``RetentionConnector``: retention on one ordinary vLLM, alone or in a ``MultiConnector``.

A thin facade: every hook forwards to :class:`~turncache_server.connector.extension.Extension`.
"""

from __future__ import annotations

import logging
import time
from typing import Any, Final

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats

from turncache.errors import ConfigError
from turncache_server.connector import _compat
from turncache_server.connector.config import (
    SECTION,
    Find,
    engine_facts,
    of_rank,
    parse_settings,
)
from turncache_server.connector.extension import Extension
from turncache_server.connector.metrics import Reporter, TurncacheMetrics, TurncacheStats
from turncache_server.connector.observing import Observer
from turncache_server.connector.service import Service, fleet_keys, open_control
from turncache_server.connector.versions import settings_for
from turncache_server.control.server import ControlServer

logger = logging.getLogger(__name__)

_NOTHING: Final = KVConnectorMetadata()


class RetentionConnector(KVConnectorBase_V1, SupportsHMA):
    """Keeps sessions' KV over their waits; moves nothing between engines."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        settings = parse_settings(transfer.kv_connector_extra_config)
        if transfer.kv_connector == type(self).__name__ and transfer.kv_role != "kv_producer":
            raise ConfigError(
                "kv_role",
                f"{transfer.kv_role!r}: RetentionConnector loads nothing and runs as "
                "'kv_producer'; any other role changes how vLLM frees blocks",
            )
        if settings.foreign_router or settings.find is not Find.HINTS:
            name = "foreign_router" if settings.foreign_router else "find"
            raise ConfigError(
                f"{SECTION}.{name}",
                "set for RetentionConnector, which moves nothing between engines: leave it out, "
                "or use TurncacheConnector",
            )
        self._extension: Extension | None = None
        self._control: ControlServer | None = None
        self._reporter: Reporter | None = None
        self._observer: Observer | None = None
        if role is KVConnectorRole.SCHEDULER:
            facts = engine_facts(vllm_config, kv_cache_config, _compat.VLLM_VERSION)
            settings = settings_for(settings, facts.vllm_version)
            settings = of_rank(settings, vllm_config.parallel_config.data_parallel_index)
            self._observer = Observer(facts, settings)
            self._extension = Extension(
                facts,
                settings,
                answered=_compat.ANSWERED,
                recorder=self._observer.recorder,
                readable=False,
            )
            self._reporter = Reporter(
                self._extension.counters, self._extension.gauges, time.monotonic
            )
            self._control = open_control(
                self._extension,
                Service(self._extension, fingerprint={}),
                fleet_keys(settings),
            )

    @property
    def requires_kv_delivery(self) -> bool:
        """False: nothing is handed to anybody, so preempted requests keep their output."""
        return False

    # --- scheduler side --------------------------------------------------------------------

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        """Take the free queue over and start answering."""
        super().bind_kv_cache_manager(kv_cache_manager)
        if self._extension is not None:
            self._extension.bind(kv_cache_manager.block_pool)
        if self._control is not None:
            self._control.start()

    def on_new_request(self, request: Any) -> None:
        """Admit a request to its session."""
        if request.kv_transfer_params is not None and not isinstance(
            request.kv_transfer_params, dict
        ):
            # vLLM reads members of it in the engine thread right after this hook.
            request.kv_transfer_params = None
        if self._extension is not None:
            self._extension.arrived(request)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Load nothing; note the local hit."""
        if self._extension is not None:
            self._extension.looked_at(request, num_computed_tokens)
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Put the record of an admitted request."""
        if self._extension is not None:
            self._extension.admitted(request, None)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """Hear of the step; there is nothing to tell the workers."""
        if self._extension is not None:
            self._extension.step_scheduled(scheduler_output)
        return _NOTHING

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Keep the call's blocks wanted; never delay their freeing.

        Only one group is supported: more have switched the extension off.
        """
        extension, reporter = self._extension, self._reporter
        if extension is not None and reporter is not None:
            extension.finished(request, block_ids[0])
            reporter.hurry(last=extension.idle)
        return False, None

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Likewise; a ``MultiConnector`` asks so when a sibling knows no groups."""
        return self.request_finished_all_groups(request, (block_ids,))

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """Return what vLLM is to carry to its ``/metrics``.

        The scheduler asks once per processed step, so this is where we hear of its end as well.
        """
        extension, reporter = self._extension, self._reporter
        if extension is None or reporter is None:
            return None
        extension.step_processed()
        return reporter.report()

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
        """Make the Prometheus metrics; called in the API server's process."""
        return TurncacheMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        """Close the control socket, and end the ghost."""
        if self._control is not None:
            self._control.close()
        if self._observer is not None:
            self._observer.close()

    # --- worker side: nothing to do ----------------------------------------------------------

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Load nothing."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Load nothing."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Save nothing."""

    def wait_for_save(self) -> None:
        """Save nothing."""


_compat.make_known(RetentionConnector.__name__)
