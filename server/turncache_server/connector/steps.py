"""Which blocks a scheduled step writes. Owner of the per-request block tables.

vLLM hands the connector each step's new blocks; resolving a whole table at every decode
step would cost its length, so the tables are kept here and only appended to.

This runs in every step for every request, calls that have nothing to do with us included. A
decode step mostly writes on in a block that its request has begun and does not fill. Nothing
can be marked there, so such a write is not worth a word.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class _Progress:
    """One request's blocks, and how far it has written.

    Attributes:
        table: block ids in the order of their tokens.
        end: position behind its last write.
        full: position behind the last slot of the block that it has begun.
    """

    table: list[int]
    end: int = -1
    full: int = -1


class StepTracker:
    """Turns scheduler outputs into block writes.

    Args:
        block_size: tokens per block.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._requests: dict[str, _Progress] = {}
        # Of the requests that went on in the last step: mostly they are the same again.
        self._row_ids: list[str] = []
        self._row: list[_Progress] = []

    def __len__(self) -> int:
        return len(self._requests)

    def writes(self, scheduler_output: Any) -> list[tuple[str, int, bool]]:
        """List (request id, block id, step fills the block) for the blocks that are written.

        Left out is a block in which its request goes on where its last step ended, and which
        it does not fill.

        A request whose table is unknown or too short (a scheduler that hands blocks out
        in another way than the tested one) raises LookupError.
        """
        out: list[tuple[str, int, bool]] = []
        scheduled, requests = scheduler_output.num_scheduled_tokens, self._requests
        for new in scheduler_output.scheduled_new_reqs:
            progress = requests[new.req_id] = _Progress(list(new.block_ids[0]))
            start = new.num_computed_tokens
            self._add(out, new.req_id, progress, start, start + scheduled[new.req_id])
        cached = scheduler_output.scheduled_cached_reqs
        if scheduler_output.scheduled_new_reqs or cached.req_ids != self._row_ids:
            self._row_ids = list(cached.req_ids)
            self._row = [requests[request_id] for request_id in self._row_ids]
        # Of a step of decode alone the counts need not be looked up.
        all_one = len(scheduled) == scheduler_output.total_num_scheduled_tokens
        resumed = cached.resumed_req_ids
        for progress, request_id, blocks, start in zip(
            self._row, self._row_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            if resumed and request_id in resumed:
                progress.table, progress.end = list(blocks[0]) if blocks else [], -1
            elif blocks:
                progress.table.extend(blocks[0])
            end = start + 1 if all_one else start + scheduled[request_id]
            if end < progress.full and start == progress.end:
                progress.end = end
            else:
                self._add(out, request_id, progress, start, end)
        for request_id in scheduler_output.finished_req_ids:
            # An id can be finished and scheduled anew in one step.
            if request_id not in scheduled:
                requests.pop(request_id, None)
                self._row_ids, self._row = [], []
        return out

    def users(self, block_ids: Collection[int]) -> set[str]:
        """Return the requests that have any of these blocks in their table."""
        return {
            request_id
            for request_id, progress in self._requests.items()
            if not set(block_ids).isdisjoint(progress.table)
        }

    def _add(
        self,
        out: list[tuple[str, int, bool]],
        request_id: str,
        progress: _Progress,
        start: int,
        end: int,
    ) -> None:
        size, table = self._block_size, progress.table
        last = (end - 1) // size
        progress.end, progress.full = end, (last + 1) * size
        out.extend(
            (request_id, table[index], (index + 1) * size <= end)
            for index in range(start // size, last + 1)
        )
