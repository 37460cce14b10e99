"""``turncache top``: engines, their largest sessions and who waits at routers, again and again."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from contextlib import closing, nullcontext
from typing import Annotated, Final

import typer
from rich.live import Live

from turncache.errors import EngineFault, TurncacheError, UsageError
from turncache_server.control.client import ControlClient
from turncache_server.control.messages import (
    MAX_SESSIONS,
    Sessions,
    SessionsReply,
    Stats,
    StatsReply,
)
from turncache_tools.control import (
    TIMEOUT_S,
    Json,
    SecretFile,
    Timeout,
    control_addresses,
    fleet_keys,
)
from turncache_tools.router_looks import NO_KEY, Wait, waits_of
from turncache_tools.shell import check_seconds, make_console, show, write, write_json
from turncache_tools.top_page import Look, Sight, data, engine_line, largest, page
from turncache_tools.urls import base_url

_LEAST_EVERY_S: Final = 0.1


def top(
    engines: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[ENGINE...]",
            help="Control sockets: tcp://127.0.0.1:5800, 127.0.0.1:5800 or 5800.",
        ),
    ] = None,
    *,
    router: Annotated[
        list[str] | None,
        typer.Option(help="Base URL of a router, to see which calls wait; once for every one."),
    ] = None,
    every: Annotated[float, typer.Option(help="Seconds between two looks.")] = 1.0,
    count: Annotated[int, typer.Option(help="Looks; 0: until Ctrl-C.", min=0)] = 0,
    rows: Annotated[
        int, typer.Option(help="Sessions that are shown.", min=0, max=MAX_SESSIONS)
    ] = 15,
    api_key: Annotated[
        str,
        typer.Option(
            envvar="OPENAI_API_KEY",
            help="An administrator's key, for a router with keys.",
            show_default=False,
        ),
    ] = NO_KEY,
    fleet_secret_file: SecretFile = None,
    timeout: Timeout = TIMEOUT_S,
    as_json: Json = False,
) -> None:
    """Watch engines with their largest sessions, and routers at which calls wait.

    What is gone stays in the table.
    """
    if not _LEAST_EVERY_S <= every < float("inf"):
        raise UsageError(f"--every {every:g}: expected at least {_LEAST_EVERY_S} seconds")
    check_seconds(timeout, "--timeout")
    keys = fleet_keys(fleet_secret_file)
    routers = [base_url(each, "--router") for each in router or ()]
    if not engines and not routers:
        raise UsageError("nothing to watch: name control sockets, such as 5800, or --router URL")
    addresses = control_addresses(engines, keyed=keys is not None) if engines else []
    console = make_console()
    live = console.is_terminal and not as_json
    before: dict[str, Look] = {}
    with (
        closing(ControlClient(keys)) as client,
        Live(console=console, auto_refresh=False) if live else nullcontext() as screen,
    ):
        for number in itertools.count(1):
            began_s = time.monotonic()
            looks, silent = _look_at_engines(client, addresses, timeout_s=timeout, limit=rows)
            waits, mute = _look_at_routers(routers, api_key=api_key, timeout_s=timeout)
            if number == 1 and not looks and not waits:
                raise next(iter((silent | mute).values()))
            sight = Sight(
                engines=[engine_line(at, look, before.get(at)) for at, look in looks.items()],
                sessions=largest(looks, rows),
                waits=waits,
                silent=silent | mute,
            )
            before |= looks
            if as_json:
                write_json(data(sight))
            elif screen is not None:
                screen.update(page(sight, width=console.width), refresh=True)
            else:
                if number > 1:
                    write("")
                show(console, page(sight, width=console.width))
            if number == count:
                return
            time.sleep(max(0.0, every - (time.monotonic() - began_s)))


def _look_at_engines(
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


def _look_at_routers(
    routers: Sequence[str], *, api_key: str, timeout_s: float
) -> tuple[dict[str, list[Wait]], dict[str, TurncacheError]]:
    waits: dict[str, list[Wait]] = {}
    silent: dict[str, TurncacheError] = {}
    for url in routers:
        try:
            waits[url] = waits_of(url, api_key=api_key, timeout_s=timeout_s)
        except EngineFault as error:
            silent[url] = error
    return waits, silent
