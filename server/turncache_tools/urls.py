"""Base URLs as options give them. Pure."""

from __future__ import annotations

from urllib.parse import urlsplit

from turncache.errors import UsageError


def http_url(text: str, option: str) -> str:
    """Return the URL that an option gives.

    Raises:
        UsageError: it is none, naming the option.
    """
    try:
        parts = urlsplit(text)
        legal = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        legal = False
    if not legal:
        raise UsageError(f"{option} {text!r}: expected a URL such as http://127.0.0.1:8000")
    return text.rstrip("/")


def base_url(text: str, option: str) -> str:
    """Return a base URL without ``/v1``.

    Raises:
        UsageError: it is none, naming the option.
    """
    return http_url(text, option).removesuffix("/v1")
