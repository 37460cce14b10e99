"""The router's settings as flags: one for each, of the same name. Pure.

Both ways to start it have them (``turncache router``, ``python -m turncache_server.router``), and
a setting that is added is a flag.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from turncache.errors import ConfigError
from turncache_server.router.config import RouterConfig

#: What ``--engine`` takes, once per engine.
ENGINE_FORM: Final = "name=,side=,url=[,engine_id=][,control=]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    """One setting as a flag.

    Attributes:
        setting: name of the setting.
        option: as it is written, without a value: ``--ping-s``.
        kind: ``bool``, ``int``, ``float`` or ``str``; a boolean is negated as ``--no-...``.
        legal: its values and its default, for people.
    """

    setting: str
    option: str
    kind: type
    legal: str


def _flag(item: dataclasses.Field[Any]) -> Flag:
    shown = '""' if item.default == "" else f"{item.default}".lower()
    words = list(item.metadata.get("legal", ()))
    low, high = item.metadata.get("low"), item.metadata.get("high", math.inf)
    legal = f"{', '.join(words)}; " if words else ""
    if low is not None:
        legal = f"from {low:g}; " if high == math.inf else f"{low:g} to {high:g}; "
    return Flag(
        setting=item.name,
        option="--" + item.name.replace("_", "-"),
        kind=type(item.default),
        legal=f"{legal}default {shown}",
    )


#: Every setting but the engines, in the order of the settings.
FLAGS: Final = tuple(
    _flag(item) for item in dataclasses.fields(RouterConfig) if item.name != "engines"
)


def overrides(values: Mapping[str, object], engines: Sequence[str]) -> dict[str, object]:
    """Return the settings that flags name.

    Args:
        values: by name of the setting, None where its flag was not given.
        engines: texts of ``--engine``.

    Raises:
        ConfigError: one of those is not ``key=value,...``.
    """
    given = {name: value for name, value in values.items() if value is not None}
    if engines:
        given["engines"] = [_engine(text) for text in engines]
    return given


def _engine(text: str) -> dict[str, str]:
    out: dict[str, str] = {}
    for part in text.split(","):
        name, equals, value = part.partition("=")
        if not equals:
            raise ConfigError("--engine", f"{part!r}: expected {ENGINE_FORM}")
        out[name] = value
    return out
