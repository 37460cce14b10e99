"""Reaching Redis: which URLs are taken, and a client that never waits longer than it is told to."""

from __future__ import annotations

from typing import Any, Final
from urllib.parse import parse_qs, urlsplit

from turncache.errors import ConfigError

_SCHEMES: Final = ("redis", "rediss", "unix")


def check_redis_url(url: str, *, setting: str = "redis_url") -> str:
    """Return a URL that is one of Redis, without a password.

    Raises:
        ConfigError: naming ``setting``; what may be a password is not shown.
    """
    try:
        parts = urlsplit(url)
        # Of a socket the path is the place; and settings are shown, so they hold no password.
        place = parts.path if parts.scheme == "unix" else parts.hostname and parts.port != 0
        secret = parts.password is not None or "password" in parse_qs(
            parts.query, keep_blank_values=True
        )
        legal = parts.scheme in _SCHEMES and bool(place) and not secret
    except ValueError:
        legal = False
    if not legal:
        # A password may stand before the last @, or anywhere behind a question mark.
        shown = url.partition(":")[0] if "?" in url else url.rpartition("@")[2]
        raise ConfigError(
            setting,
            f"{shown!r}: expected redis://host:6379/0, rediss:// or unix:///path, "
            "without a password: redis_password_env names the variable that holds it",
        )
    return url


def open_redis(
    url: str,
    *,
    password: str | None,
    timeout_s: float,
    asynchronous: bool,
    setting: str = "redis_url",
    install: str = "pip install 'turncache[redis]'",
) -> Any:
    """Make a client of the package ``redis`` whose answers are text; nothing is asked yet.

    Args:
        url: checked by :func:`check_redis_url`.
        password: None for none.
        timeout_s: for one answer and for connecting; nothing is tried twice.
        asynchronous: a client of ``redis.asyncio``, else a blocking one for threads.
        setting: that wants it, for errors.
        install: how to get the package, likewise.

    Raises:
        ConfigError: the package is missing, or the URL cannot be used.
    """
    try:
        from redis.backoff import NoBackoff  # noqa: PLC0415 - an extra, and slow to import

        kind, retry = _async_kind() if asynchronous else _blocking_kind()
    except ImportError as error:
        raise ConfigError(setting, f"needs the package redis: {install}") from error
    try:
        redis: Any = kind.from_url(
            url,
            password=password,
            socket_timeout=timeout_s,
            socket_connect_timeout=timeout_s,
            retry=retry(NoBackoff(), 0),
            decode_responses=True,
            encoding_errors="replace",
            protocol=2,
        )
        redis.connection_pool.make_connection()
    except (ValueError, TypeError) as error:
        raise ConfigError(setting, f"cannot be used: {error}") from error
    return redis


def _async_kind() -> tuple[Any, Any]:
    from redis.asyncio import Redis  # noqa: PLC0415
    from redis.asyncio.retry import Retry  # noqa: PLC0415

    return Redis, Retry


def _blocking_kind() -> tuple[Any, Any]:
    from redis import Redis  # noqa: PLC0415
    from redis.retry import Retry  # noqa: PLC0415

    return Redis, Retry
