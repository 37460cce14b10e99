"""The report as one self-contained HTML page. Pure."""

from __future__ import annotations

from html import escape
from string import Template
from typing import Final

from turncache_tools.html import CHART_STYLE, STYLE, table
from turncache_tools.plan import words
from turncache_tools.plan.report import Fits, PlanReport
from turncache_tools.times_chart import times_chart

_PAGE: Final = Template("""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>turncache: plan</title>
<style>
$style
$charts
</style>
</head>
<body>
<h1>$headline</h1>
<p class="none">$workload</p>
<h2>Time to first token by call, medians (simulated)</h2>
$calls_chart
<h2>What each arm would give</h2>
<div class="wide">$arms</div>
<h2>Where a prompt's tokens come from, mean of calls 2 and later</h2>
<div class="wide">$tokens</div>
$admission
$fits
$choices
<h2>What follows</h2>
$advice
<footer>$notes</footer>
</body>
</html>
""")


def page(report: PlanReport) -> str:
    """Return the page."""
    return _PAGE.substitute(
        style=STYLE,
        charts=CHART_STYLE,
        headline=escape(words.headline(report)),
        workload=escape(words.workload_line(report)),
        calls_chart=_calls_chart(report),
        arms=table(words.arm_table(report)),
        tokens=table(words.token_table(report)),
        admission=_admission(report),
        fits="" if report.fits is None else _fits(report.fits),
        choices=_choices(report),
        advice="\n".join(f"<p>{escape(line)}</p>" for line in words.advice(report)),
        notes="\n".join(f"<p>{escape(note)}</p>" for note in words.notes(report)),
    )


def _calls_chart(report: PlanReport) -> str:
    numbers = [call for call, _ in report.off.by_call]
    if not numbers:
        return '<p class="none">None.</p>'
    lines = {arm.arm: dict(arm.by_call) for arm in report.arms}
    return times_chart(
        {name: [found[call] for call in numbers] for name, found in lines.items()},
        title="time to first token by call",
        places=[str(call) for call in numbers],
        along="call",
    )


def _admission(report: PlanReport) -> str:
    found = words.admission_table(report)
    if found is None:
        return ""
    return f'<h2>New sessions wait for room</h2>\n<div class="wide">{table(found)}</div>'


def _fits(fits: Fits) -> str:
    """Draw what all arms were simulated with: lines of one length."""
    arms = list(fits.by_arm)
    common = [point for point in fits.points if all(arm in point.again_share for arm in arms)]
    parts = ["<h2>Time to first token as sessions become more, medians of later calls</h2>"]
    if common:
        parts.append(
            times_chart(
                {arm: [point.ttft_p50_ms[arm] for point in common] for arm in arms},
                title="time to first token by sessions",
                places=[str(point.sessions) for point in common],
                along="sessions at a time",
            )
        )
    parts.append(f'<div class="wide">{table(words.fit_table(fits))}</div>')
    return "\n".join(parts)


def _choices(report: PlanReport) -> str:
    if not report.choices:
        return ""
    return f"<h2>Settings tried</h2>\n{table(words.choice_table(report))}"
