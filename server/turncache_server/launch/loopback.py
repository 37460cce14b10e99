"""The few HTTP requests that launcher and tools make: blocking, standard library."""

from __future__ import annotations

import http.client
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import urlsplit

HEALTH_TIMEOUT_S: Final = 2.0


@dataclass(frozen=True, slots=True)
class Answer:
    """Status and body of an answer."""

    status: int
    body: bytes

    @property
    def excerpt(self) -> str:
        """The start of the body, for messages."""
        return self.body[:500].decode(errors="replace")

    def data(self) -> dict[str, Any]:
        """Decode a JSON object; anything else is an empty one."""
        try:
            data = json.loads(self.body)
        except ValueError:
            return {}
        return data if isinstance(data, dict) else {}


def is_healthy(url: str) -> bool:
    """Say whether ``GET /health`` answers 200."""
    try:
        return _request("GET", f"{url}/health", None, {}, HEALTH_TIMEOUT_S).status == 200
    except (OSError, http.client.HTTPException):
        return False


def get(url: str, headers: Mapping[str, str], *, timeout_s: float) -> Answer:
    """Ask for what a URL shows.

    Raises:
        OSError: the server cannot be reached or does not answer in time.
        http.client.HTTPException: it does not speak HTTP.
    """
    return _request("GET", url, None, headers, timeout_s)


def post_json(
    url: str, body: Mapping[str, Any], headers: Mapping[str, str], *, timeout_s: float
) -> Answer:
    """Send a JSON object.

    Raises:
        OSError: the server cannot be reached or does not answer in time.
        http.client.HTTPException: it does not speak HTTP.
    """
    return _request("POST", url, json.dumps(body).encode(), headers, timeout_s)


def _request(
    method: str, url: str, body: bytes | None, headers: Mapping[str, str], timeout_s: float
) -> Answer:
    # Not urllib.request: it would send loopback traffic to a configured proxy.
    parts = urlsplit(url)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = kind(parts.hostname or "", parts.port, timeout=timeout_s)
    try:
        content = {"Content-Type": "application/json"} if body is not None else {}
        connection.request(method, parts.path, body, {**content, **headers})
        response = connection.getresponse()
        return Answer(response.status, response.read())
    finally:
        connection.close()
