"""What an extension shows in numbers. Owner of which other parts are counted with it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from turncache.protocol import Mode
from turncache_server.connector.recorder import Recorder
from turncache_server.connector.records import CallBook
from turncache_server.retention.free_queue import FreeQueue
from turncache_server.retention.lineages import LineageTable


class Readings:
    """Gauges and totals of one engine; for any thread.

    Args:
        num_blocks: blocks in the pool.
        table: the lineages.
        book: the records of calls.
        recorder: where what the engine sees is written down, None for nowhere.
    """

    def __init__(
        self, num_blocks: int, table: LineageTable, book: CallBook, recorder: Recorder | None
    ) -> None:
        self._num_blocks = num_blocks
        self._table = table
        self._book = book
        self._recorder = recorder
        self._also: list[Callable[[], Mapping[str, float]]] = []

    def count_also(self, counters: Callable[[], Mapping[str, float]]) -> None:
        """Have the totals of another part shown among :meth:`counters`."""
        self._also.append(counters)

    def gauges(
        self,
        queue: FreeQueue | None,
        mode: Mode,
        *,
        calls_in_flight: int,
        in_order: bool,
        broken: bool,
        recording: bool,
    ) -> dict[str, float]:
        """Return the present state in numbers."""
        stats = self._table.stats()
        free, retained = -1.0, 0.0
        classes: dict[str, float] = {}
        if queue is not None:
            free, retained = float(queue.num_free_blocks), float(queue.num_retained)
            # One block is nobody's: the null block.
            classes = {
                "used_blocks": self._num_blocks - 1 - free,
                "ordinary_blocks": free - retained,
            }
        observed: dict[str, float] = {}
        if self._recorder is not None:
            observing = recording and self._recorder.broken is None
            observed = {**self._recorder.gauges, "observing": float(observing)}
        return {
            "blocks": float(self._num_blocks),
            "free_blocks": free,
            "retained_blocks": retained,
            **classes,
            "sessions": float(stats.sessions),
            "lineages": float(stats.lineages),
            "calls_in_flight": float(calls_in_flight),
            "in_order": float(in_order),
            "broken": float(broken),
            **{f"mode_{each.value}": float(each is mode) for each in Mode},
            **observed,
        }

    def counters(self) -> dict[str, float]:
        """Return the totals since start."""
        stats = self._table.stats()
        # Copied at once: the engine thread may be counting.
        totals = list(self._book.totals.items())
        return {
            **{name: float(value) for name, value in totals},
            "evicted_wanted_blocks": float(stats.evicted_wanted_blocks_total),
            "superseded_chains": float(stats.superseded_total),
            "clipped_retentions": float(stats.clipped_total),
            "clipped_blocks": float(stats.clipped_blocks_total),
            **{name: count for counters in self._also for name, count in counters().items()},
            **self._observed(),
        }

    def _observed(self) -> dict[str, float]:
        recorder = self._recorder
        if recorder is None:
            return {}
        return {**recorder.counters, "observed_dropped_events": float(recorder.dropped)}
