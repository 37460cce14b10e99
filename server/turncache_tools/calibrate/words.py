"""A profile as people and programs read it: costs, and every point with its error. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from turncache_server.cost_profile import CostProfile
from turncache_tools.calibrate.fit import median_error
from turncache_tools.figure import Figure

Table = tuple[Sequence[str], Sequence[Sequence[str]]]
#: Beyond these a profile is not to be relied on: error of the fit and distance of repetitions,
#: medians over the points.
MOST_ERROR: Final = 0.15
MOST_SPREAD: Final = 0.5


def point_table(profile: CostProfile) -> Table:
    """Return every point: measured, fitted, and how far repetitions lie apart."""
    columns = (
        "point",
        "prompt",
        "returned",
        "computed",
        "measured ms",
        "fitted ms",
        "error",
        "repetitions apart",
    )
    rows = [
        [
            point.kind,
            f"{point.prompt_tokens:,}",
            f"{point.returned_tokens:,}",
            f"{point.computed_tokens:,}",
            f"{point.measured_ms:,.1f}",
            f"{point.fitted_ms:,.1f}",
            f"{100 * point.error:+.1f} %",
            f"{100 * point.spread:.0f} %",
        ]
        for point in profile.points
    ]
    return columns, rows


def figures(profile: CostProfile) -> list[Figure]:
    """Return costs and errors as figures."""
    found: list[tuple[str, str, float | None]] = [
        ("host", "ms per call", 1e3 * profile.host_s),
        ("host_per_token", "us per token of the prompt", 1e6 * profile.host_token_s),
        ("prefill_per_token", "us per computed token", 1e6 * profile.prefill_token_s),
        ("prefill_per_pair", "ns per token and token before it", 1e9 * profile.prefill_pair_s),
        ("decode_per_token", "ms per token", 1e3 * profile.decode_token_s),
    ]
    if profile.pull_latency_s is not None and profile.pull_token_s is not None:
        found += [
            ("pull_latency", "ms per pull", 1e3 * profile.pull_latency_s),
            ("pull_per_token", "us per pulled token", 1e6 * profile.pull_token_s),
        ]
        threshold = profile.break_even_tokens(0)
        if threshold is not None:
            found.append(("pull_pays_from", "tokens", float(threshold)))
    out = [
        Figure(figure=name, unit=unit, value=value)
        for name, unit, value in found
        if value is not None
    ]
    error = median_error(profile)
    worst = max(abs(point.error) for point in profile.points)
    out.append(
        Figure(
            figure="fit_error_median",
            unit="share",
            value=error,
            limit=MOST_ERROR,
            ok=error <= MOST_ERROR,
        )
    )
    out.append(Figure(figure="fit_error_worst", unit="share", value=worst))
    return out


def cost_table(profile: CostProfile) -> Table:
    """Return costs and errors, with their units."""
    rows = [
        [each.figure.replace("_", " "), f"{each.value:,.3f}", each.unit]
        for each in figures(profile)
    ]
    return ("cost", "value", "unit"), rows
