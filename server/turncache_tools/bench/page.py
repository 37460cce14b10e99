"""The report as one self-contained HTML page. Pure."""

from __future__ import annotations

from html import escape
from string import Template
from typing import Final

from turncache_tools.bench import words
from turncache_tools.bench.report import ArmReport, Report
from turncache_tools.html import CHART_STYLE, STYLE, table
from turncache_tools.times_chart import times_chart

_SOURCES: Final = (
    ("local", "#0b7f63", "in prefill's cache"),
    ("returned", "#2563c9", "returned"),
    ("computed", "#d9c9a5", "computed, new"),
    ("lost", "#b42318", "computed again"),
)

_PAGE: Final = Template("""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>turncache: bench</title>
<style>
$style
$charts
.stack { display: grid; grid-template-columns: 110px 1fr 110px; gap: 12px; align-items: center;
  font-size: 13.5px; margin-bottom: 5px; }
.stack div { display: flex; height: 16px; }
.key { font-size: 13px; color: #5a6573; margin-right: 14px; }
.key i { display: inline-block; width: 11px; height: 11px; margin-right: 5px; }
</style>
</head>
<body>
<h1>$headline</h1>
<p class="none">$workload</p>
$failed
<h2>Time to first token by call, medians</h2>
$chart
<h2>Arms</h2>
<div class="wide">$arms</div>
<h2>Where a prompt's tokens came from, mean of calls 2 and later</h2>
$stacks
$tokens
<h2>Gain against memory</h2>
$memory
<h2>By call</h2>
<div class="wide">$calls</div>
<h2>By length of the prompt, medians of all calls</h2>
<div class="wide">$lengths</div>
<h2>What it costs, per block</h2>
<div class="wide">$costs</div>
<footer>$notes</footer>
</body>
</html>
""")


def page(report: Report) -> str:
    """Return the page."""
    refused = [each for arm in report.arms for each in arm.refused]
    failed = "; ".join(f"{each.arm}: {each.why}" for each in refused)
    return _PAGE.substitute(
        style=STYLE,
        charts=CHART_STYLE,
        headline=escape(words.headline(report)),
        workload=escape(report.run.workload),
        failed=f'<p class="failed">No gain is stated. {escape(failed)}</p>' if failed else "",
        chart=_chart(report),
        arms=table(words.arm_table(report)),
        stacks=_stacks(report),
        tokens=table(words.token_table(report)),
        memory=table(_memory(report)),
        calls=table(words.call_table(report)),
        lengths=table(words.length_table(report)),
        costs=table(words.cost_table(report)),
        notes="\n".join(f"<p>{escape(note)}</p>" for note in words.notes(report)),
    )


def _chart(report: Report) -> str:
    """Draw the calls that every arm has: lines of one length."""
    numbers = [{line.call: line.ttft_ms.value for line in arm.by_call} for arm in report.arms]
    last = 0
    while all(last + 1 in found for found in numbers):
        last += 1
    if not last:
        return '<p class="none">No call has a first token in every arm.</p>'
    lines = {
        arm.arm.name: [found[call] for call in range(1, last + 1)]
        for arm, found in zip(report.arms, numbers, strict=True)
    }
    return times_chart(lines, title="time to first token by call")


def _stacks(report: Report) -> str:
    known = [arm for arm in report.arms if arm.tokens]
    if not known:
        return '<p class="none">No answer says what happened to its prompt.</p>'
    most = max(arm.tokens["prompt"] for arm in known) or 1.0
    keys = "".join(
        f'<span class="key"><i style="background: {colour}"></i>{escape(what)}</span>'
        for _, colour, what in _SOURCES
    )
    return "\n".join([f"<p>{keys}</p>", *(_stack(arm, most) for arm in known)])


def _stack(arm: ArmReport, most: float) -> str:
    parts = dict(arm.tokens)
    parts["computed"] -= parts["lost"]
    bars = "".join(
        f'<i style="width: {100 * parts[name] / most:.2f}%; background: {colour}" '
        f'title="{escape(what)}: {parts[name]:,.0f}"></i>'
        for name, colour, what in _SOURCES
    )
    prompt = f"{arm.tokens['prompt']:,.0f} tokens"
    return (
        f'<div class="stack"><span>{escape(arm.arm.name)}</span><div>{bars}</div>'
        f"<b>{prompt}</b></div>"
    )


def _memory(report: Report) -> words.Table:
    columns = ("arm", "retained % of the pool, mean", "KV in use %, mean", "off / arm (95 %)")
    rows = []
    for arm in report.arms:
        held = [
            f"{arm.gauges[name]:.1f}" if name in arm.gauges else "-"
            for name in ("retained_share", "kv_usage")
        ]
        gain = words.interval(arm.gain, "\N{MULTIPLICATION SIGN}")
        rows.append([arm.arm.name, *held, "refused" if arm.refused else gain])
    return columns, rows
