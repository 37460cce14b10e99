"""HTTP to the engines: one request, one answer, bytes as they come."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Mapping
from types import TracebackType
from typing import Final, Self

import aiohttp

from turncache_server.router.config import EngineConfig, RouterConfig
from turncache_server.router.errors import LegFailed

#: Idle seconds after which a pooled connection is dropped. vLLM's server drops it after 5
#: (VLLM_HTTP_TIMEOUT_KEEP_ALIVE): a request sent at that moment would be lost, and a POST
#: must not be sent twice.
_KEEP_ALIVE_S: Final = 3.0
_LARGE_BYTES: Final = 256 * 1024


class EngineAnswer:
    """An engine's answer whose headers have arrived.

    Attributes:
        status: HTTP status.
        content_type: media type without parameters.
    """

    def __init__(
        self,
        engine: EngineConfig,
        response: aiohttp.ClientResponse,
        *,
        first_byte_deadline_s: float,
        idle_timeout_s: float,
    ) -> None:
        self._engine = engine
        self._response = response
        self._first_byte_deadline_s = first_byte_deadline_s
        self._idle_timeout_s = idle_timeout_s
        self.status = response.status
        self.content_type = response.content_type

    def headers(self, names: tuple[str, ...]) -> dict[str, str]:
        """Return the headers among ``names``."""
        return {
            name: self._response.headers[name] for name in names if name in self._response.headers
        }

    async def first_chunk(self) -> bytes:
        """Return the first bytes of the body, empty when it has none.

        Raises:
            LegFailed: the connection broke, or nothing came in time.
        """
        left_s = self._first_byte_deadline_s - asyncio.get_running_loop().time()
        return await self._read(max(0.0, left_s))

    async def chunk(self) -> bytes:
        """Return the next bytes, empty at the end of the body.

        Raises:
            LegFailed: the connection broke, or nothing came in time.
        """
        return await self._read(self._idle_timeout_s)

    async def _read(self, limit_s: float) -> bytes:
        try:
            # What has arrived while the last part was written needs no timer.
            if part := self._response.content.read_nowait():
                return part
            async with asyncio.timeout(limit_s):
                return await self._response.content.readany()
        except TimeoutError as error:
            raise LegFailed(
                self._engine.name, "timeout", f"sent nothing for {limit_s:g} s", consumed=True
            ) from error
        except (aiohttp.ClientError, OSError) as error:
            raise LegFailed(
                self._engine.name, "disconnected", "broke off its answer", consumed=True
            ) from error

    async def rest(self, first: bytes, max_bytes: int) -> bytes:
        """Return the whole body, of which ``first`` has been read.

        Raises:
            LegFailed: as for :meth:`chunk`, or a body of more than ``max_bytes``.
        """
        parts: list[bytes] = []
        size, part = 0, first
        while part:
            parts.append(part)
            size += len(part)
            if size > max_bytes:
                raise LegFailed(
                    self._engine.name,
                    "bad_answer",
                    f"answered with more than {max_bytes} bytes",
                    consumed=True,
                )
            part = await self.chunk()
        return b"".join(parts)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Return the connection, or cut it when the body is not read to its end.

        Cutting it is how an engine learns that the call is cancelled.
        """
        if self._response.content.at_eof():
            self._response.release()
        else:
            self._response.close()


class Upstream:
    """The connections to all engines."""

    def __init__(self, config: RouterConfig) -> None:
        self._config = config
        self._session = aiohttp.ClientSession(
            # No limit: a call that waits for a connection would wait for a stream to end,
            # and how much an engine takes on is the engine's decision.
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_S),
            timeout=aiohttp.ClientTimeout(total=None, connect=config.connect_timeout_s),
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=("User-Agent",),
        )

    async def post(
        self, engine: EngineConfig, path: str, body: bytes, headers: Mapping[str, str]
    ) -> EngineAnswer:
        """Send a request and await the headers of its answer.

        Raises:
            LegFailed: no connection, or it broke or timed out before the headers.
        """
        limit_s = self._config.first_byte_timeout_s
        deadline_s = asyncio.get_running_loop().time() + limit_s
        try:
            async with asyncio.timeout_at(deadline_s):
                response = await self._session.post(
                    engine.url + path,
                    # Large bodies are sent in pieces, so that other calls go on meanwhile.
                    data=body if len(body) < _LARGE_BYTES else io.BytesIO(body),
                    headers={**headers, "accept-encoding": "identity"},
                    allow_redirects=False,
                )
        except aiohttp.ClientConnectorError as error:
            raise LegFailed(
                engine.name, "refused", "does not accept connections", consumed=False
            ) from error
        except aiohttp.ConnectionTimeoutError as error:
            raise LegFailed(
                engine.name, "refused", "accepts no connection in time", consumed=False
            ) from error
        except TimeoutError as error:
            raise LegFailed(
                engine.name, "timeout", f"did not answer within {limit_s:g} s", consumed=True
            ) from error
        except (aiohttp.ClientError, OSError) as error:
            raise LegFailed(
                engine.name, "disconnected", "closed the connection", consumed=True
            ) from error
        return EngineAnswer(
            engine,
            response,
            first_byte_deadline_s=deadline_s,
            idle_timeout_s=self._config.idle_timeout_s,
        )

    async def get(
        self, engine: EngineConfig, path: str, headers: Mapping[str, str], *, timeout_s: float
    ) -> tuple[int, bytes]:
        """Ask an engine for a small document and return (status, body).

        Raises:
            LegFailed: no answer in time.
        """
        try:
            async with (
                asyncio.timeout(timeout_s),
                self._session.get(
                    engine.url + path, headers=headers, allow_redirects=False
                ) as response,
            ):
                return response.status, await response.read()
        except TimeoutError as error:
            raise LegFailed(
                engine.name, "timeout", f"did not answer within {timeout_s:g} s", consumed=False
            ) from error
        except (aiohttp.ClientError, OSError) as error:
            raise LegFailed(
                engine.name, "refused", f"cannot be reached: {error}", consumed=False
            ) from error

    async def close(self) -> None:
        """Close every connection."""
        await self._session.close()
