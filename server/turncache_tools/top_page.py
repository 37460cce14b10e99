"""What ``turncache top`` shows of one round of looks, as tables and as data. Pure."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Final

from rich.console import Group
from rich.table import Table

from turncache.errors import TurncacheError
from turncache.protocol import Mode
from turncache_server.control.messages import SessionRow, SessionsReply, StatsReply
from turncache_tools.control import in_seconds, session_data, why_silent
from turncache_tools.router_looks import Wait
from turncache_tools.shell import make_table

#: Where the tokens of a prompt came from, and those that need not have been computed.
_TOKENS: Final = ("local", "returned", "computed", "lost")
_STATES: Final = (
    *("engine", "side", "mode", "calls", "sessions", "KV\nin use", "KV\nkept"),
    "lost since\nstart",
)
_WAITS: Final = ("router", "wait", "tenant", "calls", "longest", "room\nin use")
_SESSIONS: Final = (
    *("session", "engine", "state", "tokens kept", "chains", "expected in", "kept for"),
)
#: Columns that the engines' table needs; in a narrower terminal it is two.
_ONE_TABLE_WIDTH: Final = 110


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """What one engine said.

    Attributes:
        at_s: when, by one clock for all looks.
        stats: counters and gauges.
        sessions: its largest.
    """

    at_s: float
    stats: StatsReply
    sessions: SessionsReply


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLine:
    """One engine between two looks.

    Attributes:
        name: its own, or its address.
        side: prefill, decode or single.
        state: its mode, with what stands in the way.
        calls: in flight.
        sessions: kept or served.
        used: share of its blocks that calls hold.
        retained: share that is kept for sessions.
        tokens_per_s: of prompts of sessions, by where they came from; None at the first look.
        lost_share: lost of all prompt tokens since the engine began, None before the first.
    """

    name: str
    side: str
    state: str
    calls: int
    sessions: int
    used: float | None
    retained: float | None
    tokens_per_s: Mapping[str, float] | None
    lost_share: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sight:
    """What was seen in one round.

    Attributes:
        engines: a line for each that answered.
        sessions: the largest of all engines: (engine, tokens per block, session).
        waits: places where calls wait, by the router's URL.
        silent: why others did not answer, by address or URL.
    """

    engines: Sequence[EngineLine]
    sessions: Sequence[tuple[str, int, SessionRow]] = ()
    waits: Mapping[str, Sequence[Wait]] = field(default_factory=dict)
    silent: Mapping[str, TurncacheError] = field(default_factory=dict)


def engine_line(address: str, now: Look, before: Look | None) -> EngineLine:
    """Work out one engine's line; an engine that began anew has no rates until the next look."""
    gauges, counters = now.stats.gauges, now.stats.counters
    blocks = gauges.get("blocks", 0.0)
    used, retained = gauges.get("used_blocks"), gauges.get("retained_blocks")
    prompt = counters.get("prompt_tokens", 0.0)
    return EngineLine(
        name=now.sessions.name or address,
        side=now.sessions.side,
        state=_state(gauges, draining=now.sessions.draining),
        calls=now.sessions.num_calls,
        sessions=now.sessions.num_sessions,
        used=None if used is None or not blocks else used / blocks,
        retained=None if retained is None or not blocks else retained / blocks,
        tokens_per_s=_rates(now, before),
        lost_share=counters.get("lost_tokens", 0.0) / prompt if prompt else None,
    )


def _state(gauges: Mapping[str, float], *, draining: bool) -> str:
    state = next((mode.value for mode in Mode if gauges.get(f"mode_{mode.value}")), "-")
    if gauges.get("broken"):
        state += ", broken"
    return f"{state}, draining" if draining else state


def _rates(now: Look, before: Look | None) -> dict[str, float] | None:
    if before is None or now.at_s <= before.at_s:
        return None
    seconds = now.at_s - before.at_s
    grown = {
        name: now.stats.counters.get(f"{name}_tokens", 0.0)
        - before.stats.counters.get(f"{name}_tokens", 0.0)
        for name in _TOKENS
    }
    if min(grown.values()) < 0:
        return None
    return {name: tokens / seconds for name, tokens in grown.items()}


def largest(looks: Mapping[str, Look], count: int) -> list[tuple[str, int, SessionRow]]:
    """Return (engine, tokens per block, session) of the largest sessions of all engines."""
    found = [
        (look.sessions.name or address, look.sessions.block_size, row)
        for address, look in looks.items()
        for row in look.sessions.rows
    ]
    found.sort(key=lambda each: (-each[2].kept_blocks * each[1], each[0], each[2].session))
    return found[:count]


def page(sight: Sight, *, width: int) -> Group:
    """Lay out what is shown, for a terminal of so many columns."""
    tables = _engine_tables(sight.engines, width)
    if sight.waits:
        tables.append(make_table(_WAITS, _wait_rows(sight.waits)))
    if sight.silent:
        rows = [(at, why_silent(at, error)) for at, error in sight.silent.items()]
        tables.append(make_table(("does not answer", "why"), rows))
    if sight.sessions:
        tables.append(make_table(_SESSIONS, [_session_row(*each) for each in sight.sessions]))
    parts: list[Table | str] = []
    for table in tables:
        parts += ["", table] if parts else [table]
    return Group(*parts)


def _engine_tables(engines: Sequence[EngineLine], width: int) -> list[Table]:
    if not engines:
        return []
    states = [_state_cells(line) for line in engines]
    rates = [[_rate(line.tokens_per_s, name) for name in _TOKENS] for line in engines]
    if width >= _ONE_TABLE_WIDTH:
        columns = (*_STATES, *(f"{name}\ntokens/s" for name in _TOKENS))
        return [make_table(columns, list(map(operator.add, states, rates)))]
    names = [[line.name] for line in engines]
    columns = ("engine", *(f"{name} tokens/s" for name in _TOKENS))
    return [
        make_table(_STATES, states),
        make_table(columns, list(map(operator.add, names, rates))),
    ]


def _state_cells(line: EngineLine) -> list[str]:
    return [
        *(line.name, line.side, line.state, str(line.calls), str(line.sessions)),
        *(_percent(line.used), _percent(line.retained), _percent(line.lost_share)),
    ]


def _session_row(engine: str, block_size: int, row: SessionRow) -> Sequence[str]:
    return (
        row.session,
        engine,
        row.state,
        f"{row.kept_blocks * block_size:,}",
        str(row.lineages),
        in_seconds(row.expected_s),
        in_seconds(row.kept_s),
    )


def _wait_rows(waits: Mapping[str, Sequence[Wait]]) -> list[Sequence[str]]:
    """Return a row for each place where calls wait, and below it one for each tenant."""
    rows: list[Sequence[str]] = []
    for url, places in waits.items():
        if not places:
            rows.append((url, "none: everybody is let in", "", "", "", ""))
        for place in places:
            full = place.tokens / place.fits if place.fits else None
            waiting = (f"{place.waiting:,}", _longest(place.waiting, place.longest_s))
            rows.append((url, place.name, "", *waiting, _percent(full)))
            rows += [
                ("", "", each.tenant, f"{each.waiting:,}", in_seconds(each.longest_s), "")
                for each in place.tenants
            ]
    return rows


def _longest(waiting: int, longest_s: float) -> str:
    return in_seconds(longest_s if waiting else None)


def data(sight: Sight) -> dict[str, object]:
    """Return what is shown as data."""
    return {
        "engines": [
            {
                "name": line.name,
                "side": line.side,
                "mode": line.state.split(",")[0],
                "state": line.state,
                "calls": line.calls,
                "sessions": line.sessions,
                "used_share": line.used,
                "retained_share": line.retained,
                "tokens_per_s": line.tokens_per_s,
                "lost_share": line.lost_share,
            }
            for line in sight.engines
        ],
        "silent": {address: str(error) for address, error in sight.silent.items()},
        "routers": [
            {"url": url, "waits": [asdict(place) for place in places]}
            for url, places in sight.waits.items()
        ],
        "sessions": [
            {"engine": engine, **session_data(row, block_size)}
            for engine, block_size, row in sight.sessions
        ],
    }


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}".replace("%", " %")


def _rate(rates: Mapping[str, float] | None, name: str) -> str:
    return "-" if rates is None else f"{rates[name]:,.0f}"
