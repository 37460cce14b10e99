"""When the order of victims is computed anew. Owner of these times."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from turncache_server.retention.free_queue import FreeQueue
from turncache_server.retention.lineages import LineageTable

#: How often the order of the lineages is computed anew while nothing else asks for it.
RANK_EVERY_S: Final = 0.25
#: So many times what it took passes before it is computed again, whatever has changed: it takes
#: time for each lineage, and the engine waits for it.
RANK_REST: Final = 20
#: The longest such rest: a process that was stopped meanwhile has taken long as well.
MOST_REST_S: Final = 2.0


class Ranks:
    """The order of victims of one engine.

    Args:
        table: the lineages.
        clock: monotonic seconds.

    Attributes:
        due_s: when the order is computed next; to be looked at only.
    """

    def __init__(self, table: LineageTable, clock: Callable[[], float]) -> None:
        self._table = table
        self._clock = clock
        # The second: before which it is not, whatever happens.
        self.due_s = self._not_before_s = float("-inf")

    def soon(self) -> None:
        """Have the order computed as soon as it may be: what is worth most has changed."""
        self.due_s = self._not_before_s

    def order(self, queue: FreeQueue, now_s: float) -> None:
        """Compute the order, if there is anything to order."""
        self.due_s = now_s + RANK_EVERY_S
        if queue.num_retained:
            queue.rank(self._table.victims(now_s))
            done_s = self._clock()
            self._not_before_s = done_s + min(RANK_REST * (done_s - now_s), MOST_REST_S)
            self.due_s = max(self.due_s, self._not_before_s)
