"""The report as one self-contained HTML page. Pure."""

from __future__ import annotations

from html import escape
from string import Template
from typing import Final

from turncache_tools.html import STYLE, table
from turncache_tools.observed.remedies import Report
from turncache_tools.observed.words import (
    breaker_table,
    headline,
    notes,
    reason_table,
    remedy_table,
    tokens,
)

_PAGE: Final = Template("""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>turncache: what is computed again</title>
<style>
$style
.bar { display: grid; grid-template-columns: 260px 1fr 120px; gap: 12px; align-items: center;
  font-size: 13.5px; margin-bottom: 5px; }
.bar i { display: block; height: 14px; background: #0b7f63; min-width: 1px; }
.bar.base i { background: #8a6d3b; }
.bar b { font-weight: 650; font-variant-numeric: tabular-nums; }
</style>
</head>
<body>
<h1>$headline</h1>
$failed
<h2>Prompt tokens computed again</h2>
$bars
<h2>What each remedy would save</h2>
$remedies
<h2>Why</h2>
$reasons
<h2>Sessions that break their own cache</h2>
$breakers
<footer>$notes</footer>
</body>
</html>
""")


def page(report: Report) -> str:
    """Return the page."""
    failed = [figure.figure for figure in report.figures if not figure.ok]
    return _PAGE.substitute(
        style=STYLE,
        headline=escape(headline(report)),
        failed=f'<p class="failed">Failed: {escape(", ".join(failed))}</p>' if failed else "",
        bars=_bars(report),
        remedies=table(remedy_table(report)),
        reasons=table(reason_table(report)),
        breakers=table(breaker_table(report)),
        notes="\n".join(f"<p>{escape(note)}</p>" for note in notes(report)),
    )


def _bars(report: Report) -> str:
    bars = [
        ("as it ran", report.total.again, " base"),
        ("simulated: stock", report.total.pools["stock"], " base"),
        *((remedy.name, remedy.again, "") for remedy in report.remedies),
    ]
    most = max(count for _, count, _ in bars) or 1
    return "\n".join(
        f'<div class="bar{kind}"><span>{escape(name)}</span>'
        f'<i style="width: {100 * count / most:.1f}%"></i><b>{tokens(count)}</b></div>'
        for name, count, kind in bars
    )
