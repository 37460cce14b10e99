"""For how long a session will be away: what is expected of each tool wait, and what came true.

Owner of the waits in progress and of the durations that this router has measured, by tool.
Whoever sees the tool call picks the row: first from the client's own table, which came with
the call, then from the router's measurements, and only then from either's row for any tool.
Several tools end together in the results of the slowest.

Waits are bounded, least recently begun first; one that is lost costs an expectation.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from turncache.durations import Durations
from turncache.protocol import ANY_TOOL, tool_key


@dataclass(frozen=True, slots=True, kw_only=True)
class _Wait:
    tool_names: tuple[str, ...]
    since_s: float
    expect_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedWait:
    """A tool wait that is over.

    Attributes:
        seconds: how long it was.
        expect_s: how long it was expected to be, None when nobody knew.
    """

    seconds: float
    expect_s: float | None


class Forecast:
    """Expectations for one router.

    Args:
        max_sessions: waits in progress that are remembered.
    """

    def __init__(self, max_sessions: int) -> None:
        self._max_sessions = max_sessions
        self._waits: OrderedDict[str, _Wait] = OrderedDict()
        self._measured = Durations()

    def __len__(self) -> int:
        return len(self._waits)

    def begins(
        self,
        session: str,
        tool_names: Sequence[str],
        rows: Mapping[str, float],
        *,
        now_s: float,
    ) -> float | None:
        """Note that a call has ended in tool calls; return for how long they will run.

        Args:
            session: namespaced id.
            tool_names: tools that the model asked for, at least one.
            rows: the client's durations in seconds by tool key, as ``Turncache-Tools`` has them.
            now_s: the time.

        Returns:
            Seconds until the next call, None when nobody knows.
        """
        expect_s = self._expected_s(tool_names, rows)
        self._waits.pop(session, None)
        self._waits[session] = _Wait(tool_names=tuple(tool_names), since_s=now_s, expect_s=expect_s)
        if len(self._waits) > self._max_sessions:
            self._waits.popitem(last=False)
        return expect_s

    def expects(self, session: str, expect_s: float | None) -> None:
        """Take what the caller itself expects of the wait that it is in."""
        wait = self._waits.get(session)
        if wait is not None:
            self._waits[session] = dataclasses.replace(wait, expect_s=expect_s)

    def ends(self, session: str, *, now_s: float) -> EndedWait | None:
        """Note that a call brings tool results; None when the session was not waiting."""
        wait = self._waits.pop(session, None)
        if wait is None:
            return None
        seconds = max(0.0, now_s - wait.since_s)
        self._measured.observe(wait.tool_names, seconds)
        return EndedWait(seconds=seconds, expect_s=wait.expect_s)

    def forget(self, session: str) -> None:
        """Drop the wait of a session that has ended."""
        self._waits.pop(session, None)

    def _expected_s(self, tool_names: Sequence[str], rows: Mapping[str, float]) -> float | None:
        measured = self._measured.rows(tool_names)
        found = [self._row(tool_key(name), rows, measured) for name in tool_names]
        return max((seconds for seconds in found if seconds is not None), default=None)

    @staticmethod
    def _row(key: str, rows: Mapping[str, float], measured: Mapping[str, float]) -> float | None:
        for table, row in (
            (rows, key),
            (measured, key),
            (rows, ANY_TOOL),
            (measured, ANY_TOOL),
        ):
            if row in table:
                return table[row]
        return None
