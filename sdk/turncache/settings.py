"""What the environment says about the client: parsed once per client, at the edge.

==========================  ==========================================================
variable                    meaning
==========================  ==========================================================
``TURNCACHE_SESSION_ID``    one session for every call that has no other
``TURNCACHE_PROFILE``       ``auto`` (default), ``vllm`` or ``off``
``TURNCACHE_HOSTS``         hosts that may get everything: ``llm.example.com``,
                            ``*.example.com``, ``10.0.0.7:8000``; separated by commas
``TURNCACHE_DISABLED``      ``1``: the clients are the stock ones
``TURNCACHE_LOG``           ``debug``, ``info`` or ``warning``: the ``turncache`` logger
==========================  ==========================================================
"""

from __future__ import annotations

import enum
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from turncache.errors import ConfigError, ProtocolError
from turncache.hosts import check_pattern
from turncache.protocol import check_session_id
from turncache.spelling import none_of

LOG: Final = logging.getLogger("turncache")

_YES = frozenset({"1", "true", "yes", "on"})
_NO = frozenset({"", "0", "false", "no", "off"})
_LEVELS: Final = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING}


class Profile(enum.StrEnum):
    """Which servers are told about sessions, and how."""

    AUTO = "auto"
    VLLM = "vllm"
    OFF = "off"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The environment's settings, validated.

    Attributes:
        session_id: session of every call that has no other, or None.
        profile: which servers are told, and how.
        hosts: patterns of hosts that the user named.
        disabled: the clients behave like the stock ones.
    """

    session_id: str | None = None
    profile: Profile = Profile.AUTO
    hosts: tuple[str, ...] = ()
    disabled: bool = False


def from_environment(environ: Mapping[str, str] = os.environ) -> Settings:
    """Read and validate the variables of this module's table.

    Raises:
        ConfigError: naming the variable, its value and what was expected.
    """
    session_id = environ.get("TURNCACHE_SESSION_ID") or None
    if session_id is not None:
        try:
            check_session_id(session_id)
        except ProtocolError as error:
            raise ConfigError("TURNCACHE_SESSION_ID", str(error)) from None
    return Settings(
        session_id=session_id,
        profile=parse_profile(environ.get("TURNCACHE_PROFILE") or "auto", "TURNCACHE_PROFILE"),
        hosts=parse_hosts(environ.get("TURNCACHE_HOSTS", "").split(","), "TURNCACHE_HOSTS"),
        disabled=_flag(environ, "TURNCACHE_DISABLED"),
    )


def parse_profile(text: str, setting: str) -> Profile:
    """Return the profile that ``text`` names.

    Raises:
        ConfigError: naming ``setting`` when there is no such profile.
    """
    try:
        return Profile(text.strip().lower())
    except ValueError:
        raise ConfigError(setting, none_of(text, Profile)) from None


def parse_hosts(names: list[str] | tuple[str, ...], setting: str) -> tuple[str, ...]:
    """Return the host patterns among ``names``, lower case, empty ones left out.

    Raises:
        ConfigError: naming ``setting`` when one is no host pattern.
    """
    found = (name.strip().lower() for name in names)
    try:
        return tuple(check_pattern(name) for name in found if name)
    except ValueError as error:
        raise ConfigError(setting, str(error)) from None


def set_up_logging(environ: Mapping[str, str] = os.environ) -> None:
    """Give the ``turncache`` logger the level of ``TURNCACHE_LOG`` and a handler on stderr.

    Without the variable nothing is touched. An unknown level is refused.

    Raises:
        ConfigError: naming the levels that exist.
    """
    text = environ.get("TURNCACHE_LOG", "").strip().lower()
    if not text:
        return
    if text not in _LEVELS:
        raise ConfigError("TURNCACHE_LOG", none_of(text, _LEVELS))
    LOG.setLevel(_LEVELS[text])
    if not LOG.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(name)s %(levelname)s %(message)s"))
        LOG.addHandler(handler)


def _flag(environ: Mapping[str, str], name: str) -> bool:
    text = environ.get(name, "").strip().lower()
    if text in _YES or text in _NO:
        return text in _YES
    raise ConfigError(name, f"{text!r}: expected 1 or 0")
