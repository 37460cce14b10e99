"""``turncache mode``, ``stats`` and ``sessions``: questions to control sockets of engines."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Annotated, Final, TypeVar

import typer

from turncache.errors import TurncacheError, UsageError
from turncache.protocol import Mode
from turncache.spelling import none_of
from turncache_server.control.addresses import check_address
from turncache_server.control.client import ControlClient, switch_mode
from turncache_server.control.keys import FleetKeys, read_fleet_keys
from turncache_server.control.messages import (
    MAX_SESSIONS,
    ModeReply,
    SessionRow,
    Sessions,
    SessionsReply,
    SetMode,
    Stats,
    StatsReply,
)
from turncache_server.exits import CHECK_FAILED
from turncache_tools.shell import (
    check_seconds,
    progress,
    write_json,
    write_table,
)

TIMEOUT_S: Final = 5.0

_ReplyT = TypeVar("_ReplyT", ModeReply, StatsReply, SessionsReply)

Timeout = Annotated[float, typer.Option(help="Seconds to wait for an answer.")]
Addresses = Annotated[
    list[str],
    typer.Argument(
        metavar="ENGINE...",
        help="Control sockets: tcp://127.0.0.1:5800, 127.0.0.1:5800 or 5800.",
    ),
]
SecretFile = Annotated[
    Path | None,
    typer.Option(
        "--fleet-secret-file", help="The fleet's secret; without it only loopback, without keys."
    ),
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
    fleet_secret_file: SecretFile = None,
    timeout: Timeout = TIMEOUT_S,
    as_json: Json = False,
) -> None:
    """Switch engines to on, observe or off, without a restart; or ask what they are in."""
    check_seconds(timeout, "--timeout")
    wanted = engines[-1] if engines[-1] in set(Mode) else ""
    if not wanted and engines[-1].isalpha() and engines[-1] != "localhost":
        raise UsageError(f"mode {none_of(engines[-1], Mode)}")
    keys = fleet_keys(fleet_secret_file)
    addresses = control_addresses(engines[:-1] if wanted else engines, keyed=keys is not None)

    def switch(client: ControlClient, address: str) -> ModeReply:
        if wanted:
            return switch_mode(client, address, wanted, timeout_s=timeout)
        return client.ask(address, SetMode(), ModeReply, timeout_s=timeout)

    replies, silent = _ask_each(addresses, keys, switch)
    rows = [(a, r.mode, r.why) for a, r in replies.items()]
    rows += [(a, "-", why_silent(a, error)) for a, error in silent.items()]
    if as_json:
        write_json({address: {"mode": found, "why": why} for address, found, why in rows})
    else:
        write_table(("engine", "mode", "why"), rows)
    _raise_first(silent)
    refused = [a for a, reply in replies.items() if wanted and reply.mode != wanted]
    if refused:
        progress(f"not in mode {wanted}: {', '.join(refused)}")
        raise typer.Exit(CHECK_FAILED)


def stats(
    engines: Addresses,
    fleet_secret_file: SecretFile = None,
    timeout: Timeout = TIMEOUT_S,
    as_json: Json = False,
) -> None:
    """Show counters and gauges of the extension, one column per engine."""
    check_seconds(timeout, "--timeout")
    keys = fleet_keys(fleet_secret_file)
    addresses = control_addresses(engines, keyed=keys is not None)
    replies, silent = _ask_each(
        addresses,
        keys,
        lambda client, address: client.ask(address, Stats(), StatsReply, timeout_s=timeout),
    )
    _tell_all_but_first(silent)
    if as_json:
        write_json({a: {"counters": r.counters, "gauges": r.gauges} for a, r in replies.items()})
    elif replies:
        _show_stats(replies)
    _raise_first(silent)


def _show_stats(replies: Mapping[str, StatsReply]) -> None:
    columns = [{**reply.counters, **reply.gauges} for reply in replies.values()]
    names = sorted({name for column in columns for name in column})
    write_table(
        ("name", *replies),
        [(name, *(_number(column.get(name)) for column in columns)) for name in names],
    )


def sessions(
    engines: Addresses,
    limit: Annotated[
        int, typer.Option(help="Sessions of each engine, the largest.", min=0, max=MAX_SESSIONS)
    ] = 100,
    fleet_secret_file: SecretFile = None,
    timeout: Timeout = TIMEOUT_S,
    as_json: Json = False,
) -> None:
    """Show the sessions that engines keep or serve; ids are the digests of the router's log."""
    check_seconds(timeout, "--timeout")
    keys = fleet_keys(fleet_secret_file)
    addresses = control_addresses(engines, keyed=keys is not None)
    replies, silent = _ask_each(
        addresses,
        keys,
        lambda client, address: client.ask(
            address, Sessions(limit=limit), SessionsReply, timeout_s=timeout
        ),
    )
    _tell_all_but_first(silent)
    if as_json:
        write_json({address: _sessions_data(reply) for address, reply in replies.items()})
    elif replies:
        names = ("engine", "session", "state", "tokens", "blocks", "chains", "expected", "kept")
        rows = [
            (reply.name or address, *_session_row(row, reply.block_size))
            for address, reply in replies.items()
            for row in reply.rows
        ]
        if rows:
            write_table(names, rows)
        for address, reply in replies.items():
            draining = ", draining" if reply.draining else ""
            progress(
                f"{reply.name or address}: {len(reply.rows)} of {reply.num_sessions} sessions "
                f"shown, {reply.num_calls} calls, {reply.num_handovers} hand-overs{draining}"
            )
    _raise_first(silent)


def session_data(row: SessionRow, block_size: int) -> dict[str, object]:
    """Return what is told of a session, as data."""
    return {
        "session": row.session,
        "state": row.state,
        "lineages": row.lineages,
        "kept_blocks": row.kept_blocks,
        "kept_tokens": row.kept_blocks * block_size,
        "expected_s": row.expected_s,
        "kept_s": row.kept_s,
    }


def _sessions_data(reply: SessionsReply) -> dict[str, object]:
    return {
        "name": reply.name,
        "side": reply.side,
        "draining": reply.draining,
        "num_sessions": reply.num_sessions,
        "num_calls": reply.num_calls,
        "num_handovers": reply.num_handovers,
        "sessions": [session_data(row, reply.block_size) for row in reply.rows],
    }


def _session_row(row: SessionRow, block_size: int) -> tuple[str, ...]:
    return (
        row.session,
        row.state,
        f"{row.kept_blocks * block_size:,}",
        f"{row.kept_blocks:,}",
        str(row.lineages),
        in_seconds(row.expected_s),
        in_seconds(row.kept_s),
    )


def in_seconds(value: float | None) -> str:
    """Return a time for people, a dash for none."""
    return "-" if value is None else f"{value:.0f} s"


def _ask_each(
    addresses: Sequence[str],
    keys: FleetKeys | None,
    ask: Callable[[ControlClient, str], _ReplyT],
) -> tuple[dict[str, _ReplyT], dict[str, TurncacheError]]:
    """Ask every engine, whatever the one before said; return answers and failures."""
    replies: dict[str, _ReplyT] = {}
    silent: dict[str, TurncacheError] = {}
    with closing(ControlClient(keys)) as client:
        for address in addresses:
            try:
                replies[address] = ask(client, address)
            except TurncacheError as error:
                silent[address] = error
    return replies, silent


def why_silent(address: str, error: TurncacheError) -> str:
    """Return what an engine's error says, where its address stands beside it."""
    return str(error).removeprefix(f"{address}: ")


def _tell_all_but_first(silent: Mapping[str, TurncacheError]) -> None:
    """Write why engines do not answer, but for the one that is raised in the end."""
    for error in list(silent.values())[1:]:
        progress(str(error))


def _raise_first(silent: Mapping[str, TurncacheError]) -> None:
    for error in silent.values():
        raise error


def fleet_keys(path: Path | None) -> FleetKeys | None:
    """Read the fleet's secret, None where no file is named.

    Raises:
        ConfigError: the file cannot be used.
    """
    return None if path is None else read_fleet_keys(path, setting="--fleet-secret-file")


def control_addresses(texts: Sequence[str], *, keyed: bool = False) -> list[str]:
    """Complete addresses of control sockets.

    Raises:
        UsageError: none given, or one that is no address or port.
        ConfigError: one beyond loopback without keys.
    """
    if not texts:
        raise UsageError("no engine given: name its control socket, such as 5800")
    out: list[str] = []
    for text in texts:
        if text.isdecimal() and not is_port(text):
            raise UsageError(f"{text}: expected a port from 1 to 65535")
        address = f"127.0.0.1:{text}" if text.isdecimal() else text
        address = address if "://" in address else f"tcp://{address}"
        out.append(check_address(address, setting="ENGINE", keyed=keyed))
    return out


def is_port(text: str) -> bool:
    """Say whether a text is the number of a port that something can listen on."""
    return text.isdecimal() and 0 < int(text) < 2**16


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:g}" if value % 1 else f"{value:.0f}"
