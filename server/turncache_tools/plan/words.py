"""The report in words and tables, for terminal and page. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from turncache_server.cost_profile import PRIOR
from turncache_tools.plan.report import ArmPlan, Fits, PlanReport

Table = tuple[Sequence[str], Sequence[Sequence[str]]]
_TIMES: Final = "\N{MULTIPLICATION SIGN}"
#: A gain below this is none: the model is not as good as that.
_LEAST_GAIN: Final = 1.05


def _ms(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.1f}" if value < 100 else f"{value:,.0f}"


def _share(value: float) -> str:
    return f"{100 * value:.1f} %"


def _tokens(value: float | None) -> str:
    return "never" if value is None else f"{value:,.0f}"


def headline(report: PlanReport) -> str:
    """Say the main result in one sentence."""
    off, best = report.off, report.best
    gain = report.gain(best)
    found = _share(1 - off.again_share)
    if gain is None:
        return "No session makes a second call: there is nothing to keep"
    if best is off or gain < _LEAST_GAIN:
        return (
            f"Nothing to gain worth the name: without turncache {found} of what could be reused "
            "is found"
        )
    mean = (best.later or {})["mean"]
    before = (off.later or {})["mean"]
    return (
        f"With {best.arm} the first token of later calls comes {gain:.2f}{_TIMES} sooner in the "
        f"mean ({_ms(mean)} instead of {_ms(before)} ms), and prefill computes "
        f"{best.prefill_accelerator_s:,.0f} instead of {off.prefill_accelerator_s:,.0f} "
        "accelerator seconds"
    )


def arm_table(report: PlanReport) -> Table:
    """Return one row per arm: waiting, what is computed again, what it costs."""
    columns = (
        "arm",
        "TTFT ms mean",
        "p50",
        "p99",
        "max",
        "first call p50",
        "queued p50",
        "off / arm",
        "computed again",
        "prefill accelerator s",
        "saved",
        "prefill busy",
    )
    return columns, [_arm_row(report, arm) for arm in report.arms]


def _arm_row(report: PlanReport, arm: ArmPlan) -> list[str]:
    later = arm.later or {}
    gain = report.gain(arm)
    off_s = report.off.prefill_accelerator_s
    saved = 1 - arm.prefill_accelerator_s / off_s if off_s else 0.0
    return [
        arm.arm,
        *(_ms(later.get(name)) for name in ("mean", "p50", "p99", "max")),
        _ms((arm.first or {}).get("p50")),
        _ms((arm.queued or {}).get("p50")),
        "-" if gain is None else f"{gain:.2f}{_TIMES}",
        _share(arm.again_share),
        f"{arm.prefill_accelerator_s:,.1f}",
        "-" if arm is report.off else _share(saved),
        _share(arm.busy),
    ]


def admission_table(report: PlanReport) -> Table | None:
    """Return what admission gives and takes, all calls; None where it was not simulated."""
    arms = [arm for arm in report.arms if arm.waits is not None]
    if not arms:
        return None
    place = report.arms.index(arms[0])
    columns = (
        "arm, all calls",
        "TTFT ms mean",
        "p50",
        "p99",
        "turns/min",
        "calls that waited",
        "longest wait s",
        "let in late",
    )
    rows = []
    for arm in (report.off, report.arms[place - 1], *arms):
        every, waits = arm.every or {}, arm.waits or {}
        rows.append(
            [
                arm.arm,
                *(_ms(every.get(name)) for name in ("mean", "p50", "p99")),
                f"{arm.turns_per_min:.2f}",
                f"{waits.get('count', 0):,.0f}",
                f"{waits.get('max', 0):,.0f}",
                str(arm.num_late),
            ]
        )
    return columns, rows


def token_table(report: PlanReport) -> Table:
    """Return where prompts' tokens come from, mean per later call."""
    columns = ("arm", "prompt", "local", "from host tier", "returned", "computed", "again")
    names = ("prompt", "local", "loaded", "returned", "computed", "again")
    rows = [
        [arm.arm, *(f"{arm.tokens[name]:,.0f}" if arm.tokens else "-" for name in names)]
        for arm in report.arms
    ]
    return columns, rows


def call_table(report: PlanReport) -> Table:
    """Return median TTFT by call."""
    columns = ("call", *(f"{arm.arm} ms" for arm in report.arms))
    found = [dict(arm.by_call) for arm in report.arms]
    rows = [[str(call), *(_ms(each.get(call)) for each in found)] for call, _ in report.off.by_call]
    return columns, rows


def fit_table(fits: Fits) -> Table:
    """Return what happens as sessions become more; empty cells were not simulated."""
    arms = list(fits.by_arm)
    columns = ["sessions at a time"]
    for arm in arms:
        columns += [f"{arm}: again", "TTFT ms p50", "p99"]
    rows = []
    for point in fits.points:
        row = [f"{point.sessions:,}"]
        for arm in arms:
            if arm not in point.again_share:
                row += ["", "", ""]
                continue
            times = point.ttft_p50_ms[arm], point.ttft_p99_ms[arm]
            row += [_share(point.again_share[arm]), *map(_ms, times)]
        rows.append(row)
    return columns, rows


def choice_table(report: PlanReport) -> Table:
    """Return the settings that were tried, the best first."""
    columns = ("policy", "retain_budget", "computed again", "TTFT ms mean")
    rows = [
        [
            each.policy,
            f"{each.retain_budget:g}",
            _share(each.again_share),
            _ms(each.ttft_mean_ms),
        ]
        for each in report.choices
    ]
    return columns, rows


def advice(report: PlanReport) -> list[str]:
    """Return what to set and what to buy, a line each."""
    out = []
    if report.fits is not None:
        out += _fit_lines(report.fits)
    out += _setting_lines(report)
    if report.thresholds is not None:
        found = report.thresholds
        out.append(
            f"Threshold: pulling is cheaper than computing from {_tokens(found.at_start)} missing "
            f"tokens on at the start of a prompt, and from {_tokens(found.at_context)} behind "
            f"{found.context:,} tokens. Engines measure that themselves as long as "
            "kv_recompute_threshold is not named."
        )
    return out + _remedy_lines(report)


def _fit_lines(fits: Fits) -> list[str]:
    said = []
    for name, count in fits.by_arm.items():
        if name in fits.open_arms:
            said.append(f"{name} at least {count}")
        else:
            said.append(f"{name} {count or 'not even 1'}")
    limit = f"{100 * fits.limit:.0f} %"
    names = ", ".join(said)
    by_size = f"{fits.by_size:.1f} by size"
    out = [f"Sessions at a time with at most {limit} computed again: {names} ({by_size})."]
    off, good = next(iter(fits.by_arm.items()))
    if not good or off in fits.open_arms:
        return out
    tried = [point for point in fits.points if off in point.again_share]
    within = next(point for point in tried if point.sessions == good)
    # The nearest point that is over the limit hardly differs: the fall is behind it.
    beyond = min((p for p in tried if p.sessions > good), key=lambda p: abs(p.sessions - 2 * good))
    out.append(
        f"The cliff without turncache: from {within.sessions} to {beyond.sessions} sessions TTFT "
        f"p50 goes from {_ms(within.ttft_p50_ms[off])} to {_ms(beyond.ttft_p50_ms[off])} ms, p99 "
        f"from {_ms(within.ttft_p99_ms[off])} to {_ms(beyond.ttft_p99_ms[off])} ms."
    )
    return out


def _setting_lines(report: PlanReport) -> list[str]:
    if not report.choices:
        return []
    best, worst = report.choices[0], report.choices[-1]
    if worst.ttft_mean_ms - best.ttft_mean_ms < 0.01 * best.ttft_mean_ms:
        return ["Policy and budget make no difference of 1 % here: leave them as they are."]
    cost = _ms(worst.ttft_mean_ms - best.ttft_mean_ms)
    settings = f"policy={best.policy}, retain_budget={best.retain_budget:g}"
    return [f"Policy and budget make up to {cost} ms in the mean; best is {settings}."]


def _remedy_lines(report: PlanReport) -> list[str]:
    best, gain = report.best, report.gain(report.best)
    if gain is None or best is report.off or gain < _LEAST_GAIN:
        return ["This load fits without turncache: there is nothing to set or to buy."]
    remedies = [arm for arm in report.arms[1:] if arm.waits is None]
    ranked = sorted(remedies, key=lambda arm: -(report.gain(arm) or 0.0))
    said = ", ".join(f"{arm.arm} {report.gain(arm) or 0:.2f}{_TIMES}" for arm in ranked)
    return [f"What each would give, mean TTFT of later calls, off over it: {said}."]


def notes(report: PlanReport) -> list[str]:
    """Return what a reader must know before believing a number."""
    load, rig = report.load, report.rig
    profile = rig.profile
    kind = (
        f"Costs are a prior, not measured here: {profile.model}; {profile.about}."
        if profile.source == PRIOR
        else f"Costs are calibrated: {profile.model}; {profile.about}."
    )
    pools = f"{rig.pool_tokens:,} tokens"
    if rig.decode_pool_tokens is not None:
        pools += f" on prefill, {rig.decode_pool_tokens:,} on decode"
    at_a_time = "as recorded" if load.sessions is None else f"{load.sessions} sessions at a time"
    out = [
        kind,
        f"Pool: {pools}; {at_a_time}; pools are reckoned in units of {rig.unit_tokens} tokens.",
        f"Tool waits are expected wrong by up to {load.wait_error:g}{_TIMES}, users never.",
        f"Simulated, not measured; seed {load.seed}.",
    ]
    if any(arm.arm.startswith("host") for arm in report.arms):
        out.append("How fast a host tier is read is assumed: 25 GB/s per accelerator, and 10 ms.")
    if load.others_per_s:
        out.append(
            f"Beside them {load.others_per_s:g} ordinary calls per second of "
            f"{load.others_tokens:,} tokens."
        )
    if load.miss_rate:
        out.append(f"{100 * load.miss_rate:.0f} % of later calls find nothing on prefill.")
    return out


def workload_line(report: PlanReport) -> str:
    """Say what was simulated."""
    workload = report.load.workload
    return (
        f"{workload.name}: {len(workload.agents)} agents, {report.off.calls:,} calls, "
        f"{workload.shared:,} shared tokens, {report.off.span_s:,.0f} s"
    )
