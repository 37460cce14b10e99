"""``python -m turncache_server.router --config router.toml``."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from turncache.errors import ConfigError, ProtocolError
from turncache_server.router.app import run
from turncache_server.router.config import load_config


def main(argv: Sequence[str] | None = None) -> int:
    """Run the router and return the exit code: 0 ok, 2 usage or config."""
    parser = argparse.ArgumentParser(prog="python -m turncache_server.router")
    parser.add_argument("--config", type=Path, help="TOML file with the router's settings")
    parser.add_argument("--host", help="address to listen on")
    parser.add_argument("--port", type=int, help="port to listen on, 0 for a free one")
    parser.add_argument(
        "--engine",
        action="append",
        metavar="KEY=VALUE,...",
        help="an engine: name=,side=,url=[,engine_id=][,control=]; replaces the file's engines",
    )
    parser.add_argument("--no-return", action="store_true", help="start with returns off")
    parser.add_argument("--admin", action="store_true", help="serve /admin/ on loopback")
    parser.add_argument("--log-level", default="INFO", help="DEBUG, INFO, WARNING or ERROR")
    args = parser.parse_args(argv)
    overrides: dict[str, object] = {
        name: value for name in ("host", "port") if (value := getattr(args, name)) is not None
    }
    if args.no_return:
        overrides["return_enabled"] = False
    if args.admin:
        overrides["admin"] = True
    try:
        if args.engine:
            overrides["engines"] = [_engine(text) for text in args.engine]
            overrides["engines_file"] = overrides["kubernetes_selector"] = ""
        logging.basicConfig(level=args.log_level.upper(), format="%(asctime)s %(message)s")
        run(load_config(args.config, overrides))
    except (ConfigError, ProtocolError, ValueError) as error:
        sys.stderr.write(f"{error}\n")
        return 2
    return 0


def _engine(text: str) -> dict[str, str]:
    out: dict[str, str] = {}
    for part in text.split(","):
        name, equals, value = part.partition("=")
        if not equals:
            raise ConfigError("--engine", f"{part!r}: expected key=value")
        out[name] = value
    return out


if __name__ == "__main__":
    sys.exit(main())
