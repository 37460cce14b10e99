"""Base URLs as options give them. Pure."""

from __future__ import annotations

from urllib.parse import urlsplit

from turncache.errors import UsageError


def base_url(text: str, option: str) -> str:
    """Return a base URL without ``/v1``.

    Raises:
        UsageError: naming the option.
    """
    parts = urlsplit(text)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UsageError(f"{option} {text!r}: expected a URL such as http://127.0.0.1:8000")
    return text.rstrip("/").removesuffix("/v1")
