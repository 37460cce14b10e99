"""Which blocks a scheduled step writes. Owner of the per-request block tables.

vLLM hands the connector each step's new blocks; resolving a whole table at every decode
step would cost its length, so the tables are kept here and only appended to.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any


class StepTracker:
    """Turns scheduler outputs into block writes.

    Args:
        block_size: tokens per block.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._tables: dict[str, list[int]] = {}

    def __len__(self) -> int:
        return len(self._tables)

    def writes(self, scheduler_output: Any) -> list[tuple[str, int, bool]]:
        """List (request id, block id, step fills the block) for every block written.

        A request whose table is unknown or too short (a scheduler that hands blocks out
        in another way than the tested one) raises LookupError.
        """
        out: list[tuple[str, int, bool]] = []
        scheduled = scheduler_output.num_scheduled_tokens
        for new in scheduler_output.scheduled_new_reqs:
            self._tables[new.req_id] = list(new.block_ids[0])
            self._add(out, new.req_id, new.num_computed_tokens, scheduled[new.req_id])
        cached = scheduler_output.scheduled_cached_reqs
        for index, request_id in enumerate(cached.req_ids):
            blocks = cached.new_block_ids[index]
            if request_id in cached.resumed_req_ids:
                self._tables[request_id] = list(blocks[0]) if blocks else []
            elif blocks:
                self._tables[request_id].extend(blocks[0])
            self._add(out, request_id, cached.num_computed_tokens[index], scheduled[request_id])
        for request_id in scheduler_output.finished_req_ids:
            # An id can be finished and scheduled anew in one step.
            if request_id not in scheduled:
                self._tables.pop(request_id, None)
        return out

    def users(self, block_ids: Collection[int]) -> set[str]:
        """Return the requests that have any of these blocks in their table."""
        return {
            request_id
            for request_id, table in self._tables.items()
            if not set(block_ids).isdisjoint(table)
        }

    def _add(
        self, out: list[tuple[str, int, bool]], request_id: str, start: int, count: int
    ) -> None:
        size = self._block_size
        table = self._tables[request_id]
        end = start + count
        out.extend(
            (request_id, table[index], (index + 1) * size <= end)
            for index in range(start // size, (end - 1) // size + 1)
        )
