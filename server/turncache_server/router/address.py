"""Where an engine's server is, and the idle connections to it."""

from __future__ import annotations

import asyncio
import functools
import ssl
from collections.abc import Callable
from typing import Final
from urllib.parse import urlsplit

from turncache_server.router.connection import Connection

#: Idle seconds after which a connection is dropped. vLLM's server drops it after 5
#: (VLLM_HTTP_TIMEOUT_KEEP_ALIVE), and a request that crosses this on its way is lost.
_KEEP_ALIVE_S: Final = 3.0


class Address:
    """One server.

    Args:
        url: its base URL.
        space: of its connections.
        trust: returns whose certificates count, for ``https``.

    Attributes:
        host: value of the ``host`` header.
    """

    def __init__(self, url: str, space: memoryview, trust: Callable[[], ssl.SSLContext]) -> None:
        parts = urlsplit(url)
        assert parts.hostname is not None, "the settings have been checked"
        self.host = parts.netloc.encode("idna").decode()
        self._hostname = parts.hostname
        self._connection = functools.partial(Connection, space)
        self._tls = trust() if parts.scheme == "https" else None
        self._port = parts.port or (443 if self._tls is not None else 80)
        #: With the time since which each is idle; the last used is at the end.
        self._idle: list[tuple[float, Connection]] = []
        self._timer: asyncio.TimerHandle | None = None

    async def connect(self, timeout_s: float) -> Connection:
        """Open a connection.

        Raises:
            OSError: nobody accepts it, or nobody who is trusted; TimeoutError, which is one,
                when nobody does in time.
        """
        async with asyncio.timeout(timeout_s):
            _, connection = await asyncio.get_running_loop().create_connection(
                self._connection, self._hostname, self._port, ssl=self._tls
            )
        return connection

    def take(self) -> tuple[Connection, float] | None:
        """Return an idle connection and for how many seconds it was, None without one."""
        now_s = asyncio.get_running_loop().time()
        while self._idle:
            since_s, connection = self._idle.pop()
            if now_s - since_s < _KEEP_ALIVE_S and connection.reusable:
                return connection, now_s - since_s
            connection.abort()
        return None

    def put(self, connection: Connection) -> None:
        """Keep a connection for the next request, or cut it when it cannot take one."""
        if not connection.reusable:
            connection.abort()
            return
        loop = asyncio.get_running_loop()
        self._idle.append((loop.time(), connection))
        if self._timer is None:
            self._timer = loop.call_later(_KEEP_ALIVE_S, self._drop_old)

    def close(self) -> None:
        """Cut all idle connections."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for _, connection in self._idle:
            connection.abort()
        self._idle.clear()

    def _drop_old(self) -> None:
        loop = asyncio.get_running_loop()
        oldest_s = loop.time() - _KEEP_ALIVE_S
        kept: list[tuple[float, Connection]] = []
        for since_s, connection in self._idle:
            if since_s > oldest_s and connection.reusable:
                kept.append((since_s, connection))
            else:
                connection.abort()
        self._idle = kept
        self._timer = None
        if kept:
            self._timer = loop.call_at(kept[0][0] + _KEEP_ALIVE_S, self._drop_old)
