"""Which call a result belongs to, without touching the result.

Owns two weak tables: results by identity, and HTTP responses of streams and raw results.
An entry goes when its result goes. Results are never wrapped and get no attribute: their
equality, copies and dumps stay what they are.
"""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class WeakTable(Generic[T]):
    """Values by the identity of an object, for objects that need not be hashable."""

    def __init__(self) -> None:
        """Start empty."""
        self._rows: dict[int, tuple[weakref.ref[Any], T]] = {}

    def put(self, key: object, value: T) -> None:
        """Keep ``value`` until ``key`` is collected; what cannot be watched is skipped."""
        at, rows = id(key), self._rows
        try:
            # Collected, it takes its row along: pop() gets the dead reference as its default.
            rows[at] = (weakref.ref(key, partial(rows.pop, at)), value)
        except TypeError:
            return

    def get(self, key: object) -> T | None:
        """Return the value kept for ``key``, or None."""
        row = self._rows.get(id(key))
        return row[1] if row is not None and row[0]() is key else None

    def __len__(self) -> int:
        return len(self._rows)
