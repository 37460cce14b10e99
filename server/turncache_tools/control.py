"""``turncache mode`` and ``turncache stats``: questions to control sockets of engines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import Annotated, Final, TypeVar

import typer

from turncache.errors import TurncacheError, UsageError
from turncache.protocol import Mode
from turncache_server.control.client import ControlClient
from turncache_server.control.messages import ModeReply, SetMode, Stats, StatsReply
from turncache_server.control.server import check_loopback
from turncache_tools.shell import CHECK_FAILED, progress, write_json, write_table

TIMEOUT_S: Final = 5.0

_ReplyT = TypeVar("_ReplyT", ModeReply, StatsReply)

Timeout = Annotated[float, typer.Option(help="Seconds to wait for an answer.")]
Addresses = Annotated[
    list[str],
    typer.Argument(help="Control sockets: tcp://127.0.0.1:5800, 127.0.0.1:5800 or 5800."),
]
Json = Annotated[bool, typer.Option("--json", help="Data as JSON.")]


def mode(
    engines: Annotated[
        list[str],
        typer.Argument(
            metavar="ENGINE... [on|observe|off]",
            help="Control sockets, then the mode; without a mode it only asks.",
        ),
    ],
    timeout: Timeout = TIMEOUT_S,
    as_json: Json = False,
) -> None:
    """Switch engines to on, observe or off, without a restart; or ask what they are in."""
    wanted = engines[-1] if engines[-1] in set(Mode) else ""
    addresses = control_addresses(engines[:-1] if wanted else engines)
    replies, silent = _ask_each(addresses, SetMode(mode=wanted), ModeReply, timeout_s=timeout)
    rows = [(a, r.mode, r.why) for a, r in replies.items()]
    rows += [(a, "-", str(error)) for a, error in silent.items()]
    if as_json:
        write_json({address: {"mode": found, "why": why} for address, found, why in rows})
    else:
        write_table(("engine", "mode", "why"), rows)
    _raise_first(silent)
    refused = [a for a, reply in replies.items() if wanted and reply.mode != wanted]
    if refused:
        progress(f"not in mode {wanted}: {', '.join(refused)}")
        raise typer.Exit(CHECK_FAILED)


def stats(engines: Addresses, timeout: Timeout = TIMEOUT_S, as_json: Json = False) -> None:
    """Show counters and gauges of the extension, one column per engine."""
    addresses = control_addresses(engines)
    replies, silent = _ask_each(addresses, Stats(), StatsReply, timeout_s=timeout)
    for address, error in silent.items():
        progress(f"{address}: {error}")
    if as_json:
        write_json({a: {"counters": r.counters, "gauges": r.gauges} for a, r in replies.items()})
        _raise_first(silent)
        return
    columns = [{**reply.counters, **reply.gauges} for reply in replies.values()]
    names = sorted({name for column in columns for name in column})
    write_table(
        ("name", *replies),
        [(name, *(_number(column.get(name)) for column in columns)) for name in names],
    )
    _raise_first(silent)


def _ask_each(
    addresses: Sequence[str], question: SetMode | Stats, reply: type[_ReplyT], *, timeout_s: float
) -> tuple[dict[str, _ReplyT], dict[str, TurncacheError]]:
    """Ask every engine, whatever the one before said; return answers and failures."""
    replies: dict[str, _ReplyT] = {}
    silent: dict[str, TurncacheError] = {}
    with closing(ControlClient()) as client:
        for address in addresses:
            try:
                replies[address] = client.ask(address, question, reply, timeout_s=timeout_s)
            except TurncacheError as error:
                silent[address] = error
    return replies, silent


def _raise_first(silent: Mapping[str, TurncacheError]) -> None:
    for error in silent.values():
        raise error


def control_addresses(texts: Sequence[str]) -> list[str]:
    """Complete addresses of control sockets.

    Raises:
        UsageError: none given, or one that is no loopback address.
    """
    if not texts:
        raise UsageError("no engine given: name its control socket, such as 5800")
    out: list[str] = []
    for text in texts:
        address = f"127.0.0.1:{text}" if text.isdigit() else text
        address = address if "://" in address else f"tcp://{address}"
        out.append(check_loopback(address, setting="ENGINE"))
    return out


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:g}" if value % 1 else f"{value:.0f}"
