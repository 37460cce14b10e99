"""From simulated arms to what is reported: numbers by arm and call, what fits, what to set. Pure.

Nothing in a report depends on how fast it was simulated: the same input gives the same report.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from turncache_tools.bench.statistics import quantile, summary
from turncache_tools.figure import SCHEMA as FIGURES_SCHEMA
from turncache_tools.figure import Figure
from turncache_tools.plan.load import Load, Rig, mean_context
from turncache_tools.plan.served import Served, SimResult

SCHEMA: Final = "turncache-plan/1"
#: Calls that a report shows one by one.
_MOST_CALLS: Final = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmPlan:
    """One arm, simulated. Calls 2 and later, except where it says otherwise.

    Attributes:
        arm: its name.
        what: for people.
        calls: all of them.
        first: TTFT in ms of first calls.
        later: TTFT in ms of later calls.
        queued: of these, ms in the queue.
        by_call: (call, median TTFT in ms), calls of all numbers.
        tokens: mean per call: prompt, local, loaded, returned, computed, again.
        again_share: of what earlier calls had computed, what was computed again.
        prefill_accelerator_s: computing prompts, all calls, times accelerators.
        busy: of the prefill, or only, engine, as a share of the time.
        peak_used: most of its pool that calls held at once, as a share.
        span_s: simulated.
        every: TTFT in ms of all calls, waits for admission included.
        turns_per_min: turns of people that were answered, per minute.
        waits: seconds that calls waited to be let in, of those that had to; None without
            admission.
        num_late: of these, let in because they had waited for too long.
    """

    arm: str
    what: str
    calls: int
    first: Mapping[str, float] | None
    later: Mapping[str, float] | None
    queued: Mapping[str, float] | None
    by_call: tuple[tuple[int, float], ...]
    tokens: Mapping[str, float]
    again_share: float
    prefill_accelerator_s: float
    busy: float
    peak_used: float
    span_s: float
    every: Mapping[str, float] | None
    turns_per_min: float
    waits: Mapping[str, float] | None
    num_late: int


def arm_plan(result: SimResult, *, accelerators: int) -> ArmPlan:
    """Sum one arm up."""
    served = result.served
    later = [each for each in served if each.call > 1]
    return ArmPlan(
        arm=result.arm.name,
        what=result.arm.what,
        calls=len(served),
        first=summary([1e3 * each.ttft_s for each in served if each.call == 1]),
        later=summary([1e3 * each.ttft_s for each in later]),
        queued=summary([1e3 * each.queued_s for each in later]),
        by_call=_by_call(served),
        tokens=_tokens(later),
        again_share=again_share(later),
        prefill_accelerator_s=result.compute_s * accelerators,
        busy=result.compute_s / result.span_s if result.span_s else 0.0,
        peak_used=result.peak_used,
        span_s=result.span_s,
        every=summary([1e3 * each.ttft_s for each in served]),
        turns_per_min=turns_per_min(served),
        waits=_waits(result),
        num_late=result.num_late,
    )


def turns_per_min(served: Sequence[Served]) -> float:
    """Return how many turns were answered per minute, until the last one was."""
    ended_s = max((each.ended_s for each in served), default=0.0)
    return 60 * sum(each.ends_turn for each in served) / ended_s if ended_s else 0.0


def _waits(result: SimResult) -> Mapping[str, float] | None:
    if result.arm.admission is None:
        return None
    return summary([each.admitted_s for each in result.served if each.admitted_s]) or {}


def _by_call(served: Iterable[Served]) -> tuple[tuple[int, float], ...]:
    found: dict[int, list[float]] = {}
    for each in served:
        if each.call <= _MOST_CALLS:
            found.setdefault(each.call, []).append(1e3 * each.ttft_s)
    return tuple((call, quantile(values, 0.5)) for call, values in sorted(found.items()))


def _tokens(served: Sequence[Served]) -> dict[str, float]:
    names = ("prompt", "local", "loaded", "returned", "computed", "again")
    if not served:
        return {}
    return {name: sum(getattr(each, name) for each in served) / len(served) for name in names}


def again_share(served: Sequence[Served]) -> float:
    """Return which share of what earlier calls had computed was computed again."""
    seen = sum(each.seen for each in served)
    return sum(each.again for each in served) / seen if seen else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FitPoint:
    """One number of sessions.

    Attributes:
        sessions: at a time.
        again_share: by arm.
        ttft_p50_ms: of later calls, by arm.
        ttft_p99_ms: likewise.
    """

    sessions: int
    again_share: Mapping[str, float]
    ttft_p50_ms: Mapping[str, float]
    ttft_p99_ms: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fits:
    """How many sessions fit.

    Attributes:
        by_arm: most sessions of which at most :attr:`limit` is computed again; None when even
            one is too many.
        open_arms: arms for which no number that was tried is too many.
        limit: share of what could be reused.
        points: what was simulated, by sessions.
        by_size: sessions of mean length that the keeping pool holds, by its size alone.
    """

    by_arm: Mapping[str, int | None]
    open_arms: tuple[str, ...]
    limit: float
    points: tuple[FitPoint, ...]
    by_size: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One setting of the extension, simulated.

    Attributes:
        policy: which lineage is worth most.
        retain_budget: share of the pool.
        again_share: of what could be reused.
        ttft_mean_ms: of later calls.
    """

    policy: str
    retain_budget: float
    again_share: float
    ttft_mean_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Thresholds:
    """From how many missing tokens a pull is cheaper than computing, None for never.

    Attributes:
        at_start: behind nothing.
        at_context: behind a context of mean length.
        context: that length.
    """

    at_start: int | None
    at_context: int | None
    context: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanReport:
    """Everything that is printed.

    Attributes:
        load: what was simulated.
        rig: on what.
        arms: off first.
        fits: how many sessions fit, None where it was not asked for.
        choices: settings that were tried, the best first.
        thresholds: None where engines do not pull.
    """

    load: Load
    rig: Rig
    arms: tuple[ArmPlan, ...]
    fits: Fits | None
    choices: tuple[Choice, ...]
    thresholds: Thresholds | None

    @property
    def off(self) -> ArmPlan:
        """Stock."""
        return self.arms[0]

    @property
    def best(self) -> ArmPlan:
        """The arm with the shortest mean TTFT; off where nothing is shorter.

        Not admission, whose price is paid by the calls that wait.
        """
        compared = [each for each in self.arms if each.waits is None]
        return min(compared, key=lambda each: (each.later or {}).get("mean", 0.0))

    def gain(self, arm: ArmPlan) -> float | None:
        """Return mean TTFT of off over that of an arm, None without later calls."""
        if not self.off.later or not arm.later or not arm.later["mean"]:
            return None
        return self.off.later["mean"] / arm.later["mean"]

    def figures(self) -> list[Figure]:
        """Return the numbers as figures."""
        out = []
        off = self.off
        for each in self.arms:
            name = each.arm.replace(" ", "_")
            if each.later is not None and off.later is not None:
                out.append(
                    Figure(
                        figure=f"{name}_ttft_later_calls_mean",
                        unit="ms",
                        value=each.later["mean"],
                        baseline=off.later["mean"],
                        ratio=self.gain(each),
                    )
                )
            out += [
                Figure(
                    figure=f"{name}_computed_again",
                    unit="share of what could be reused",
                    value=each.again_share,
                    baseline=off.again_share,
                ),
                Figure(
                    figure=f"{name}_prefill",
                    unit="accelerator s",
                    value=each.prefill_accelerator_s,
                    baseline=off.prefill_accelerator_s,
                ),
            ]
        for name, count in ({} if self.fits is None else self.fits.by_arm).items():
            out.append(
                Figure(
                    figure=f"sessions_that_fit_{name.replace(' ', '_')}",
                    unit="sessions",
                    value=float(count or 0),
                )
            )
        return out

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-ready values."""
        load, rig = self.load, self.rig
        profile = {
            name: getattr(rig.profile, name) for name in rig.profile.__slots__ if name != "points"
        }
        return {
            "schema": FIGURES_SCHEMA,
            "figures": [figure.to_dict() for figure in self.figures()],
            "plan": {
                "schema": SCHEMA,
                "workload": load.workload.name,
                "agents": len(load.workload.agents),
                "calls": load.workload.num_calls,
                "shared_tokens": load.workload.shared,
                "sessions_at_a_time": load.sessions,
                "others_per_s": load.others_per_s,
                "others_tokens": load.others_tokens,
                "miss_rate": load.miss_rate,
                "wait_error": load.wait_error,
                "seed": load.seed,
                "pool_tokens": rig.pool_tokens,
                "decode_pool_tokens": rig.decode_pool_tokens,
                "unit_tokens": rig.unit_tokens,
                "profile": profile,
                "arms": [asdict(each) for each in self.arms],
                "fits": None if self.fits is None else asdict(self.fits),
                "choices": [asdict(each) for each in self.choices],
                "thresholds": None if self.thresholds is None else asdict(self.thresholds),
            },
        }


def thresholds(rig: Rig, load: Load) -> Thresholds | None:
    """Return from how many tokens a pull pays; None where there is nothing to pull from."""
    if not rig.pair:
        return None
    context = round(mean_context(load.workload))
    return Thresholds(
        at_start=rig.profile.break_even_tokens(0),
        at_context=rig.profile.break_even_tokens(context),
        context=context,
    )


def keeping_pool(rig: Rig) -> int:
    """Return the tokens of the pool that keeps sessions: decode's, where there is one."""
    return rig.pool_tokens if rig.decode_pool_tokens is None else rig.decode_pool_tokens
