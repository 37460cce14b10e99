"""The final record of each call, for ``GET /v1/calls/{request_id}``.

Owner of that state. Bounded, oldest first. A record is begun with the call's plan and says
``running`` until the call is over; ``final`` once its outcome will not change any more.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from turncache.protocol import Outcome, Plan, Reason
from turncache_server.router.ending import Ending


@dataclass(slots=True, kw_only=True)
class CallRecord:
    """What is known about one call.

    Attributes:
        state: ``running``, ``done``, ``failed`` or ``cancelled``.
        tenant: whose call it is, None without keys.
        final: nothing here will change.
        repeats: how often its prefill leg was sent again; the outcome is that of the last one.
    """

    request: str
    plan: Plan
    reason: Reason
    tenant: str | None = None
    state: str = "running"
    final: bool = False
    outcome: Outcome | None = None
    ending: Ending | None = None
    queued_s: float = 0.0
    held_back_s: float = 0.0
    repeats: int = 0
    prefill_s: float | None = None
    ttft_s: float | None = None
    total_s: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """Encode for the client: numbers and words, no address, no session."""
        ending, outcome = self.ending, self.outcome
        usage = ending.usage if ending is not None else None
        return {
            "request": self.request,
            "state": self.state,
            "final": self.final,
            "plan": self.plan.value,
            "reason": (outcome.reason if outcome is not None else self.reason).value,
            "outcome": None if outcome is None else _outcome(outcome),
            "repeats": self.repeats,
            "finish_reason": None if ending is None else ending.finish_reason,
            "boundary": None if ending is None else ending.boundary,
            "usage": None
            if usage is None
            else {
                "prompt_tokens": usage.prompt_tokens,
                "completion_tokens": usage.completion_tokens or 0,
            },
            "timings": {
                "queued_s": self.queued_s,
                "held_back_s": self.held_back_s,
                "prefill_s": self.prefill_s,
                "ttft_s": self.ttft_s,
                "total_s": self.total_s,
            },
        }


def _outcome(outcome: Outcome) -> dict[str, Any]:
    return {
        "prompt": outcome.prompt,
        "local": outcome.local,
        "returned": outcome.returned,
        "computed": outcome.computed,
        "lost": outcome.lost,
        "at": outcome.at,
    }


class CallRecords:
    """Bounded table from call id to :class:`CallRecord`."""

    def __init__(self, max_calls: int) -> None:
        self._max_calls = max_calls
        self._records: OrderedDict[str, CallRecord] = OrderedDict()

    def begin(self, record: CallRecord) -> None:
        """Add a call's record."""
        self._records[record.request] = record
        while len(self._records) > self._max_calls:
            self._records.popitem(last=False)

    def get(self, request: str) -> CallRecord | None:
        """Return a call's record, None when it is unknown or forgotten."""
        return self._records.get(request)
