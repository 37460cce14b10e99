"""For how long a session will be away: what is expected of each tool wait, and what came true.

Owner of the waits in progress and of the durations that this router has measured, by tool.
Whoever sees the tool call picks the row: first from the client's own table, which came with
the call, then from the router's measurements, and only then from either's row for any tool.
Several tools end together in the results of the slowest. A tenant is expected to behave as it
has behaved: what its tools took says nothing to, or about, another.

Waits are bounded, least recently begun first; one that is lost costs an expectation. So are the
tenants whose durations are kept.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from turncache.durations import Durations
from turncache.protocol import ANY_TOOL, tool_key

#: Tenants whose measured durations are kept.
MAX_TENANTS: Final = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class _Wait:
    tenant: str | None
    tool_names: tuple[str, ...]
    since_s: float
    expect_s: float | None
    num_answers: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedWait:
    """A tool wait that is over.

    Attributes:
        seconds: how long it was.
        expect_s: how long it was expected to be, None when nobody knew.
        tool_names: the tools that it was for.
    """

    seconds: float
    expect_s: float | None
    tool_names: tuple[str, ...]


class Forecast:
    """Expectations for one router.

    Args:
        max_sessions: waits in progress that are remembered.
    """

    def __init__(self, max_sessions: int) -> None:
        self._max_sessions = max_sessions
        self._waits: OrderedDict[str, _Wait] = OrderedDict()
        self._measured: OrderedDict[str | None, Durations] = OrderedDict()

    def __len__(self) -> int:
        return len(self._waits)

    def begins(
        self,
        session: str,
        tool_names: Sequence[str],
        rows: Mapping[str, float],
        *,
        tenant: str | None,
        num_answers: int | None = None,
        now_s: float,
    ) -> float | None:
        """Note that a call has ended in tool calls; return for how long they will run.

        Args:
            session: namespaced id.
            tool_names: tools that the model asked for, at least one.
            rows: the client's durations in seconds by tool key, as ``Turncache-Tools`` has them.
            tenant: whose session it is.
            num_answers: of the model in the history of that call, None when nobody knows.
            now_s: the time.

        Returns:
            Seconds until the next call, None when nobody knows.
        """
        expect_s = self._expected_s(self._of(tenant), tool_names, rows)
        self._waits.pop(session, None)
        self._waits[session] = _Wait(
            tenant=tenant,
            tool_names=tuple(tool_names),
            since_s=now_s,
            expect_s=expect_s,
            num_answers=num_answers,
        )
        if len(self._waits) > self._max_sessions:
            self._waits.popitem(last=False)
        return expect_s

    def expects(self, session: str, expect_s: float | None) -> None:
        """Take what the caller itself expects of the wait that it is in."""
        wait = self._waits.get(session)
        if wait is not None:
            self._waits[session] = dataclasses.replace(wait, expect_s=expect_s)

    def ends(
        self, session: str, *, num_answers: int | None = None, now_s: float
    ) -> EndedWait | None:
        """Note that a call brings tool results.

        Args:
            session: namespaced id.
            num_answers: of the model in its history, None when nobody knows.
            now_s: the time.

        Returns:
            None when the session was not waiting for these results: another replica may have
            had calls of it since.
        """
        wait = self._waits.pop(session, None)
        if wait is None:
            return None
        before = wait.num_answers
        # Fewer are a client's that drops the beginning of its history.
        if before is not None and num_answers is not None and num_answers > before + 1:
            return None
        seconds = max(0.0, now_s - wait.since_s)
        self.learn(wait.tenant, wait.tool_names, seconds)
        return EndedWait(seconds=seconds, expect_s=wait.expect_s, tool_names=wait.tool_names)

    def learn(self, tenant: str | None, tool_names: Sequence[str], seconds: float) -> None:
        """Take the length of a tool wait, whoever has measured it."""
        self._of(tenant).observe(tool_names, seconds)

    def forget(self, session: str) -> None:
        """Drop the wait of a session that has ended."""
        self._waits.pop(session, None)

    def _of(self, tenant: str | None) -> Durations:
        """Return a tenant's durations, which makes it the one that was asked for last."""
        found = self._measured.pop(tenant, None) or Durations()
        self._measured[tenant] = found
        if len(self._measured) > MAX_TENANTS:
            self._measured.popitem(last=False)
        return found

    @staticmethod
    def _expected_s(
        durations: Durations, tool_names: Sequence[str], rows: Mapping[str, float]
    ) -> float | None:
        measured = durations.rows(tool_names)
        found = [_row(tool_key(name), rows, measured) for name in tool_names]
        return max((seconds for seconds in found if seconds is not None), default=None)


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
