"""``turncache top``: engines and their largest sessions, looked at again and again."""

from __future__ import annotations

import itertools
import operator
import time
from collections.abc import Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass
from typing import Annotated, Final

import typer
from rich.console import Group
from rich.live import Live
from rich.table import Table

from turncache.errors import TurncacheError, UsageError
from turncache.protocol import Mode
from turncache_server.control.client import ControlClient
from turncache_server.control.messages import (
    MAX_SESSIONS,
    SessionRow,
    Sessions,
    SessionsReply,
    Stats,
    StatsReply,
)
from turncache_tools.control import (
    TIMEOUT_S,
    Addresses,
    Json,
    SecretFile,
    Timeout,
    control_addresses,
    fleet_keys,
    in_seconds,
    session_data,
    why_silent,
)
from turncache_tools.shell import (
    check_seconds,
    make_console,
    make_table,
    show,
    write,
    write_json,
)

#: Where the tokens of a prompt came from, and those that need not have been computed.
_TOKENS: Final = ("local", "returned", "computed", "lost")
_LEAST_EVERY_S: Final = 0.1
_STATES: Final = (
    *("engine", "side", "mode", "calls", "sessions", "KV\nin use", "KV\nkept"),
    "lost since\nstart",
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


def top(
    engines: Addresses,
    *,
    every: Annotated[float, typer.Option(help="Seconds between two looks.")] = 1.0,
    count: Annotated[int, typer.Option(help="Looks; 0: until Ctrl-C.", min=0)] = 0,
    rows: Annotated[
        int, typer.Option(help="Sessions that are shown.", min=0, max=MAX_SESSIONS)
    ] = 15,
    fleet_secret_file: SecretFile = None,
    timeout: Timeout = TIMEOUT_S,
    as_json: Json = False,
) -> None:
    """Watch engines and their largest sessions; an engine that is gone stays in the table."""
    if not _LEAST_EVERY_S <= every < float("inf"):
        raise UsageError(f"--every {every:g}: expected at least {_LEAST_EVERY_S} seconds")
    check_seconds(timeout, "--timeout")
    keys = fleet_keys(fleet_secret_file)
    addresses = control_addresses(engines, keyed=keys is not None)
    console = make_console()
    live = console.is_terminal and not as_json
    before: dict[str, Look] = {}
    with (
        closing(ControlClient(keys)) as client,
        Live(console=console, auto_refresh=False) if live else nullcontext() as screen,
    ):
        for number in itertools.count(1):
            began_s = time.monotonic()
            looks, silent = _look_at_all(client, addresses, timeout_s=timeout, limit=rows)
            if number == 1 and not looks:
                raise next(iter(silent.values()))
            lines = [engine_line(at, look, before.get(at)) for at, look in looks.items()]
            before |= looks
            shown = largest(looks, rows)
            if as_json:
                write_json(_data(lines, shown, silent))
            elif screen is not None:
                screen.update(page(lines, shown, silent, width=console.width), refresh=True)
            else:
                if number > 1:
                    write("")
                show(console, page(lines, shown, silent, width=console.width))
            if number == count:
                return
            time.sleep(max(0.0, every - (time.monotonic() - began_s)))


def _look_at_all(
    client: ControlClient, addresses: Sequence[str], *, timeout_s: float, limit: int
) -> tuple[dict[str, Look], dict[str, TurncacheError]]:
    looks: dict[str, Look] = {}
    silent: dict[str, TurncacheError] = {}
    for address in addresses:
        try:
            stats = client.ask(address, Stats(), StatsReply, timeout_s=timeout_s)
            at_s = time.monotonic()
            found = client.ask(address, Sessions(limit=limit), SessionsReply, timeout_s=timeout_s)
        except TurncacheError as error:
            silent[address] = error
        else:
            looks[address] = Look(at_s=at_s, stats=stats, sessions=found)
    return looks, silent


def page(
    lines: Sequence[EngineLine],
    shown: Sequence[tuple[str, int, SessionRow]],
    silent: Mapping[str, TurncacheError],
    *,
    width: int,
) -> Group:
    """Lay out what is shown, for a terminal of so many columns."""
    parts: list[Table | str] = []
    if lines:
        states = [_state_cells(line) for line in lines]
        rates = [[_rate(line.tokens_per_s, name) for name in _TOKENS] for line in lines]
        if width >= _ONE_TABLE_WIDTH:
            columns = (*_STATES, *(f"{name}\ntokens/s" for name in _TOKENS))
            parts.append(make_table(columns, list(map(operator.add, states, rates))))
        else:
            names = [[line.name] for line in lines]
            columns = ("engine", *(f"{name} tokens/s" for name in _TOKENS))
            parts += [make_table(_STATES, states), ""]
            parts.append(make_table(columns, list(map(operator.add, names, rates))))
    gone = make_table(
        ("does not answer", "why"), [(at, why_silent(at, error)) for at, error in silent.items()]
    )
    sessions = make_table(
        ("session", "engine", "state", "tokens kept", "chains", "expected in", "kept for"),
        [
            (
                row.session,
                engine,
                row.state,
                f"{row.kept_blocks * block_size:,}",
                str(row.lineages),
                in_seconds(row.expected_s),
                in_seconds(row.kept_s),
            )
            for engine, block_size, row in shown
        ],
    )
    parts += ["", gone] if silent else []
    parts += ["", sessions] if shown else []
    return Group(*parts)


def _state_cells(line: EngineLine) -> list[str]:
    return [
        *(line.name, line.side, line.state, str(line.calls), str(line.sessions)),
        *(_percent(line.used), _percent(line.retained), _percent(line.lost_share)),
    ]


def _data(
    lines: Sequence[EngineLine],
    shown: Sequence[tuple[str, int, SessionRow]],
    silent: Mapping[str, TurncacheError],
) -> dict[str, object]:
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
            for line in lines
        ],
        "silent": {address: str(error) for address, error in silent.items()},
        "sessions": [
            {"engine": engine, **session_data(row, block_size)} for engine, block_size, row in shown
        ],
    }


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}".replace("%", " %")


def _rate(rates: Mapping[str, float] | None, name: str) -> str:
    return "-" if rates is None else f"{rates[name]:,.0f}"
