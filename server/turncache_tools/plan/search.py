"""All simulations of one plan: the arms, how many sessions fit, which settings are best. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from turncache_server.connector.config import Settings
from turncache_server.retention.policy import POLICY_NAMES
from turncache_tools.bench.statistics import quantile
from turncache_tools.bench.workload import AgentSpec, Workload
from turncache_tools.plan.load import (
    AdmissionRules,
    Load,
    PlanArm,
    Rig,
    arms_for,
    mean_context,
    with_sessions,
)
from turncache_tools.plan.report import (
    Choice,
    FitPoint,
    Fits,
    PlanReport,
    again_share,
    arm_plan,
    keeping_pool,
    thresholds,
)
from turncache_tools.plan.served import Served, SimResult
from turncache_tools.plan.simulator import simulate

#: Of what could be reused, what may be computed again while sessions are said to fit.
FIT_LIMIT: Final = 0.1
_BUDGETS: Final = (0.25, 0.5, 0.75)
#: Beyond so many times what fits by size nothing is tried.
_MOST_TIMES: Final = 8
_MOST_SESSIONS: Final = 512
#: Every place serves so many agents, and an agent makes so many calls, when fits are sought.
_AGENTS_PER_PLACE: Final = 2
_CALLS_PER_AGENT: Final = 30

Say = Callable[[str], None]


@dataclass(slots=True)
class Counted:
    """How many calls were simulated, for the speed that is told."""

    calls: int = 0
    runs: int = 0


@dataclass(slots=True)
class Planner:
    """Runs the simulations of one plan.

    Attributes:
        load: calls.
        rig: engines.
        settings: of the extension, in arms that are ours.
        host_gb: host tiers to try.
        say: told of progress.
        admission: of the router, in an arm of its own; None for no such arm.
        counted: so far.
    """

    load: Load
    rig: Rig
    settings: Settings
    host_gb: Sequence[float]
    say: Say
    admission: AdmissionRules | None = None
    counted: Counted = field(default_factory=Counted)

    def plan(self, *, search: bool) -> PlanReport:
        """Simulate everything.

        Args:
            search: also seek how many sessions fit, and the best settings.
        """
        arms = arms_for(self.rig, self.settings, self.host_gb, self.admission)
        accelerators = self.rig.profile.accelerators
        results = [self._run(self.load, arm) for arm in arms]
        ours = next(a for a in reversed(arms) if a.retaining and a.admission is None)
        return PlanReport(
            load=self.load,
            rig=self.rig,
            arms=tuple(arm_plan(result, accelerators=accelerators) for result in results),
            fits=self._fits(arms, ours) if search else None,
            choices=self._choices(ours) if search else (),
            thresholds=thresholds(self.rig, self.load),
        )

    def _run(self, load: Load, arm: PlanArm, label: str = "") -> SimResult:
        name = label or arm.name

        def say(done: int) -> None:
            self.say(f"{name}: {done:,} calls")

        result = simulate(load, self.rig, arm, say)
        self.counted.calls += len(result.served) + result.num_others
        self.counted.runs += 1
        if not label:
            self.say(f"{name}: {len(result.served):,} calls simulated")
        return result

    # --- which settings -----------------------------------------------------------------------

    def _choices(self, ours: PlanArm) -> tuple[Choice, ...]:
        """Try policies and budgets; where two are equal, what is set comes first."""
        settings = ours.settings
        budgets = sorted({*_BUDGETS, settings.retain_budget})
        policies = list(dict.fromkeys([settings.policy, *POLICY_NAMES]))
        found = []
        for policy in policies:
            for budget in budgets:
                tried = replace(settings, policy=policy, retain_budget=budget)
                label = f"policy {policy}, budget {budget:g}"
                later = _later(self._run(self.load, replace(ours, settings=tried), label))
                if later:
                    mean_s = sum(each.ttft_s for each in later) / len(later)
                    found.append(
                        Choice(
                            policy=policy,
                            retain_budget=budget,
                            again_share=again_share(later),
                            ttft_mean_ms=1e3 * mean_s,
                        )
                    )
        self.say(f"{len(found)} settings simulated")
        is_set = settings.policy, settings.retain_budget

        def order(choice: Choice) -> tuple[float, bool]:
            # A difference below a tenth of a millisecond is none.
            given = (choice.policy, choice.retain_budget) == is_set
            return round(choice.ttft_mean_ms, 1), not given

        return tuple(sorted(found, key=order))

    # --- how many sessions fit ----------------------------------------------------------------

    def _fits(self, arms: Sequence[PlanArm], ours: PlanArm) -> Fits:
        """Double the sessions until too much is computed again, then halve the distance."""
        compared = [arms[0], ours, next(arm for arm in arms if arm.pool_factor > 1)]
        short = replace(self.load, workload=_short(self.load.workload), miss_rate=0.0)
        context = mean_context(short.workload)
        by_size = keeping_pool(self.rig) / context
        most = min(_MOST_SESSIONS, max(2, round(_MOST_TIMES * by_size)))
        points: dict[int, dict[str, _Point]] = {}

        def at(sessions: int, arm: PlanArm) -> _Point:
            known = points.setdefault(sessions, {})
            if arm.name not in known:
                agents = sessions * _AGENTS_PER_PLACE
                load = with_sessions(short, sessions, num_agents=agents)
                label = f"{arm.name}, {sessions} sessions"
                known[arm.name] = _point(self._run(load, arm, label))
            return known[arm.name]

        by_arm: dict[str, int | None] = {}
        open_arms = []
        for arm in compared:
            good, bad = 0, 1
            while bad <= most and at(bad, arm).again_share <= FIT_LIMIT:
                good, bad = bad, bad * 2
            if bad > most:
                open_arms.append(arm.name)
            else:
                while bad - good > max(1, good // 16):
                    middle = (good + bad) // 2
                    fits = at(middle, arm).again_share <= FIT_LIMIT
                    good, bad = (middle, bad) if fits else (good, middle)
            by_arm[arm.name] = good or None
            self.say(f"{arm.name}: {good} sessions fit")
        return Fits(
            by_arm=by_arm,
            open_arms=tuple(open_arms),
            limit=FIT_LIMIT,
            points=tuple(
                FitPoint(
                    sessions=sessions,
                    again_share={name: each.again_share for name, each in known.items()},
                    ttft_p50_ms={name: each.p50_ms for name, each in known.items()},
                    ttft_p99_ms={name: each.p99_ms for name, each in known.items()},
                )
                for sessions, known in sorted(points.items())
            ),
            by_size=by_size,
        )


@dataclass(frozen=True, slots=True)
class _Point:
    again_share: float
    p50_ms: float
    p99_ms: float


def _later(result: SimResult) -> list[Served]:
    return [each for each in result.served if each.call > 1]


def _point(result: SimResult) -> _Point:
    later = _later(result)
    times = [1e3 * each.ttft_s for each in later] or [0.0]
    return _Point(again_share(later), quantile(times, 0.5), quantile(times, 0.99))


def _short(workload: Workload) -> Workload:
    """Return agents that end early: a fit shows itself in their first calls."""

    def cut(agent: AgentSpec) -> AgentSpec:
        return replace(agent, calls=agent.calls[:_CALLS_PER_AGENT])

    return replace(workload, agents=tuple(map(cut, workload.agents)))
