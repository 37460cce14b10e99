"""Secrets that settings name by an environment variable, because settings are shown."""

from __future__ import annotations

import os

from turncache.errors import ConfigError


def secret_of(setting: str, variable: str, what: str) -> str | None:
    """Return what an environment variable holds, None when the setting names none.

    Args:
        setting: name of the setting.
        variable: its value: the name of the variable.
        what: is in it, for the error.

    Raises:
        ConfigError: there is no such variable, or nothing is in it.
    """
    if not variable:
        return None
    secret = os.environ.get(variable)
    if not secret:
        raise ConfigError(
            setting,
            f"the environment has no variable {variable!r}; set it to {what}, or leave the "
            "setting empty",
        )
    return secret
