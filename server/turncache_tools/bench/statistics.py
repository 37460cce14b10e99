"""Quantiles, and confidence intervals by resampling. Pure, deterministic by seed."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

#: What is reported of every distribution.
QUANTILES: Final = {"p50": 0.5, "p99": 0.99, "p99.9": 0.999, "max": 1.0}
RESAMPLES: Final = 1000
_CONFIDENCE: Final = 0.95

_K = TypeVar("_K", bound=Hashable)
_T = TypeVar("_T")


def quantile(values: Sequence[float], share: float) -> float:
    """Return a quantile, between two values by linear interpolation.

    Raises:
        ValueError: no values, or a share outside of 0 to 1.
    """
    if not values or not 0 <= share <= 1:
        raise ValueError(f"quantile {share} of {len(values)} values")
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    low, high = ordered[below], ordered[above]
    # Not the sum of two products: that may lie beside two equal values.
    return low + (high - low) * (place - below)


def summary(values: Sequence[float]) -> dict[str, float] | None:
    """Return the quantiles of :data:`QUANTILES` with mean and count, None without values."""
    if not values:
        return None
    out: dict[str, float] = {name: quantile(values, at) for name, at in QUANTILES.items()}
    return {**out, "mean": math.fsum(values) / len(values), "count": len(values)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """An estimate with its confidence interval, 95 %.

    Attributes:
        value: estimate.
        low: end of the interval, None where there are too few samples for one.
        high: likewise.
        samples: independent ones: agents of a round, whose calls belong together.
    """

    value: float
    low: float | None
    high: float | None
    samples: int

    def contains(self, value: float) -> bool:
        """Say whether a value may be the true one; without an interval nothing is excluded."""
        return self.low is None or self.high is None or self.low <= value <= self.high


def bootstrap(
    clusters: Mapping[_K, Sequence[_T]],
    estimate: Callable[[Sequence[_T]], float | None],
    *,
    seed: int,
    resamples: int = RESAMPLES,
) -> Interval | None:
    """Estimate from clusters of samples that belong together; whole clusters are resampled.

    Args:
        clusters: samples by what they have in common.
        estimate: from all samples; None where there is nothing to estimate from.
        seed: of the resampling.
        resamples: how often.

    Returns:
        None where ``estimate`` says None of all samples.
    """
    groups = [clusters[key] for key in sorted(clusters, key=repr)]
    value = estimate([sample for group in groups for sample in group])
    if value is None:
        return None
    if len(groups) < 2:
        return Interval(value=value, low=None, high=None, samples=len(groups))
    draw = random.Random(f"bootstrap-{seed}")  # noqa: S311 - reproducible, not secret
    found: list[float] = []
    for _ in range(resamples):
        chosen = draw.choices(groups, k=len(groups))
        again = estimate([sample for group in chosen for sample in group])
        if again is not None:
            found.append(again)
    tail = (1 - _CONFIDENCE) / 2
    return Interval(
        value=value,
        low=min(value, quantile(found, tail)),
        high=max(value, quantile(found, 1 - tail)),
        samples=len(groups),
    )


def median_ratio(pairs: Sequence[tuple[int, float, float]]) -> float | None:
    """Return the median over pairs of the first over the second; None where it is not defined.

    Of equal calls in two arms: how long a prompt is cancels in each pair. A ratio of two medians
    would hold the middle call of one arm against that of the other, and be as noisy as those two.
    """
    found = [one / other for _, one, other in pairs if other > 0]
    return quantile(found, 0.5) if found else None
