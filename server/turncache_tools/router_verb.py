"""``turncache router``: the router alone, in front of engines that somebody else started."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated

import typer

from turncache_server.router.config import fleet_keys, load_config
from turncache_tools.shell import write, write_json


def router(
    config: Annotated[Path, typer.Option(help="TOML file with the router's settings.")],
    check: Annotated[
        bool, typer.Option("--check", help="Only read the settings and the fleet's secret.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="With --check: what was read, as JSON.")
    ] = False,
) -> None:
    """Run the router, or check its configuration."""
    settings = load_config(config)
    keys = fleet_keys(settings)
    if check:
        engines = [
            {"name": e.name, "side": str(e.side), "url": e.url, "control": e.control}
            for e in settings.engines
        ]
        if as_json:
            write_json(
                {
                    "host": settings.host,
                    "port": settings.port,
                    "fleet_secret": None if keys is None else keys.digest,
                    "engines": engines,
                }
            )
        else:
            secret = "" if keys is None else f", fleet secret {keys.digest}"
            write(
                f"{config}: {len(engines)} engines, http://{settings.host}:{settings.port}{secret}"
            )
        return
    from turncache_server.router.app import run  # noqa: PLC0415 - a check needs no server

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    run(settings)
