"""What engines count: their ``/metrics``, as differences over a block. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Final

_LINE: Final = re.compile(r"^(?P<name>[a-zA-Z_:][\w:]*)(?:\{(?P<labels>.*)\})? (?P<value>\S+)")
_LABEL: Final = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')

#: Counters by our names. vLLM's transfer time is without the time to post: both count.
_COUNTERS: Final = {
    "vllm:nixl_xfer_time_seconds_sum": "transfer_s",
    "vllm:nixl_post_time_seconds_sum": "transfer_s",
    "vllm:nixl_xfer_time_seconds_count": "transfers",
    "vllm:nixl_bytes_transferred_sum": "transfer_bytes",
    "vllm:nixl_num_failed_transfers_total": "failed_transfers",
    "vllm:nixl_num_kv_expired_reqs_total": "expired",
    "vllm:num_preemptions_total": "preemptions",
    "vllm:prompt_tokens_total": "prompt_tokens",
    "vllm:generation_tokens_total": "answer_tokens",
}
_SOURCES: Final = {
    "local_compute": "computed_tokens",
    "local_cache_hit": "local_tokens",
    "external_kv_transfer": "external_tokens",
}
_BY_SOURCE: Final = ("vllm:prompt_tokens_by_source", "vllm:prompt_tokens_by_source_total")

COUNTERS: Final = tuple(dict.fromkeys([*_COUNTERS.values(), *_SOURCES.values()]))


def samples(metrics: str) -> Iterable[tuple[str, dict[str, str], float]]:
    """Yield (name, labels, value) of every sample; lines that are none are left out."""
    for line in metrics.splitlines():
        found = _LINE.match(line)
        if found is None:
            continue
        try:
            value = float(found["value"])
        except ValueError:
            continue
        yield found["name"], dict(_LABEL.findall(found["labels"] or "")), value


def read_counters(metrics: str) -> dict[str, float]:
    """Return the counters that an engine has; what it does not count is not there."""
    out: dict[str, float] = {}
    for name, labels, value in samples(metrics):
        ours = _COUNTERS.get(name)
        if name in _BY_SOURCE:
            ours = _SOURCES.get(labels.get("source", ""))
        if ours is not None:
            out[ours] = out.get(ours, 0.0) + value
    return out


def read_gauge(metrics: str, name: str) -> float | None:
    """Return a gauge, summed over its labels; None where it is not there."""
    found = [value for each, _, value in samples(metrics) if each == name]
    return sum(found) if found else None


def prefix_caching(metrics: str) -> str | None:
    """Return what an engine says of its prefix cache, None when it does not say."""
    for name, labels, _ in samples(metrics):
        if name == "vllm:cache_config_info" and "enable_prefix_caching" in labels:
            return labels["enable_prefix_caching"]
    return None


def difference(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """Return what was counted between two readings.

    A counter that went back belongs to an engine that was started again: what it has now
    is all that can be said.
    """
    return {
        name: value - before.get(name, 0.0) if value >= before.get(name, 0.0) else value
        for name, value in after.items()
    }


def added(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Add counters of several engines."""
    out: dict[str, float] = {}
    for part in parts:
        for name, value in part.items():
            out[name] = out.get(name, 0.0) + value
    return out
