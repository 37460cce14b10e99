"""One number of a report, and the schema of every file of figures. Pure.

Version history of :data:`SCHEMA`:

1. first version.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Final

SCHEMA: Final = "turncache-figures/1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One number, and whether it is what it must be.

    Attributes:
        figure: its name.
        unit: of value and baseline.
        value: measured with the product.
        baseline: the same without it, None where there is nothing to compare.
        ratio: baseline over value where both are known and value is not 0.
        limit: what the claim is held against, None for a number that only informs.
        ok: the claim holds.
    """

    figure: str
    unit: str
    value: float
    baseline: float | None = None
    ratio: float | None = None
    limit: float | None = None
    ok: bool = True

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-ready values."""
        return asdict(self)
