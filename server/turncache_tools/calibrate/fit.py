"""From times to first token to costs: least squares without negative costs. Pure.

A call's time to first token on a quiet stack is taken for the sum

    host_s + host_token_s * prompt + prefill_token_s * computed + prefill_pair_s * pairs

and on a pair, where decode takes from prefill what it lacks (*handed*) and takes a step::

    + pull_latency_s * (1, or 2 when something was returned) + pull_token_s * (returned + handed)
    + decode_token_s

which is what the planner simulates: a cost that is not fitted with it would be added to what the
fit has put elsewhere. Both directions are the same verified pull, so they share its costs;
decode's step is known from the times between tokens. Errors are relative: a point of 50 ms counts
as much as one of 5 s.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from turncache_server.cost_profile import (
    ASSUMED_LOAD_BYTES_PER_S,
    ASSUMED_LOAD_LATENCY_S,
    CALIBRATED,
    CostProfile,
    ProfilePoint,
)
from turncache_tools.bench.statistics import quantile

COLD: Final = "cold"
CACHED: Final = "cached"
RETURNED: Final = "returned"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One call on a quiet stack. Counts in tokens.

    Attributes:
        kind: ``cold``, ``cached`` or ``returned``.
        size: what it was to be, the same for repetitions.
        prompt: of the prompt.
        local: found by prefill.
        returned: pulled from decode.
        handed: that decode lacked.
        ttft_s: to the first delta.
    """

    kind: str
    size: int
    prompt: int
    local: int
    returned: int
    handed: int
    ttft_s: float

    @property
    def computed(self) -> int:
        """What is neither found nor returned."""
        return self.prompt - self.local - self.returned


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What a profile says beside the fitted costs; see :class:`CostProfile`."""

    model: str
    about: str
    pair: bool
    decode_token_s: float
    engines: tuple[str, ...] = ()
    accelerators: int = 1
    kv_token_bytes: int = 0
    block_tokens: int = 16
    pool_tokens: int | None = None
    decode_pool_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class _Median:
    """Repetitions of one point: their median, and how far they lie apart."""

    sample: Sample
    spread: float


def fit_profile(samples: Sequence[Sample], facts: Facts) -> CostProfile:
    """Fit costs; the profile has each point with its error.

    Args:
        samples: of a quiet stack, at least one.
        facts: what else the profile says.
    """
    points = _medians(samples)
    pulled = facts.pair and any(each.sample.returned for each in points)
    rows = [_row(each.sample, pulled=pulled) for each in points]
    seconds = [each.sample.ttft_s for each in points]
    # One engine's first token comes out of prefill's last step.
    step_s = facts.decode_token_s if pulled else 0.0
    costs = least_squares(rows, seconds, known_s=step_s)
    host_s, host_token_s, prefill_token_s, prefill_pair_s, *pull = costs
    fitted = [sum(x * cost for x, cost in zip(row, costs, strict=True)) + step_s for row in rows]
    return CostProfile(
        name=facts.model,
        model=facts.model,
        source=CALIBRATED,
        about=facts.about,
        engines=facts.engines,
        accelerators=facts.accelerators,
        host_s=host_s,
        host_token_s=host_token_s,
        prefill_token_s=prefill_token_s,
        prefill_pair_s=prefill_pair_s,
        pull_latency_s=pull[0] if pulled else None,
        pull_token_s=pull[1] if pulled else None,
        load_latency_s=ASSUMED_LOAD_LATENCY_S,
        load_token_s=facts.kv_token_bytes / (ASSUMED_LOAD_BYTES_PER_S * facts.accelerators),
        decode_token_s=facts.decode_token_s,
        kv_token_bytes=facts.kv_token_bytes,
        block_tokens=facts.block_tokens,
        pool_tokens=facts.pool_tokens,
        decode_pool_tokens=facts.decode_pool_tokens if facts.pair else None,
        points=tuple(
            ProfilePoint(
                kind=each.sample.kind,
                prompt_tokens=each.sample.prompt,
                returned_tokens=each.sample.returned,
                computed_tokens=each.sample.computed,
                measured_ms=round(1e3 * each.sample.ttft_s, 3),
                fitted_ms=round(1e3 * fitted_s, 3),
                spread=round(each.spread, 4),
            )
            for each, fitted_s in zip(points, fitted, strict=True)
        ),
    )


def _medians(samples: Sequence[Sample]) -> list[_Median]:
    """Return one sample of each point: the one in the middle."""
    found: defaultdict[tuple[str, int], list[Sample]] = defaultdict(list)
    for sample in samples:
        found[sample.kind, sample.size].append(sample)
    out = []
    for same in found.values():
        ordered = sorted(same, key=lambda each: each.ttft_s)
        middle = ordered[(len(ordered) - 1) // 2]
        out.append(_Median(middle, (ordered[-1].ttft_s - ordered[0].ttft_s) / middle.ttft_s))
    return out


def _row(sample: Sample, *, pulled: bool) -> tuple[float, ...]:
    start = sample.local + sample.returned
    pairs = sample.computed * (start + sample.computed / 2)
    row = (1.0, float(sample.prompt), float(sample.computed), pairs)
    if not pulled:
        return row
    return (*row, 1.0 + (sample.returned > 0), float(sample.returned + sample.handed))


def median_error(profile: CostProfile) -> float:
    """Return the median over points of the absolute error, as a share."""
    return quantile([abs(point.error) for point in profile.points], 0.5)


def least_squares(
    rows: Sequence[Sequence[float]], seconds: Sequence[float], *, known_s: float = 0.0
) -> list[float]:
    """Return the costs, none negative, whose squared relative errors are smallest.

    Args:
        rows: units of each cost, per point.
        seconds: of each point, above 0.
        known_s: of these, what no cost is sought for.

    With few costs the best of all subsets is found by trying them: the solution has some
    costs of 0 and solves the normal equations of the others.
    """
    scaled = [[x / time_s for x in row] for row, time_s in zip(rows, seconds, strict=True)]
    wanted = [max(0.0, time_s - known_s) / time_s for time_s in seconds]
    count = len(rows[0])
    # Columns of very different sizes would make the equations ill-conditioned.
    sizes = [max((abs(row[at]) for row in scaled), default=0.0) or 1.0 for at in range(count)]
    scaled = [[x / size for x, size in zip(row, sizes, strict=True)] for row in scaled]
    best, least = [0.0] * count, sum(each**2 for each in wanted)
    for number in range(1, count + 1):
        for chosen in itertools.combinations(range(count), number):
            costs = _solve([[row[at] for at in chosen] for row in scaled], wanted)
            if costs is None or min(costs) < 0:
                continue
            wrong = sum(
                (sum(row[at] * cost for at, cost in zip(chosen, costs, strict=True)) - each) ** 2
                for row, each in zip(scaled, wanted, strict=True)
            )
            if wrong < least - 1e-12:
                least = wrong
                best = [0.0] * count
                for at, cost in zip(chosen, costs, strict=True):
                    best[at] = cost / sizes[at]
    return best


def _solve(rows: Sequence[Sequence[float]], wanted: Sequence[float]) -> list[float] | None:
    """Solve the normal equations; None where there is no one answer."""
    count = len(rows[0])
    matrix = [
        [sum(row[i] * row[j] for row in rows) for j in range(count)]
        + [sum(row[i] * each for row, each in zip(rows, wanted, strict=True))]
        for i in range(count)
    ]
    for at in range(count):
        pivot = max(range(at, count), key=lambda row: abs(matrix[row][at]))
        if abs(matrix[pivot][at]) < 1e-12:
            return None
        matrix[at], matrix[pivot] = matrix[pivot], matrix[at]
        for other in range(count):
            if other != at:
                factor = matrix[other][at] / matrix[at][at]
                matrix[other] = [
                    x - factor * y for x, y in zip(matrix[other], matrix[at], strict=True)
                ]
    return [matrix[at][count] / matrix[at][at] for at in range(count)]
