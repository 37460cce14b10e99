"""The extension's numbers on their way into vLLM's ``/metrics``."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

from tests.builders import BLOCK, Conversation, Engine, World, pair, tokens, world
from turncache.protocol import Reason
from turncache_server import connector as ours
from turncache_server.connector.metric_table import COUNTER_METRICS, GAUGE_METRICS
from turncache_server.connector.metrics import (
    NIXL,
    TurncacheStats,
)


@pytest.fixture
def made() -> Iterator[World]:
    """Engines on a wire."""
    with world() as made:
        yield made


class Exposed:
    """What an engine's ``/metrics`` would show: every report, as it crosses processes."""

    def __init__(self, engine: Engine, *, nixl: bool = False) -> None:
        self.registry = CollectorRegistry()
        types = {
            kind: functools.partial(kind, registry=self.registry)
            for kind in (Counter, Gauge, Histogram)
        }
        kind = ours.TurncacheConnector if nixl else ours.RetentionConnector
        self.metrics = kind.build_prom_metrics(engine.config, types, ["engine"], {0: ["0"]})
        self.num_reports = 0
        original = engine.scheduler.connector.get_kv_connector_stats

        def tapped() -> Any:
            report = original()
            if report is not None:
                self.take(report)
            return report

        engine.scheduler.connector.get_kv_connector_stats = tapped

    def take(self, report: Any) -> None:
        """Carry one report to the API server's process, and expose it."""
        self.num_reports += 1
        data = msgspec.msgpack.decode(msgspec.msgpack.encode(report.to_dict()))
        self.metrics.observe(TurncacheStats(data=data).to_dict(), 0)

    def __getitem__(self, sample: str) -> float:
        """Return a sample such as ``turncache_calls_total reason=ok``."""
        name, _, label = sample.partition(" ")
        key, _, value = label.partition("=")
        labels = {"engine": "0", **({key: value} if key else {})}
        return self.registry.get_sample_value(name, labels) or 0.0


def test_metrics_are_the_sum_of_the_records(made: World) -> None:
    """Token by token, and right after a call has ended: an idle engine makes no further step."""
    engine = Engine(made, connector="ClockedRetention")
    exposed = Exposed(engine)
    talk = Conversation("s")
    records = [engine.record(talk.call(engine, 30, max_tokens=8)) for _ in range(4)]
    for source in ("local", "returned", "computed"):
        expected = sum(getattr(record, source) for record in records)
        assert exposed[f"turncache_prompt_tokens_total source={source}"] == expected
    assert exposed["turncache_calls_total reason=new_session"] == 1
    assert exposed["turncache_calls_total reason=ok"] == 3
    assert exposed["turncache_sessions"] == 1
    assert exposed["turncache_mode mode=on"] == 1
    blocks = [
        exposed[f"turncache_blocks class={name}"] for name in ("used", "ordinary", "retained")
    ]
    assert sum(blocks) == engine.num_blocks - 1
    assert blocks[2] > 0


def test_what_was_lost_is_counted_with_its_reason(made: World) -> None:
    """The number that should be 0, and why it is not."""
    engine = Engine(
        made, connector="ClockedRetention", settings={"retain_budget": 0.0, "lend_after_s": 0}
    )
    exposed = Exposed(engine)
    talk = Conversation("s")
    talk.call(engine, 60)
    engine.flood(3 * engine.num_blocks)
    record = engine.record(talk.call(engine, 30))
    assert record.lost > 0
    assert exposed["turncache_lost_tokens_total reason=evicted"] == record.lost
    assert exposed["turncache_retention_broken_blocks_total cause=budget"] > 0


def test_pulls_are_counted_by_result(made: World) -> None:
    """And the blocks that came with them, the last one not full."""
    prefill, decode = pair(made)
    exposed = Exposed(prefill, nixl=True)
    talk = Conversation("s")
    talk.call(decode, 60, max_tokens=8)
    record = prefill.record(talk.call(prefill, 10, source="decode-0"))
    assert record.returned == 60 + 8 - 1
    assert exposed["turncache_pulls_total result=verified"] == 1
    assert exposed["turncache_pulled_rests_total"] == 1
    num_blocks = record.returned // BLOCK + 1
    assert exposed["turncache_pulled_blocks_total"] == num_blocks
    size_bytes = prefill.extension.facts.block_bytes
    assert exposed["turncache_transfer_bytes_total"] == num_blocks * size_bytes > 0
    assert exposed["turncache_transfer_seconds_count"] == 1
    prefill.call("x", talk.more(50), session="s", source="nobody")
    assert exposed["turncache_pulls_total result=source_unknown"] == 1


def test_pulls_that_are_never_begun_are_counted_by_why(made: World) -> None:
    """Decided on arrival or when the answer is there: whoever is asked gets one count."""
    prefill, decode = pair(made)
    exposed = Exposed(prefill, nixl=True)
    decode.call("d", tokens(60), session="s")
    decode.scheduler.reset_prefix_cache()
    prefill.call("p", tokens(60), session="s", source="decode-0")
    assert prefill.record("p").reason is Reason.EVICTED
    assert exposed["turncache_pulls_total result=evicted"] == 1
    assert exposed["turncache_pulls_total result=verified"] == 0


def test_an_engine_that_does_nothing_reports_nothing(made: World) -> None:
    """Steps without a call that ends report at most once a second."""
    engine = Engine(made, connector="ClockedRetention")
    exposed = Exposed(engine)
    engine.add("r", [5] * 10, max_tokens=50)
    while engine.steps < 30:
        engine.step()
    assert exposed.num_reports == 1
    made.now_s += 1.1
    engine.step()
    assert exposed.num_reports == 2


def test_reports_of_scheduler_and_workers_add_up() -> None:
    """VLLM merges what both sides say of one connector, in either order."""
    worker = TurncacheStats(data={NIXL: {"bytes_transferred": [1, 2], "transfer_duration": []}})
    scheduler = TurncacheStats(data={"counters": {"calls_ok": 2.0}, "gauges": {"sessions": 3.0}})
    for one, other in ((worker, scheduler), (scheduler, worker)):
        merged = TurncacheStats(data={}).aggregate(one).aggregate(other)
        assert merged.data["counters"] == {"calls_ok": 2.0}
        assert merged.data["gauges"] == {"sessions": 3.0}
        assert merged.data[NIXL]["bytes_transferred"] == [1, 2]
        assert not merged.is_empty()
    assert TurncacheStats().is_empty()
    assert TurncacheStats(data={NIXL: {"bytes_transferred": []}}).is_empty()


def test_in_a_multi_connector_ours_is_found_by_name(made: World) -> None:
    """VLLM looks a child's class up by its name when its report arrives."""
    for name in ours.__all__:
        found = KVConnectorFactory.get_connector_class_by_name(name)
        assert found is getattr(ours, name)
        assert isinstance(found.build_kv_connector_stats({}), TurncacheStats)


def test_a_report_that_fails_is_the_last(made: World, caplog: pytest.LogCaptureFixture) -> None:
    """Metrics never reach the engine's way."""
    caplog.set_level(logging.ERROR)
    engine = Engine(made, connector="ClockedRetention")
    engine.extension.gauges = lambda: 1 / 0
    engine.connector._reporter._gauges = engine.extension.gauges
    engine.call("a", [5] * 10, session="s")
    engine.call("b", [6] * 10, session="s")
    lines = [r for r in caplog.records if "metrics cannot be read" in r.getMessage()]
    assert len(lines) == 1


def test_every_gauge_of_the_table_is_there(made: World) -> None:
    """No name in the tables that the extension does not have, and none twice."""
    prefill, _ = pair(made)
    gauges = prefill.connector.connector_scheduler._gauges()
    wanted = {key for metric in GAUGE_METRICS for key in metric.keys.values()}
    assert wanted <= set(gauges)
    names = [metric.name for metric in (*COUNTER_METRICS, *GAUGE_METRICS)]
    assert len(set(names)) == len(names)
