"""What can be known of a configuration before anything is started."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Final

from turncache_server.router.config import RouterConfig
from turncache_server.router.plan import Side
from turncache_server.router.shared import shared_waits
from turncache_server.router.tls import ServerCertificate, engines_trust
from turncache_server.variables import secret_of

#: Settings that say something of prefill and decode.
_OF_PAIRS: Final = (
    "warm_ahead_s",
    "decode_alone_tokens",
    "max_new_tokens_on_decode",
    "serve_on_prefill",
    "prefill_timeout_s",
    "handover_share",
    "handover_wait_s",
)


def check_surroundings(config: RouterConfig) -> None:
    """Look at the variables, certificates and packages that the settings ask for.

    Raises:
        ConfigError: naming the setting, what is missing and the way out.
    """
    engine_key(config)
    shared_waits(config, lambda _tenant, _tool_names, _seconds: None)
    engines_trust(config.engines_ca_file)
    if config.tls_cert_file:
        ServerCertificate(Path(config.tls_cert_file), Path(config.tls_key_file), lambda: 0.0)


def engine_key(config: RouterConfig) -> str | None:
    """Return the engines' API key, None to pass on what clients send.

    Raises:
        ConfigError: the variable that is named does not hold one.
    """
    return secret_of("engine_key_env", config.engine_key_env, "the engines' API key")


def without_effect(config: RouterConfig) -> list[str]:
    """Return a sentence for each setting that does nothing in front of these engines."""
    if {engine.side for engine in config.engines} != {Side.SINGLE}:
        return []
    defaults = {item.name: item.default for item in dataclasses.fields(config)}
    return [
        f"{name} = {str(value).lower()} has no effect: all engines are single, and it is about "
        "prefill and decode"
        for name in _OF_PAIRS
        if (value := getattr(config, name)) != defaults[name]
    ]
