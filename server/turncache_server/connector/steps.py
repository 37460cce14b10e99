"""Which blocks a scheduled step writes. Owner of the per-request block tables.

vLLM hands the connector each step's new blocks; resolving a whole table at every decode
step would cost its length, so the tables are kept here and only appended to.

This runs in every step for every request, calls that have nothing to do with us included. A
decode step mostly writes on in a block that its request has begun and does not fill. Nothing
can be marked there, so such a write is not worth a word. While the same requests write a token
each, it is known beforehand which of them begin or fill a block in a step, and the others are
not looked at.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from operator import sub
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


class _March:
    """The same requests write one token each, step after step.

    So a request fills a block every ``block_size`` steps, and begins the next one a step later.

    Args:
        block_size: tokens per block.

    Attributes:
        num_steps: steps so far, 0 before the first.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._first: list[int] = []
        self._filling: list[list[int]] = []
        self.num_steps = 0

    def begin(self, first: list[int]) -> None:
        """Expect the requests to write at these positions in the next step."""
        self._first = first
        self._filling = [[] for _ in range(self._block_size)]
        for row, position in enumerate(first):
            self._filling[-position % self._block_size].append(row)

    def takes(self, positions: list[int]) -> bool:
        """Take one more step if each request writes where its last step ended."""
        num_steps = self.num_steps
        # Not a loop: it is what the others are spared.
        if list(map(sub, positions, self._first)).count(num_steps) != len(self._first):
            return False
        self.num_steps = num_steps + 1
        return True

    @property
    def beginning(self) -> list[int]:
        """Rows of the requests that have begun a block in the last step."""
        return self._filling[(self.num_steps - 1) % self._block_size]

    @property
    def filling(self) -> list[int]:
        """Rows of the requests that have filled a block in the last step."""
        return self._filling[self.num_steps % self._block_size]


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
        self._march = _March(block_size)
        self._steady = False

    def __len__(self) -> int:
        return len(self._requests)

    def writes(self, scheduler_output: Any) -> list[tuple[str, int, bool]]:
        """List (request id, block id, step fills the block) for the blocks that are written.

        Left out is a block in which its request goes on where its last step ended, and which
        it does not fill.

        A request whose table is unknown or too short (a scheduler that hands blocks out
        in another way than the tested one) raises LookupError.
        """
        cached = scheduler_output.scheduled_cached_reqs
        steady = (
            cached.req_ids == self._row_ids
            and len(self._row_ids) == scheduler_output.total_num_scheduled_tokens
            and not scheduler_output.scheduled_new_reqs
            and not scheduler_output.finished_req_ids
            and not cached.resumed_req_ids
        )
        march = self._march
        # The second steady step in a row is worth the preparation.
        if steady and self._steady:
            if not march.num_steps:
                march.begin([progress.end for progress in self._row])
            if march.takes(cached.num_computed_tokens):
                return self._marched(cached.new_block_ids)
        self._steady = steady and self._block_size > 1
        if march.num_steps:
            self._halt()
        return self._walked(scheduler_output)

    def users(self, block_ids: Collection[int]) -> set[str]:
        """Return the requests that have any of these blocks in their table."""
        return {
            request_id
            for request_id, progress in self._requests.items()
            if not set(block_ids).isdisjoint(progress.table)
        }

    def _marched(self, new_block_ids: list[Any]) -> list[tuple[str, int, bool]]:
        """List the writes of a step that the march has taken."""
        march, row, ids = self._march, self._row, self._row_ids
        beginning = march.beginning
        num_given = len(new_block_ids) - new_block_ids.count(None)
        for at in beginning:
            if (blocks := new_block_ids[at]) is not None:
                row[at].table.extend(blocks[0])
                num_given -= 1
        if num_given:
            # Handed out before they are needed.
            for at, blocks in enumerate(new_block_ids):
                if blocks and at not in beginning:
                    row[at].table.extend(blocks[0])
        before, size = march.num_steps - 1, self._block_size
        out = []
        for at in beginning:
            progress = row[at]
            out.append((ids[at], progress.table[(progress.end + before) // size], False))
        for at in march.filling:
            progress = row[at]
            out.append((ids[at], progress.table[(progress.end + before) // size], True))
        return out

    def _halt(self) -> None:
        """End the march: from the next step on each request is looked at again."""
        num_steps, size = self._march.num_steps, self._block_size
        self._march.num_steps = 0
        for progress in self._row:
            progress.end += num_steps
            progress.full = -(-progress.end // size) * size

    def _walked(self, scheduler_output: Any) -> list[tuple[str, int, bool]]:
        """List the writes of any step, request by request."""
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

    def _add(
        self,
        out: list[tuple[str, int, bool]],
        request_id: str,
        progress: _Progress,
        start: int,
        end: int,
    ) -> None:
        size, table = self._block_size, progress.table
        index, last = start // size, (end - 1) // size
        progress.end, progress.full = end, (last + 1) * size
        while index < last:
            out.append((request_id, table[index], True))
            index += 1
        out.append((request_id, table[last], end == progress.full))
