"""The router's configuration for a stack, as TOML. Pure."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence

from turncache.errors import ConfigError
from turncache_server.launch.profiles import EngineLaunch
from turncache_server.launch.spec import StackSpec


def router_config(spec: StackSpec, port: int, launches: Sequence[EngineLaunch]) -> str:
    """Return the text of the configuration file.

    Raises:
        ConfigError: a router setting that the stack itself decides, or that TOML cannot hold.
    """
    ours = {"host": spec.host, "port": port, "return_enabled": spec.return_enabled}
    if spec.fleet_secret_file is not None:
        ours["fleet_secret_file"] = str(spec.fleet_secret_file)
    for name in (*ours, "engines", "fleet_secret_file"):
        if name in spec.router_settings:
            raise ConfigError(f"router_settings.{name}", "follows from the stack's own settings")
    lines = [_line(name, value) for name, value in {**ours, **spec.router_settings}.items()]
    for launch in launches:
        engine = {
            "name": launch.name,
            "engine_id": launch.name,
            "side": launch.side,
            "url": launch.url,
        }
        if launch.control_address is not None:
            engine["control"] = launch.control_address
        lines += ["", "[[engines]]", *_lines(engine)]
    return "\n".join(lines) + "\n"


def _lines(table: Mapping[str, object]) -> list[str]:
    return [_line(name, value) for name, value in table.items()]


def _line(name: str, value: object) -> str:
    if not isinstance(value, (bool, int, float, str)) or (
        isinstance(value, float) and not math.isfinite(value)
    ):
        raise ConfigError(f"router_settings.{name}", f"{value!r}: expected a single value")
    # JSON's notation of these four is also TOML's, except that TOML knows no surrogates and
    # wants the delete character escaped.
    return f"{name} = {json.dumps(value, ensure_ascii=False)}".replace("\x7f", "\\u007f")
