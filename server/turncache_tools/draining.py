"""``turncache drain``: an engine hands its sessions to the others, so that it can be stopped.

The engine only carries the word: routers read it with their next health check, place nothing on
the engine any more, and name it as the source from which others pull. A session has gone over
when a call of it has ended well elsewhere.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from typing import Annotated, Final

import typer

from turncache_server.control.client import ControlClient, set_draining
from turncache_server.control.messages import MAX_SESSIONS, Sessions, SessionsReply
from turncache_server.exits import CHECK_FAILED
from turncache_tools.control import TIMEOUT_S, Json, SecretFile, control_addresses, fleet_keys
from turncache_tools.shell import check_seconds, progress, write, write_json

#: More than two of the router's default health checks.
SETTLE_S: Final = 5.0
#: Between two looks, at most.
LOOK_EVERY_S: Final = 0.5


def drain(
    engine: Annotated[
        str, typer.Argument(metavar="ENGINE", help="Its control socket, such as 5801.")
    ],
    *,
    timeout: Annotated[
        float, typer.Option(help="Seconds after which what is left is left.")
    ] = 600.0,
    settle: Annotated[
        float,
        typer.Option(
            help="Seconds for which nothing may be left; longer than the routers' "
            "health_interval_s twice."
        ),
    ] = SETTLE_S,
    cancel: Annotated[bool, typer.Option("--cancel", help="Let it have sessions again.")] = False,
    fleet_secret_file: SecretFile = None,
    as_json: Json = False,
) -> None:
    """Hand an engine's sessions to the others and wait until none is left, before a restart."""
    check_seconds(timeout, "--timeout", none_too=True)
    check_seconds(settle, "--settle", none_too=True)
    keys = fleet_keys(fleet_secret_file)
    (address,) = control_addresses([engine], keyed=keys is not None)
    began_s = time.monotonic()
    with closing(ControlClient(keys)) as client:
        set_draining(client, address, not cancel, timeout_s=TIMEOUT_S)

        def look() -> SessionsReply:
            question = Sessions(limit=MAX_SESSIONS)
            return client.ask(address, question, SessionsReply, timeout_s=TIMEOUT_S)

        found = look() if cancel else _wait(look, timeout, settle)
    drained = not cancel and _nothing(found)
    if as_json:
        write_json(
            {
                "engine": address,
                "draining": found.draining,
                "drained": drained,
                "calls": found.num_calls,
                "sessions": found.num_sessions,
                "handovers": found.num_handovers,
                "tokens": _tokens(found),
                "seconds": round(time.monotonic() - began_s, 3),
            }
        )
    elif cancel:
        write(f"{address}: drains no longer")
    elif drained:
        write(f"{address}: nothing is left, it can be stopped")
    else:
        write(
            f"{address}: left after {timeout:g} s: {_left(found)}; what comes back after a "
            f"restart is computed again. It drains on: wait longer, see who it is with "
            f"turncache sessions {engine}, or give up with --cancel"
        )
    if not cancel and not drained:
        raise typer.Exit(CHECK_FAILED)


def _wait(look: Callable[[], SessionsReply], timeout_s: float, settle_s: float) -> SessionsReply:
    """Look until nothing has been left for a while, or the time is over."""
    end_s = time.monotonic() + timeout_s
    every_s = min(LOOK_EVERY_S, max(settle_s / 4, 0.01))
    quiet_since_s: float | None = None
    told = ""
    while True:
        found, now_s = look(), time.monotonic()
        if (left := _left(found)) != told:
            progress(f"left: {left}")
            told = left
        if not _nothing(found):
            quiet_since_s = None
        elif quiet_since_s is None:
            quiet_since_s = now_s
        quiet_s = 0.0 if quiet_since_s is None else now_s - quiet_since_s
        if now_s >= end_s or (quiet_since_s is not None and quiet_s >= settle_s):
            return found
        time.sleep(min(every_s, end_s - now_s))


def _nothing(found: SessionsReply) -> bool:
    return not (found.num_calls or found.num_sessions or found.num_handovers)


def _left(found: SessionsReply) -> str:
    return (
        f"{found.num_calls} calls, {found.num_sessions} sessions with {_tokens(found):,} tokens, "
        f"{found.num_handovers} hand-overs"
    )


def _tokens(found: SessionsReply) -> int:
    return sum(row.kept_blocks for row in found.rows) * found.block_size
