"""``python -m turncache_server.router --config router.toml``."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from turncache.errors import TurncacheError
from turncache_server.exits import USAGE, exit_code
from turncache_server.router.app import run
from turncache_server.router.config import load_config
from turncache_server.router.flags import ENGINE_FORM, FLAGS, overrides


def main(argv: Sequence[str] | None = None) -> int:
    """Run the router and return the exit code, which ``turncache router`` has too."""
    args = _parser().parse_args(argv)
    try:
        given = overrides(
            {flag.setting: getattr(args, flag.setting) for flag in FLAGS}, args.engine
        )
        logging.basicConfig(level=args.log_level.upper(), format="%(asctime)s %(message)s")
        run(load_config(args.config, given))
    except TurncacheError as error:
        sys.stderr.write(f"{error}\n")
        return exit_code(error)
    except ValueError as error:  # a level of the log that there is not
        sys.stderr.write(f"{error}\n")
        return USAGE
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m turncache_server.router",
        usage="%(prog)s [--config FILE] [--engine KEY=VALUE,...]... [--SETTING VALUE]...",
        allow_abbrev=False,  # what is added would change what an abbreviation means
    )
    parser.add_argument("--config", type=Path, help="TOML file with the router's settings")
    parser.add_argument(
        "--engine",
        action="append",
        default=[],
        metavar="KEY=VALUE,...",
        help=f"an engine: {ENGINE_FORM}; replaces the file's engines",
    )
    parser.add_argument("--log-level", default="INFO", help="DEBUG, INFO, WARNING or ERROR")
    settings = parser.add_argument_group("settings", "each wins over the file's")
    for flag in FLAGS:
        if flag.kind is bool:
            settings.add_argument(
                flag.option, action=argparse.BooleanOptionalAction, help=flag.legal
            )
        else:
            settings.add_argument(flag.option, type=flag.kind, metavar="VALUE", help=flag.legal)
    settings.add_argument(
        "--no-return", dest="return_enabled", action="store_false", help="--no-return-enabled"
    )
    # Set once more: of several flags for one setting the last one's default would count.
    parser.set_defaults(**{flag.setting: None for flag in FLAGS})
    return parser


if __name__ == "__main__":
    sys.exit(main())
