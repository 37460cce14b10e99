"""How many calls of a model were sent without a session, and why: counted, never silent.

Owns the counts of this process.
"""

from __future__ import annotations

import enum
from collections import Counter
from typing import Final

from turncache._lock import LOCK


class Untagged(enum.StrEnum):
    """Why a call says nothing of a session."""

    ENDED = "ended"
    FOREIGN_ID = "foreign_id"
    TEXT = "text"
    NOT_TOLD = "not_told"
    UNREADABLE = "unreadable"


_counts: Final[Counter[Untagged]] = Counter()


def untagged_calls() -> dict[str, int]:
    """Return how many calls of this process were sent without a session, by reason.

    ``ended``: made by a task or thread that outlived its session's block. ``foreign_id``:
    the call names a session by an id that cannot be ours. ``text``: a legacy completion
    without a session. ``not_told``: the server is a hosted provider, or has not shown yet
    that it listens. ``unreadable``: a request that could not be read. Clients that are
    switched off count nothing.
    """
    with LOCK.held:
        return {reason.value: number for reason, number in sorted(_counts.items())}


def count(reason: Untagged) -> None:
    """Count one call."""
    with LOCK.held:
        _counts[reason] += 1


def forget_counts() -> None:
    """Start from nothing."""
    with LOCK.held:
        _counts.clear()
