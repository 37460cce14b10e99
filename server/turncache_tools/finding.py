"""What ``turncache doctor`` reports: one finding per thing that it looked at."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Verdict = Literal["ok", "note", "failed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        subject: what.
        verdict: ``ok``, ``note`` (works, but not fully) or ``failed``.
        detail: what was found, and the way out when something is wrong.
    """

    subject: str
    verdict: Verdict
    detail: str
