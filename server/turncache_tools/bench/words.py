"""The report in words and tables, for terminal and page. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from turncache_tools.bench.report import ArmReport, Report
from turncache_tools.bench.statistics import Interval

Table = tuple[Sequence[str], Sequence[Sequence[str]]]
_TIMES: Final = "\N{MULTIPLICATION SIGN}"


def interval(value: Interval | None, unit: str = "", digits: int = 2) -> str:
    """Return an estimate with its interval."""
    if value is None:
        return "-"
    ends = "no interval"
    if value.low is not None and value.high is not None:
        ends = f"{value.low:.{digits}f} to {value.high:.{digits}f}"
    return f"{value.value:.{digits}f}{unit} ({ends})"


def _ms(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.1f}" if value < 100 else f"{value:,.0f}"


def headline(report: Report) -> str:
    """Say the main result in one sentence."""
    best = [arm for arm in report.arms[1:] if arm.gain is not None]
    if not report.arms[1:]:
        return "Off alone was measured: there is nothing to compare it with"
    if not best:
        return "No gain can be stated: see why below"
    arm = max(best, key=lambda each: each.gain.value if each.gain else 0.0)
    gain = arm.gain
    sure = gain is not None and gain.low is not None and not gain.contains(1.0)
    if gain is None or gain.low is None:
        return (
            f"{arm.arm.name}: time to first token off over on {interval(gain, _TIMES)}, "
            "from too few samples for an interval"
        )
    if not sure:
        return (
            f"No difference is shown: {arm.arm.name} against off is {interval(gain, _TIMES)} in "
            "time to first token, calls 2 and later"
        )
    word = "sooner" if gain.value > 1 else "of off's speed"
    return (
        f"With {arm.arm.name} the first token comes {interval(gain, _TIMES)} {word}, "
        "calls 2 and later"
    )


def arm_table(report: Report) -> Table:
    """Return one row per arm: waiting, gain, and what it costs."""
    columns = (
        "arm",
        "calls",
        "TTFT ms p50",
        "p99",
        "p99.9",
        "max",
        "first call",
        "whole session mean",
        "ITL ms",
        "answer ms",
        "off / arm (95 %)",
    )
    return columns, [_arm_row(arm) for arm in report.arms]


def _arm_row(arm: ArmReport) -> list[str]:
    later = arm.later or {}
    failed = f" ({arm.failed} failed)" if arm.failed else ""
    silent = f" ({arm.no_token} without a token)" if arm.no_token else ""
    gain = "-" if not arm.refused else "refused"
    return [
        arm.arm.name,
        f"{arm.calls}{failed}{silent}",
        *(_ms(later.get(name)) for name in ("p50", "p99", "p99.9", "max")),
        _ms((arm.first or {}).get("p50")),
        _ms((arm.times["ttft_ms"] or {}).get("mean")),
        _ms((arm.times["between_ms"] or {}).get("p50")),
        _ms((arm.times["total_ms"] or {}).get("p50")),
        interval(arm.gain, _TIMES) if arm.gain is not None else gain,
    ]


def token_table(report: Report) -> Table:
    """Return where prompts' tokens came from, mean per later call."""
    columns = ("arm", "prompt", "local", "returned", "computed", "lost", "reasons")
    rows = []
    for arm in report.arms:
        numbers = [
            f"{arm.tokens[name]:,.0f}" if arm.tokens else "-"
            for name in ("prompt", "local", "returned", "computed", "lost")
        ]
        reasons = ", ".join(f"{name} {count}" for name, count in sorted(arm.reasons.items()))
        rows.append([arm.arm.name, *numbers, reasons or "-"])
    return columns, rows


_COSTS: Final = (
    ("transfers", "transfers"),
    ("transfer_s", "transfer s"),
    ("transfer_bytes", "transfer MB"),
    ("preemptions", "preemptions"),
)
_GAUGES: Final = (
    ("kv_usage", "KV in use %"),
    ("retained_share", "retained %"),
    ("gpu_utilisation", "GPU busy %"),
    ("gpu_power_w", "GPU W"),
    ("cpu_share", "CPU busy %"),
)


def cost_table(report: Report) -> Table:
    """Return what each arm cost: transfers, memory, utilisation, the others' waiting."""
    columns = (
        "arm",
        *(word for _, word in _COSTS),
        *(word for _, word in _GAUGES),
        "answer tokens/s",
        "others' s p50",
        "p99",
    )
    rows = []
    for arm in report.arms:
        costs = []
        for name, _ in _COSTS:
            value = arm.counters.get(name)
            scale = 1e-6 if name == "transfer_bytes" else 1.0
            costs.append("-" if value is None else f"{value * scale:,.2f}".rstrip("0").rstrip("."))
        gauges = [f"{arm.gauges[name]:.1f}" if name in arm.gauges else "-" for name, _ in _GAUGES]
        others = arm.others or {}
        waits = [f"{others[name]:.2f}" if others else "-" for name in ("p50", "p99")]
        rows.append([arm.arm.name, *costs, *gauges, f"{arm.answer_rate:.1f}", *waits])
    return columns, rows


def call_table(report: Report) -> Table:
    """Return median TTFT by call, with off over each arm."""
    off, *others = report.arms
    columns = ["call", "prompt", "off ms (95 %)"]
    for arm in others:
        columns += [f"{arm.arm.name} ms (95 %)", "off / arm (95 %)"]
    lines = [{line.call: line for line in arm.by_call} for arm in report.arms]
    rows = []
    for line in off.by_call:
        prompt = line.tokens.get("prompt")
        row = [str(line.call), "-" if prompt is None else f"{prompt:,.0f}"]
        row.append(interval(line.ttft_ms, digits=0))
        for arm, found in zip(others, lines[1:], strict=True):
            mine = found.get(line.call)
            row.append("-" if mine is None else interval(mine.ttft_ms, digits=0))
            row.append(interval((arm.gain_by_call or {}).get(line.call), _TIMES))
        rows.append(row)
    return columns, rows


def length_table(report: Report) -> Table:
    """Return median TTFT by length of the prompt."""
    tops = sorted({top for arm in report.arms for top, _ in arm.by_length})
    columns = ("prompt up to", *(f"{arm.arm.name} ms (calls)" for arm in report.arms))
    rows = []
    for top in tops:
        row = [f"{top:,}"]
        for arm in report.arms:
            found = dict(arm.by_length).get(top)
            row.append("-" if found is None else f"{found['p50']:,.0f} ({found['count']:.0f})")
        rows.append(row)
    return columns, rows


def notes(report: Report) -> list[str]:
    """Return what a reader must know before believing a number."""
    out = [f"Off against off: {interval(report.again, _TIMES)}; 1 is right."]
    if report.run.miss_rate is not None:
        found = "not known" if report.missed is None else f"{100 * report.missed:.0f} %"
        out.append(
            f"Prefill's cache emptied in {100 * report.run.miss_rate:.0f} % of the waits; off "
            f"missed in {found} of its later calls."
        )
    elif report.missed is not None:
        out.append(
            f"Nothing emptied prefill's cache on purpose; off missed in "
            f"{100 * report.missed:.0f} % of its later calls."
        )
    for arm in report.arms:
        out += [f"{arm.arm.name}: no gain is stated: {each.why}." for each in arm.refused]
        out += [f"{arm.arm.name}: {count} calls: {why}." for why, count in arm.errors.items()]
    for name, found in report.compared.items():
        if "why" in found:
            out.append(f"{name}: answers were not compared: {found['why']}.")
        else:
            edited = "differs" if found["edited_differs"] else "is off's"
            out.append(
                f"{name}: {found['different']} of {found['compared']} answers to equal prompts "
                f"differ from off's; the answer after an edit of the history {edited}."
            )
    out += [f"{each.name}: not measurable here: {each.why}." for each in report.missing]
    out += [f"{name}: {value}" for name, value in report.run.stack.items()]
    return out
