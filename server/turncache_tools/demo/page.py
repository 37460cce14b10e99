"""The slide: one self-contained HTML page, 1280 x 720. Pure."""

from __future__ import annotations

from html import escape
from string import Template
from typing import Final

from turncache_tools.demo.chart import Frame, Line, line_chart
from turncache_tools.demo.compare import Verdict
from turncache_tools.demo.edited import DELETED, PRESENT
from turncache_tools.demo.report import (
    Report,
    curves,
    hardware_line,
    load_line,
    missed_line,
    scale_line,
)
from turncache_tools.demo.rows import Scene

_STYLES: Final = (("#8a6d3b", "circle"), ("#2563c9", "square"), ("#0b7f63", "diamond"))
_TIMES: Final = "\N{MULTIPLICATION SIGN}"
_TITLES: Final = {
    Scene.SINGLE: "One vLLM",
    Scene.PAIR: "Prefill and decode apart",
}
_HALF: Final = Frame(width=596, height=304)
_WHOLE: Final = Frame(width=1208, height=304)

_PAGE: Final = Template("""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=1280">
<title>turncache: an agent's waits</title>
<style>
* { box-sizing: border-box; margin: 0; }
html { background: #e9ebee; }
body { width: 1280px; height: 720px; margin: 0 auto; padding: 30px 36px 20px; background: #fff;
  color: #1b2430; font: 15px/1.4 system-ui, "Segoe UI", "Helvetica Neue", Arial, sans-serif;
  display: flex; flex-direction: column; gap: 14px; overflow: hidden; }
h1 { font-size: 27px; line-height: 1.2; font-weight: 650; letter-spacing: -0.01em; }
h2 { font-size: 15px; font-weight: 650; }
.sub { color: #5a6573; font-size: 14.5px; margin-top: 3px; }
.row { display: flex; gap: 16px; }
.row > * { flex: 1 1 0; min-width: 0; }
.load, .missed { color: #5a6573; font-size: 12.5px; font-weight: 400; }
svg { display: block; margin-top: 6px; overflow: visible; }
svg text { font: 12px system-ui, "Segoe UI", "Helvetica Neue", Arial, sans-serif; }
svg .grid { stroke: #e7eaee; }
svg .axis { stroke: #9aa4b1; }
svg .tick { fill: #5a6573; }
svg .label { font-size: 13px; }
svg .value { font-weight: 650; }
.numbers { border-top: 1px solid #dfe3e8; border-bottom: 1px solid #dfe3e8; padding: 11px 0; }
.number b { display: block; font-size: 25px; line-height: 1.15; font-weight: 650;
  font-variant-numeric: tabular-nums; letter-spacing: -0.01em; }
.number span { color: #5a6573; font-size: 13px; display: block; }
.act > p { font-size: 13.5px; color: #414c5a; margin-bottom: 7px; }
.answer { border-left: 4px solid; padding: 3px 0 3px 12px; }
.answer q { font-size: 17px; quotes: "\\201C" "\\201D"; }
.answer span { display: block; font-size: 12.5px; color: #5a6573; }
.answer.wrong { border-color: #b42318; }
.answer.wrong b { color: #b42318; }
.answer.right { border-color: #0b7f63; }
.answer.right b { color: #0b7f63; }
footer { margin-top: auto; color: #5a6573; font-size: 12px; }
.failed { background: #fdecea; color: #8c1d13; padding: 6px 10px; font-size: 13px; }
</style>
</head>
<body>
<header>
<h1>$title</h1>
<p class="sub">$subtitle</p>
</header>
$failed
<div class="row">
$charts
</div>
<div class="row numbers">
$numbers
</div>
<div class="act">
<p>$act</p>
<div class="row">
$answers
</div>
</div>
<footer>$footer</footer>
</body>
</html>
""")


def page(report: Report) -> str:
    """Return the page."""
    pair = report.figure("pair_return_ttft_last_call")
    num_calls = len(next(iter(curves(report, Scene.PAIR).values())))
    runs = "" if report.num_runs == 1 else f", medians of {report.num_runs} runs"
    turns = ", off and on in turns" if report.in_turns else ""
    failed = [figure.figure for figure in report.figures if not figure.ok]
    return _PAGE.substitute(
        title=escape(
            f"At call {num_calls} the first token comes after {_seconds(pair.value)} "
            f"instead of {_seconds(pair.baseline)}"
        ),
        subtitle=escape(
            f"An agent's {num_calls} calls. While its tools run, for a short or a long time, other "
            f"sessions flood the caches. Time to first token in seconds{runs}{turns}."
        ),
        failed=f'<p class="failed">Failed: {escape(", ".join(failed))}</p>' if failed else "",
        charts="\n".join(_chart(report, scene) for scene in report.scenes),
        numbers="\n".join(_number(value, what) for value, what in _numbers(report)),
        act=escape(
            f"Last act: the history's document about {DELETED.name} in {DELETED.city} is replaced "
            f"by one about {PRESENT.name} in {PRESENT.city}. “{report.last_act.question}”"
        ),
        answers=_answers(report),
        footer=" ".join(
            escape(line) for line in (hardware_line(report), scale_line(report)) if line
        ),
    )


def _chart(report: Report, scene: Scene) -> str:
    lines = [
        Line(name=_short(name), colour=colour, marker=marker, values=values)
        for (name, values), (colour, marker) in zip(
            curves(report, scene).items(), _STYLES, strict=False
        )
    ]
    svg = line_chart(
        lines,
        _HALF if len(report.scenes) > 1 else _WHOLE,
        unit="s",
        title=f"{_TITLES[scene]}: time to first token by call",
    )
    load = escape(load_line(report, scene))
    return (
        f'<section><h2>{_TITLES[scene]} <span class="load">· {load}</span></h2>\n{svg}\n'
        f'<p class="missed">{escape(missed_line(report, scene))}{_median(report, scene)}</p>'
        "</section>"
    )


def _median(report: Report, scene: Scene) -> str:
    num_takes = max(row.take for row in report.rows if row.scene is scene)
    return f" The last call in turns: median of {num_takes}." if num_takes > 1 else ""


def _short(name: str) -> str:
    """Shorten an arm's name to what fits beside a line."""
    return {"off (stock NixlConnector)": "off (stock)", "retention and return": "and return"}.get(
        name, name
    )


def _numbers(report: Report) -> list[tuple[str, str]]:
    pair = report.figure("pair_return_ttft_last_call")
    computed = report.figure("pair_return_computed_calls_2_on")
    ties = int(report.figure("answers_at_a_tie").value)
    different = int(report.figure("answers_different").value)
    compared = sum(row.verdict is not Verdict.REFERENCE for row in report.rows)
    num_calls = max(row.call for row in report.rows)
    sooner = [(f"{pair.ratio or 0:.1f}{_TIMES}", "sooner on the pair at the last call")]
    if Scene.SINGLE in report.scenes:
        single = report.figure("single_retention_ttft_last_call")
        sooner.append((f"{single.ratio or 0:.1f}{_TIMES}", "sooner on one engine at the last call"))
    return [
        *sooner,
        (
            f"{computed.baseline or 0:,.0f} → {computed.value:,.0f}",
            "prompt tokens computed in calls 2 to " + f"{num_calls}, pair",
        ),
        (
            f"{compared - different} of {compared}",
            f"answers equal the recomputed ones ({ties} at a tie)",
        ),
    ]


def _number(value: str, what: str) -> str:
    return f'<div class="number"><b>{escape(value)}</b><span>{escape(what)}</span></div>'


def _answers(report: Report) -> str:
    act = report.last_act
    ours = _answer("turncache", act.ours, wrong=act.ours_is_from_the_deleted)
    if act.stock is None:
        return ours
    stock = _answer(
        "stock bidirectional_kv_xfer", act.stock.answer, wrong=act.stock_is_from_the_deleted
    )
    return f"{stock}\n{ours}"


def _answer(who: str, text: str, *, wrong: bool) -> str:
    kind = "wrong" if wrong else "right"
    verdict = "from the deleted document" if wrong else "nothing of the deleted document"
    return (
        f'<div class="answer {kind}"><q>{escape(text)}</q>'
        f"<span>{escape(who)}: <b>{verdict}</b></span></div>"
    )


def _seconds(milliseconds: float | None) -> str:
    return f"{(milliseconds or 0) / 1e3:.1f} s"
