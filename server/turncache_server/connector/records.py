"""What happened to each call's KV on this engine. Owner of the outcome records.

Written by the engine thread; the control thread reads records that are never changed
after they were put in.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import dataclass, replace
from typing import Final

from turncache.protocol import Reason

MAX_RECORDS: Final = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class CallRecord:
    """Outcome of one call on this engine, in tokens.

    Attributes:
        done: the call has ended; before, the counts are those of its admission.
        pull_s: seconds from the first look at the request to verified KV, 0 without a pull.
    """

    prompt: int
    local: int = 0
    returned: int = 0
    lost: int = 0
    reason: Reason = Reason.OK
    at: int | None = None
    done: bool = False
    pull_s: float = 0.0

    @property
    def computed(self) -> int:
        """Tokens of the prompt that this engine computed."""
        return self.prompt - self.local - self.returned


class CallBook:
    """Records by the router's request id, the oldest forgotten first, and their totals."""

    def __init__(self, max_records: int = MAX_RECORDS) -> None:
        self._records: OrderedDict[str, CallRecord] = OrderedDict()
        self._max_records = max_records
        self.totals: Counter[str] = Counter()

    def put(self, request: str | None, record: CallRecord) -> None:
        """Keep ``record``; calls without an id only count in the totals when done."""
        if request is not None:
            self._records[request] = record
            if len(self._records) > self._max_records:
                self._records.popitem(last=False)
        if record.done:
            self.totals["calls"] += 1
            self.totals["prompt_tokens"] += record.prompt
            self.totals["local_tokens"] += record.local
            self.totals["returned_tokens"] += record.returned
            self.totals["computed_tokens"] += record.computed
            self.totals["lost_tokens"] += record.lost
            self.totals[f"lost_tokens_{record.reason.value}"] += record.lost
            self.totals[f"calls_{record.reason.value}"] += 1

    def finish(self, request: str | None, record: CallRecord) -> None:
        """Keep ``record`` as that of a call that has ended."""
        self.put(request, replace(record, done=True))

    def get(self, request: str) -> CallRecord | None:
        """Return the record of a call, None when unknown or forgotten."""
        return self._records.get(request)
