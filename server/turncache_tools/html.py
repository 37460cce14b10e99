"""What our HTML pages share: looks and tables. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Final

STYLE: Final = """* { box-sizing: border-box; margin: 0; }
html { background: #e9ebee; }
body { max-width: 1000px; margin: 0 auto; padding: 30px 36px; background: #fff; color: #1b2430;
  font: 15px/1.4 system-ui, "Segoe UI", "Helvetica Neue", Arial, sans-serif; }
h1 { font-size: 25px; line-height: 1.2; font-weight: 650; letter-spacing: -0.01em; }
h2 { font-size: 15px; font-weight: 650; margin: 26px 0 8px; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: 5px 12px 5px 0; border-bottom: 1px solid #dfe3e8;
  font-size: 13.5px; }
th { color: #5a6573; font-weight: 400; }
.none, footer { color: #5a6573; font-size: 13px; }
footer { margin-top: 26px; }
.failed { background: #fdecea; color: #8c1d13; padding: 6px 10px; font-size: 13px;
  margin-top: 12px; }"""

#: Of pages with charts and wide tables.
CHART_STYLE: Final = """svg { display: block; margin-top: 6px; overflow: visible; max-width: 100%; }
svg text { font: 12px system-ui, "Segoe UI", "Helvetica Neue", Arial, sans-serif; }
svg .grid { stroke: #e7eaee; }
svg .axis { stroke: #9aa4b1; }
svg .tick { fill: #5a6573; }
svg .label { font-size: 13px; }
svg .value { font-weight: 650; }
.wide { overflow-x: auto; }
.wide th, .wide td { white-space: nowrap; }"""
#: Colour and marker of a chart's lines, in order: colour is never the only difference.
LOOKS: Final = (
    ("#8a6d3b", "circle"),
    ("#2563c9", "square"),
    ("#0b7f63", "diamond"),
    ("#a23b72", "circle"),
    ("#5a6573", "square"),
)


def table(content: tuple[Sequence[str], Sequence[Sequence[str]]]) -> str:
    """Return a table, or a word in place of an empty one."""
    columns, rows = content
    if not rows:
        return '<p class="none">None.</p>'
    head = "".join(f"<th>{escape(name)}</th>" for name in columns)
    body = "\n".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    return f"<table><tr>{head}</tr>\n{body}</table>"
