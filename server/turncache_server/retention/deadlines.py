"""What is due when: a heap of deadlines by number, cheap while nothing is due."""

from __future__ import annotations

import heapq


class Deadlines:
    """At most one deadline per number; setting it anew replaces the old one."""

    def __init__(self) -> None:
        self._due_s: dict[int, float] = {}
        self._heap: list[tuple[float, int]] = []

    def __len__(self) -> int:
        return len(self._due_s)

    def set(self, number: int, due_s: float) -> None:
        """Make ``number`` due at ``due_s``."""
        if self._due_s.get(number) == due_s:
            return
        self._due_s[number] = due_s
        heapq.heappush(self._heap, (due_s, number))
        if len(self._heap) > 2 * len(self._due_s) + 64:
            self._heap = [(due_s, number) for number, due_s in self._due_s.items()]
            heapq.heapify(self._heap)

    def discard(self, number: int) -> None:
        """Forget the deadline of ``number``, if it has one."""
        self._due_s.pop(number, None)

    def pop_due(self, now_s: float) -> int | None:
        """Take one number that is due at ``now_s``, the earliest first; None when none is."""
        heap = self._heap
        while heap and heap[0][0] <= now_s:
            due_s, number = heapq.heappop(heap)
            # An entry that was replaced or discarded is still in the heap.
            if self._due_s.get(number) == due_s:
                del self._due_s[number]
                return number
        return None
