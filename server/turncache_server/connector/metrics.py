"""The extension's numbers in vLLM's own ``/metrics``, beside those of NIXL.

vLLM carries a connector's statistics from the engine core (and from the workers, merged) to
the API server's process, where they become Prometheus metrics. One class carries ours and
NIXL's, because vLLM adds up what scheduler side and workers report of one connector.

Totals travel as differences, so that nothing is lost or counted twice when reports are
merged; gauges as they are, the latest one counts. Labels are closed sets.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, Final

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.stats import NixlKVConnectorStats

from turncache_server.connector.metric_table import (
    BUCKETS_S,
    COUNTER_METRICS,
    GAUGE_METRICS,
    HISTOGRAM_METRICS,
    Metric,
)

logger = logging.getLogger(__name__)

COUNTERS: Final = "counters"
GAUGES: Final = "gauges"
SAMPLES: Final = "samples"
NIXL: Final = "nixl"


class TurncacheStats(KVConnectorStats):
    """What the extension, and NIXL below it, have to report since the last time.

    ``data`` holds ``counters`` (differences), ``gauges``, ``samples`` (what was measured, one
    number each time), and ``nixl`` (vLLM's own).
    """

    data: dict[str, Any]

    def __init__(self, data: dict[str, Any] | None = None) -> None:
        self.data = {} if data is None else data
        for part in (COUNTERS, GAUGES, SAMPLES, NIXL):
            self.data.setdefault(part, {})

    def reset(self) -> None:
        """Forget everything."""
        self.data = {COUNTERS: {}, GAUGES: {}, SAMPLES: {}, NIXL: {}}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Add another report of the same connector."""
        counters = self.data[COUNTERS]
        for name, value in other.data.get(COUNTERS, {}).items():
            counters[name] = counters.get(name, 0.0) + value
        self.data[GAUGES] = {**self.data[GAUGES], **other.data.get(GAUGES, {})}
        for part in (SAMPLES, NIXL):
            lists = self.data[part]
            for name, values in other.data.get(part, {}).items():
                lists[name] = [*lists.get(name, ()), *values]
        return self

    def reduce(self) -> dict[str, int | float]:
        """Return what vLLM's periodic log line shows."""
        shown = ("local_tokens", "returned_tokens", "computed_tokens", "lost_tokens")
        counters, nixl = self.data[COUNTERS], self.data[NIXL]
        ours = {f"turncache {name}": counters[name] for name in shown if name in counters}
        return {**ours, **(NixlKVConnectorStats(data=nixl).reduce() if nixl else {})}

    def is_empty(self) -> bool:
        """Say whether there is nothing to report."""
        lists = (*self.data[SAMPLES].values(), *self.data[NIXL].values())
        return not (self.data[COUNTERS] or self.data[GAUGES] or any(map(bool, lists)))


class Reporter:
    """Makes reports of one engine, on the engine thread.

    Args:
        counters: totals since start.
        gauges: the present.
        clock: monotonic seconds.
        samples: takes what was measured since the last time.
    """

    #: Without a call that has ended, so often: for gauges.
    EVERY_S: Final = 1.0
    #: When calls have ended, so often, unless the engine falls idle: counting takes as long as
    #: vLLM takes to schedule a request.
    HURRY_EVERY_S: Final = 0.1

    def __init__(
        self,
        counters: Callable[[], Mapping[str, float]],
        gauges: Callable[[], Mapping[str, float]],
        clock: Callable[[], float],
        samples: Callable[[], Mapping[str, list[float]]] = dict,
    ) -> None:
        self._counters = counters
        self._samples = samples
        self._gauges = gauges
        self._clock = clock
        self._told: dict[str, float] = {}
        self._told_at_s = self._next_s = float("-inf")
        self._ended = False

    def hurry(self, *, last: bool) -> None:
        """Report soon: a call has ended.

        Args:
            last: no other is in flight, so that another step may not come soon.
        """
        soon_s = self._told_at_s if last else self._told_at_s + self.HURRY_EVERY_S
        if soon_s < self._next_s:  # noqa: PLR1730 - min() is a call per call that ends
            self._next_s = soon_s

    def report(self) -> TurncacheStats | None:
        """Return what has changed, None while it is not yet time.

        Called in the engine's loop: a report that fails is the last one, and no more.
        """
        now_s = self._clock()
        if self._ended or now_s < self._next_s:
            return None
        try:
            return self._report(now_s)
        except Exception:
            logger.exception("turncache: metrics cannot be read and end here")
            self._ended = True
            return None

    def _report(self, now_s: float) -> TurncacheStats:
        self._told_at_s, self._next_s = now_s, now_s + self.EVERY_S
        totals = dict(self._counters())
        changed = {
            name: value - self._told.get(name, 0.0)
            for name, value in totals.items()
            if value > self._told.get(name, 0.0)
        }
        self._told = totals
        measured = {name: values for name, values in self._samples().items() if values}
        return TurncacheStats(
            data={COUNTERS: changed, GAUGES: dict(self._gauges()), SAMPLES: measured}
        )


class TurncacheMetrics(KVConnectorPromMetrics):
    """Prometheus metrics in the API server's process.

    Args:
        vllm_config: vLLM's.
        metric_types: classes to make metrics of, by Prometheus' own.
        labelnames: vLLM's labels of every metric.
        per_engine_labelvalues: their values by engine.
        nixl: vLLM's metrics of NIXL, None for a connector that transfers nothing.
    """

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
        *,
        nixl: KVConnectorPromMetrics | None = None,
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._nixl = nixl
        self._made = {
            metric.name: cls(
                name=metric.name,
                documentation=metric.text,
                labelnames=[*labelnames, *([metric.label] if metric.label else [])],
                **more,
            )
            for metrics, cls, more in (
                (COUNTER_METRICS, self._counter_cls, {}),
                (GAUGE_METRICS, self._gauge_cls, {"multiprocess_mode": "mostrecent"}),
                (HISTOGRAM_METRICS, self._histogram_cls, {"buckets": BUCKETS_S}),
            )
            for metric in metrics
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Take one report."""
        for metric, value, label in _values(COUNTER_METRICS, transfer_stats_data.get(COUNTERS)):
            self._child(metric, label, engine_idx).inc(value)
        for metric, value, label in _values(GAUGE_METRICS, transfer_stats_data.get(GAUGES)):
            self._child(metric, label, engine_idx).set(value)
        samples = transfer_stats_data.get(SAMPLES) or {}
        for metric in HISTOGRAM_METRICS:
            for value in samples.get(metric.keys[""], ()):
                self._child(metric, "", engine_idx).observe(value)
        if self._nixl is not None and transfer_stats_data.get(NIXL):
            self._nixl.observe(transfer_stats_data[NIXL], engine_idx)

    def _child(self, metric: Metric, label: str, engine_idx: int) -> Any:
        labels = [*self.per_engine_labelvalues[engine_idx], *([label] if metric.label else [])]
        return self._made[metric.name].labels(*labels)


def _values(
    metrics: tuple[Metric, ...], data: Mapping[str, float] | None
) -> list[tuple[Metric, float, str]]:
    return [
        (metric, data[key], label)
        for metric in metrics
        for label, key in metric.keys.items()
        if data and key in data
    ]
