"""``turncache mode`` and ``turncache stats``: questions to control sockets of engines."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from typing import Annotated, Final

import typer

from turncache.errors import UsageError
from turncache.protocol import Mode
from turncache_server.control.client import ControlClient
from turncache_server.control.messages import ModeReply, SetMode, Stats, StatsReply
from turncache_server.control.server import check_loopback
from turncache_tools.shell import CHECK_FAILED, progress, write_json, write_table

TIMEOUT_S: Final = 5.0

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
    with closing(ControlClient()) as client:
        replies = {
            address: client.ask(address, SetMode(mode=wanted), ModeReply, timeout_s=timeout)
            for address in addresses
        }
    if as_json:
        write_json({a: {"mode": reply.mode, "why": reply.why} for a, reply in replies.items()})
    else:
        write_table(("engine", "mode", "why"), [(a, r.mode, r.why) for a, r in replies.items()])
    refused = [a for a, reply in replies.items() if wanted and reply.mode != wanted]
    if refused:
        progress(f"not in mode {wanted}: {', '.join(refused)}")
        raise typer.Exit(CHECK_FAILED)


def stats(engines: Addresses, timeout: Timeout = TIMEOUT_S, as_json: Json = False) -> None:
    """Show counters and gauges of the extension, one column per engine."""
    addresses = control_addresses(engines)
    with closing(ControlClient()) as client:
        replies = {
            address: client.ask(address, Stats(), StatsReply, timeout_s=timeout)
            for address in addresses
        }
    if as_json:
        write_json({a: {"counters": r.counters, "gauges": r.gauges} for a, r in replies.items()})
        return
    columns = [{**reply.counters, **reply.gauges} for reply in replies.values()]
    names = sorted({name for column in columns for name in column})
    write_table(
        ("name", *addresses),
        [(name, *(_number(column.get(name)) for column in columns)) for name in names],
    )


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
