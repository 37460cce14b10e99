"""How long tools run, per name: robust against outliers, bounded in memory.

Pure: what is measured comes in as seconds. One table serves a process, because agents
share their tools; only the names that a request offers to its model leave with it. The
table holds its own state, replaced whole per name, so that threads need no lock: two
measurements at the same moment may keep one of them.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections import OrderedDict
from collections.abc import Iterable
from typing import Final, NamedTuple

from turncache.protocol import ANY_TOOL, MAX_RETAIN_S, tool_key

MAX_NAMES: Final = 256
MAX_SAMPLES: Final = 32


class _Row(NamedTuple):
    samples_s: tuple[float, ...] = ()
    median_s: float = 0.0

    def plus(self, seconds: float) -> _Row:
        samples_s = (*self.samples_s, seconds)[-MAX_SAMPLES:]
        return _Row(samples_s, _rounded(statistics.median(samples_s)))


class Durations:
    """Medians of the latest durations, by tool name, and over all tools.

    The median of the latest 32 follows a tool that has become slower within 16 calls,
    and one call that waited for a person over lunch does not move it.
    """

    def __init__(self) -> None:
        """Start empty."""
        self._rows: OrderedDict[str, _Row] = OrderedDict()
        self._any = _Row()

    def observe(self, names: Iterable[str], seconds: float) -> None:
        """Take one tool wait: the model asked for ``names`` and had results in ``seconds``.

        Several tools end together in the results of the slowest. The wait is credited to
        the one that is known to be slowest, or to every one of them when none is known.
        Waits over an hour count as an hour; what is not a duration is ignored.
        """
        keys = sorted(set(_keys_of(tuple(names))))
        if not keys or not math.isfinite(seconds) or seconds < 0:
            return
        seconds = min(seconds, MAX_RETAIN_S)
        self._any = self._any.plus(seconds)
        for key in self._credited(keys, seconds):
            self._rows[key] = self._rows.pop(key, _Row()).plus(seconds)
        while len(self._rows) > MAX_NAMES:
            self._rows.popitem(last=False)

    def forget(self) -> None:
        """Forget every measurement."""
        self._rows.clear()
        self._any = _Row()

    def _credited(self, keys: list[str], seconds: float) -> list[str]:
        known = [key for key in keys if key in self._rows]
        unknown = [key for key in keys if key not in self._rows]
        if not known:
            return unknown
        slowest = max(known, key=lambda key: self._rows[key].median_s)
        if unknown and seconds > self._rows[slowest].median_s:
            return unknown
        return [slowest]

    def rows(self, names: Iterable[str]) -> dict[str, float]:
        """Return seconds by key for the tools called ``names``, and ``*`` for any other."""
        if not self._any.samples_s:
            return {}
        out = {ANY_TOOL: self._any.median_s}
        rows = self._rows
        for key in filter(rows.__contains__, _keys_of(tuple(names))):
            row = rows.get(key)
            if row is not None:
                out[key] = row.median_s
        return out


# The same tools are offered with every call of an agent, and called again and again.
@functools.lru_cache(maxsize=256)
def _keys_of(names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(map(tool_key, names))


def _rounded(seconds: float) -> float:
    """Round to three significant digits: a header needs no more."""
    return float(f"{seconds:.3g}")
