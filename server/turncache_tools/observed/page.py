"""The report as one self-contained HTML page. Pure."""

from __future__ import annotations

from html import escape
from string import Template
from typing import Final

from turncache_tools.observed.remedies import Report
from turncache_tools.observed.words import (
    Table,
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
* { box-sizing: border-box; margin: 0; }
html { background: #e9ebee; }
body { max-width: 1000px; margin: 0 auto; padding: 30px 36px; background: #fff; color: #1b2430;
  font: 15px/1.4 system-ui, "Segoe UI", "Helvetica Neue", Arial, sans-serif; }
h1 { font-size: 25px; line-height: 1.2; font-weight: 650; letter-spacing: -0.01em; }
h2 { font-size: 15px; font-weight: 650; margin: 26px 0 8px; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: 5px 12px 5px 0; border-bottom: 1px solid #dfe3e8;
  font-size: 13.5px; }
th { color: #5a6573; font-weight: 400; }
.bar { display: grid; grid-template-columns: 260px 1fr 120px; gap: 12px; align-items: center;
  font-size: 13.5px; margin-bottom: 5px; }
.bar i { display: block; height: 14px; background: #0b7f63; min-width: 1px; }
.bar.base i { background: #8a6d3b; }
.bar b { font-weight: 650; font-variant-numeric: tabular-nums; }
.none, footer { color: #5a6573; font-size: 13px; }
footer { margin-top: 26px; }
.failed { background: #fdecea; color: #8c1d13; padding: 6px 10px; font-size: 13px;
  margin-top: 12px; }
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
        headline=escape(headline(report)),
        failed=f'<p class="failed">Failed: {escape(", ".join(failed))}</p>' if failed else "",
        bars=_bars(report),
        remedies=_table(remedy_table(report)),
        reasons=_table(reason_table(report)),
        breakers=_table(breaker_table(report)),
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


def _table(table: Table) -> str:
    columns, rows = table
    if not rows:
        return '<p class="none">None.</p>'
    head = "".join(f"<th>{escape(name)}</th>" for name in columns)
    body = "\n".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    return f"<table><tr>{head}</tr>\n{body}</table>"
