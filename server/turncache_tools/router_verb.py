"""``turncache router``: the router alone, in front of engines that somebody else started."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from turncache.errors import ConfigError, UsageError
from turncache_server.router.config import RouterConfig, fleet_keys, load_config
from turncache_server.router.flags import ENGINE_FORM, FLAGS, Flag, overrides
from turncache_server.router.keys import add_key, read_keys
from turncache_tools.options import with_options
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
    "client_stall_s",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """What a command line says of the settings.

    Attributes:
        config: the file, None for none.
        flags: settings that win over the file's.
    """

    config: Path | None
    flags: Mapping[str, object]

    def read(self) -> RouterConfig:
        """Read the file, flags on top."""
        return load_config(self.config, self.flags)


def _given(
    config: Annotated[
        Path | None, typer.Option(help="TOML file with the router's settings.")
    ] = None,
    engine: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUE,...",
            help=f"An engine, in place of the file's: {ENGINE_FORM}. Once for each.",
        ),
    ] = None,
    **values: Any,
) -> Given:
    """Take what is given, unread: whatever is wrong with the verb's own options comes first."""
    return Given(config=config, flags=overrides(values, engine or ()))


def _option(flag: Flag) -> inspect.Parameter:
    """Return a setting as an option of a verb."""
    names = f"{flag.option}/--no-{flag.option.removeprefix('--')}"
    option = typer.Option(
        names if flag.kind is bool else flag.option,
        metavar=None if flag.kind is bool else "VALUE",
        help=flag.legal,
        rich_help_panel="Settings (router/README.md; they win over the file)",
    )
    kind: Any = flag.kind
    return inspect.Parameter(
        flag.setting,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[kind | None, option],
    )


def takes_settings(verb: Callable[..., None]) -> Callable[..., None]:
    """Give ``verb(given, ...)`` in its place ``--config``, ``--engine`` and every setting."""

    def given(**values: Any) -> Given:
        return _given(**values)

    own = inspect.signature(_given, eval_str=True)
    named = [each for each in own.parameters.values() if each.kind is not each.VAR_KEYWORD]
    given.__signature__ = own.replace(  # type: ignore[attr-defined]
        parameters=[*named, *map(_option, FLAGS)]
    )
    return with_options(verb, of=given, place="given")


def router(
    given: Given,
    *,
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
    settings = given.read()
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
            where = f"{scheme}://{settings.host}:{settings.port}"
            write(f"{given.config or 'no file'}: {fleet}, {where}{secret}, {who}")
            write("limits: " + ", ".join(f"{name} {getattr(settings, name):,}" for name in _LIMITS))
        for sentence in warnings:
            progress(sentence)
        return
    from turncache_server.router.app import run  # noqa: PLC0415 - a check needs no server

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    run(settings)
