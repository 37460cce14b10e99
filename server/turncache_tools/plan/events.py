"""Simulated time: what happens when, in order. Owner of the clock."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from typing import Any


class Events:
    """What is to happen; of what happens at one time, the earlier told comes first."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Callable[..., None], Any]] = []
        self._order = itertools.count()

    def at(self, at_s: float, act: Callable[..., None], what: Any) -> None:
        """Let ``act(at_s, what)`` happen."""
        heapq.heappush(self._heap, (at_s, next(self._order), act, what))

    def run(self, going_on: Callable[[], bool]) -> float:
        """Let everything happen until nothing is left or ``going_on`` says no; return the time."""
        now_s = 0.0
        heap = self._heap
        while heap and going_on():
            now_s, _, act, what = heapq.heappop(heap)
            act(now_s, what)
        return now_s
