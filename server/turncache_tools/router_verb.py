"""``turncache router``: the router alone, in front of engines that somebody else started."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated, Final

import typer

from turncache.errors import ConfigError, UsageError
from turncache_server.router.config import fleet_keys, load_config
from turncache_server.router.keys import add_key, read_keys
from turncache_tools.shell import counted, progress, write, write_json

#: Settings that bound what a client may do.
_LIMITS: Final = (
    "max_body_bytes",
    "max_body_depth",
    "max_header_bytes",
    "max_headers",
    "max_tenant_calls",
    "header_timeout_s",
    "body_timeout_s",
)


def router(
    config: Annotated[Path, typer.Option(help="TOML file with the router's settings.")],
    check: Annotated[
        bool, typer.Option("--check", help="Only read the settings, keys and secrets.")
    ] = False,
    new_key: Annotated[
        str | None,
        typer.Option(
            metavar="TENANT",
            help="Make a key for a tenant, add its digest to keys_file, and print the key.",
        ),
    ] = None,
    admin_key: Annotated[
        bool, typer.Option("--admin-key", help="With --new-key: an administrator's key.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="With --check: what was read, as JSON.")
    ] = False,
) -> None:
    """Run the router, or check its configuration."""
    if as_json and not check:
        raise UsageError("--json: it goes with --check")
    if admin_key and new_key is None:
        raise UsageError("--admin-key: it goes with --new-key TENANT")
    settings = load_config(config)
    if new_key is not None:
        if not settings.keys_file:
            raise ConfigError("keys_file", "not set; name the file that keeps the digests")
        write(add_key(Path(settings.keys_file), new_key, admin=admin_key))
        return
    keys = fleet_keys(settings)
    callers = read_keys(Path(settings.keys_file)) if settings.keys_file else None
    if check:
        # Here: a key is made without waiting for what these import.
        from turncache_server.router.checks import (  # noqa: PLC0415
            check_surroundings,
            without_effect,
        )

        check_surroundings(settings)
        warnings = without_effect(settings)
        engines = [
            {"name": e.name, "side": str(e.side), "url": e.url, "control": e.control}
            for e in settings.engines
        ]
        if as_json:
            write_json(
                {
                    "host": settings.host,
                    "port": settings.port,
                    "tls": bool(settings.tls_cert_file),
                    "fleet_secret": None if keys is None else keys.digest,
                    "tenants": None
                    if callers is None
                    else sorted({str(caller.tenant) for caller in callers.values()}),
                    "engines_file": settings.engines_file or None,
                    "kubernetes_selector": settings.kubernetes_selector or None,
                    "engines": engines,
                    "limits": {name: getattr(settings, name) for name in _LIMITS},
                    "warnings": warnings,
                }
            )
        else:
            secret = "" if keys is None else f", fleet secret {keys.digest}"
            scheme = "https" if settings.tls_cert_file else "http"
            who = "no keys: everybody who reaches it is served"
            if callers is not None:
                tenants = {caller.tenant for caller in callers.values()}
                who = f"{counted(len(callers), 'key')} of {counted(len(tenants), 'tenant')}"
            fleet = counted(len(engines), "engine")
            if settings.engines_file:
                fleet += f" from {settings.engines_file}"
            if settings.kubernetes_selector:
                fleet = f"engines that Kubernetes names ({settings.kubernetes_selector})"
            write(f"{config}: {fleet}, {scheme}://{settings.host}:{settings.port}{secret}, {who}")
            write("limits: " + ", ".join(f"{name} {getattr(settings, name):,}" for name in _LIMITS))
        for sentence in warnings:
            progress(sentence)
        return
    from turncache_server.router.app import run  # noqa: PLC0415 - a check needs no server

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    run(settings)
