"""The report in words and tables: what terminal and page have in common. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from turncache_tools.observed.remedies import MOST_GHOST_ERROR, Remedy, Report, share

#: Columns and rows of one table.
Table = tuple[Sequence[str], Sequence[tuple[str, ...]]]

_FATES: Final = {
    "evicted": "everything left was wanted too: the pool is too small",
    "over_budget": "more was wanted than retain_budget or tenant_budget allow",
    "expired": "the session came back after its retention (retain_default_s, Turncache: retain=)",
    "unwanted": "no session, or the session had let it go",
}
_REASONS: Final = {
    "evicted": "the engine had handed the blocks out",
    "diverged": "the prompt changed",
    "timeout": "a pull did not arrive in time",
    "disabled": "the extension was off",
}


def headline(report: Report) -> str:
    """Say the first number in one sentence."""
    total = report.total
    again = share(total.again, total.computed)
    return (
        f"{again:.1%} of the prompt tokens that were computed had been computed before: "
        f"{tokens(total.again)} of {tokens(total.computed)}, in {total.calls:,} calls"
        + (f" over {duration(total.span_s)}." if total.span_s else ".")
    )


def notes(report: Report) -> list[str]:
    """Say what the numbers rest on, and what they do not say."""
    out = []
    for usage in report.usages:
        error = usage.ghost_error
        if error is None:
            out.append(
                f"{usage.source}: the ghost could not be checked (the mode is unknown, or "
                "nothing was seen)."
            )
        else:
            verdict = "" if error <= MOST_GHOST_ERROR else ": do not rely on the simulated rows"
            out.append(
                f"{usage.source}: the ghost of the engine as it ran is off by {error:.1%} of all "
                f"prompt tokens{verdict}."
            )
        if usage.dropped:
            out.append(f"{usage.source}: {usage.dropped:,} events were not seen.")
    if report.speed is None:
        out.append(
            "Accelerator seconds are not known: no large prefill step was timed. Give "
            "--prefill-speed TOKENS_PER_SECOND."
        )
    else:
        how = "given" if report.speed_is_given else "measured in steps of 256 tokens and more"
        out.append(f"Accelerator seconds at {report.speed:,.0f} prompt tokens per second ({how}).")
    if report.returned is None:
        out.append(
            "What returning answers from decode to prefill would save shows at a decode engine; "
            "none is in this report."
        )
    else:
        out.append("Return saves on prefill what decode's cache held; it adds to the rows above.")
    if report.total.breakers is None:
        out.append("Which sessions break their own cache is in a trace only (setting trace_file).")
    out.append("Remedies do not add up: two of them may save the same tokens.")
    return out


def remedy_table(report: Report) -> Table:
    """Tabulate what was computed again, and what each remedy would save."""
    total = report.total
    stock = total.pools["stock"]
    columns = (
        "engine",
        "computed again, tokens",
        "share of prefill",
        "saved, tokens",
        "saved, accelerator s",
    )
    # What a remedy saves is no longer computed either.
    base = total.computed - total.again
    rows = [
        ("as it ran", tokens(total.again), percent(total.again, total.computed), "", ""),
        ("simulated: stock", tokens(stock), percent(stock, base + stock), "", ""),
        *(
            (
                f"simulated: {remedy.name}",
                tokens(remedy.again),
                percent(remedy.again, base + remedy.again),
                tokens(remedy.saved),
                seconds(remedy),
            )
            for remedy in report.remedies
        ),
    ]
    if report.returned is not None:
        rows.append(
            (
                report.returned.name,
                "",
                "",
                tokens(report.returned.saved),
                seconds(report.returned),
            )
        )
    return columns, rows


def reason_table(report: Report) -> Table:
    """Tabulate why sessions lost tokens, in reality and with retention."""
    rows = [
        ("as it ran", reason, tokens(count), _REASONS.get(reason, ""))
        for reason, count in report.total.lost.most_common()
    ]
    rows += [
        ("with retention", reason, tokens(count), _FATES.get(reason, ""))
        for reason, count in report.total.unkept.most_common()
        if count
    ]
    return ("engine", "reason", "tokens", "what it means"), rows


def breaker_table(report: Report) -> Table:
    """Tabulate the sessions that break their own cache."""
    return ("session", "calls", "breaks", "tokens behind breaks", "worst break at token"), [
        (
            each.session,
            f"{each.calls:,}",
            f"{each.breaks:,}",
            tokens(each.tokens),
            f"{each.worst_at:,} of {each.worst_prompt:,}",
        )
        for each in report.total.breakers or ()
    ]


def tokens(count: float) -> str:
    """Write a number of tokens."""
    return f"{count:,.0f}"


def percent(part: float, whole: float) -> str:
    """Write a share."""
    return f"{share(part, whole):.1%}"


def seconds(remedy: Remedy) -> str:
    """Write accelerator seconds."""
    return "-" if remedy.seconds is None else f"{remedy.seconds:,.1f}"


def duration(span_s: float) -> str:
    """Write a time of minutes or hours."""
    if span_s < 120:
        return f"{span_s:.0f} s"
    return f"{span_s / 60:.0f} min" if span_s < 7200 else f"{span_s / 3600:.1f} h"
