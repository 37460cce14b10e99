"""The answer to the client: one object that knows whether its headers are out.

Before the first byte an error is an HTTP status with a JSON body; after it, the terminal
event of the stream. Whoever fails a call need not know which.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Mapping
from contextlib import asynccontextmanager
from typing import Final

from aiohttp import HttpVersion11, web

from turncache_server.router.apis.api import ErrorForm
from turncache_server.router.errors import ApiError

_PING: Final = b": ping\n\n"
#: Bytes that a client has not read before the engine is made to wait: what a transport, too,
#: takes for too much.
_MAX_UNREAD: Final = 64 * 1024


class _Stream(web.StreamResponse):
    """Sends its headers with the first bytes of its body: one packet, one wake-up of the client."""

    _send_headers_immediately = False


class ClientGone(Exception):
    """Raised when the client has closed its connection."""


class ClientAnswer:
    """The answer to one request.

    Args:
        request: the request.
        errors: the shape of errors that its client parses.
        stall_s: longest time in which a client takes nothing of what waits for it; then it
            counts as gone, and its connection is cut.
    """

    def __init__(
        self, request: web.BaseRequest, errors: ErrorForm, *, stall_s: float = 120.0
    ) -> None:
        self._request = request
        self._errors = errors
        self._stall_s = stall_s
        self._response: web.StreamResponse | None = None
        self._transport: asyncio.Transport | None = None
        self._chunked = False

    @property
    def started(self) -> bool:
        """Whether the headers are out."""
        return self._response is not None

    async def start(self, status: int, headers: Mapping[str, str], first: bytes = b"") -> None:
        """Send the headers of a stream, and with them its first part.

        Raises:
            ClientGone: the client has left.
        """
        response = _Stream(status=status, headers=headers)
        self._chunked = self._request.version >= HttpVersion11
        if self._chunked:
            response.enable_chunked_encoding()
        self._response = response
        await self._taken(self._begin(response, first), len(first))
        self._transport = self._request.transport

    def send(self, data: bytes) -> bool:
        """Send a part of a stream.

        Written to the connection as the response would write it, without a task that waits.

        Returns:
            Whether the client keeps up: else the next part is for after :meth:`drained`.

        Raises:
            ClientGone: the client has left.
        """
        if not data:
            return True
        transport = self._transport
        if transport is None or transport.is_closing():
            raise ClientGone
        transport.write(b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data)
        return transport.get_write_buffer_size() <= _MAX_UNREAD

    async def drained(self) -> None:
        """Wait until the client has read what was sent.

        Raises:
            ClientGone: the client has left.
        """
        transport = self._transport
        if transport is None or transport.get_write_buffer_size() > _MAX_UNREAD:
            await self._in_time(self._request.writer.drain())

    async def write(self, data: bytes) -> None:
        """Send a part of a stream, at the pace that the client reads it.

        Raises:
            ClientGone: the client has left.
        """
        if not self.send(data):
            await self.drained()

    async def end(self, last: bytes = b"") -> web.StreamResponse:
        """End a stream with its last part.

        Raises:
            ClientGone: the client has left.
        """
        assert self._response is not None
        await self._taken(self._response.write_eof(last), len(last))
        return self._response

    async def whole(
        self, status: int, headers: Mapping[str, str], body: bytes
    ) -> web.StreamResponse:
        """Send an answer in one piece.

        Raises:
            ClientGone: the client has left.
        """
        response = web.Response(status=status, headers=headers, body=body)
        self._response = response
        await self._taken(self._send_whole(response), len(body))
        return response

    async def fail(self, error: ApiError) -> web.StreamResponse:
        """Send an error, in the form that fits what has been sent already.

        Raises:
            ClientGone: the client has left.
        """
        if self.started:
            await self.write(self._errors.event(error))
            return await self.end()
        headers = {"content-type": "application/json"}
        if error.retry_after_s is not None:
            headers["retry-after"] = f"{error.retry_after_s:g}"
        return await self.whole(error.status, headers, self._errors.body(error))

    async def _begin(self, response: web.StreamResponse, first: bytes) -> None:
        await response.prepare(self._request)
        if first:
            await response.write(first)
        else:
            self._request.writer.send_headers()

    async def _send_whole(self, response: web.Response) -> None:
        await response.prepare(self._request)
        await response.write_eof()

    async def _taken(self, sending: Awaitable[None], num_bytes: int) -> None:
        """Send so many bytes, as long as the client takes them.

        Raises:
            ClientGone: it has left, or does not read.
        """
        transport = self._request.transport
        unread = 0 if transport is None else transport.get_write_buffer_size()
        if unread or num_bytes > _MAX_UNREAD // 2:
            await self._in_time(sending)
            return
        try:
            await sending  # waits for nobody: there is room for all of it, headers included
        except ConnectionError as error:
            raise ClientGone from error

    async def _in_time(self, sending: Awaitable[None]) -> None:
        """Send, as long as the client takes it.

        Raises:
            ClientGone: it has left, or does not read.
        """
        try:
            async with asyncio.timeout(self._stall_s):
                await sending
        except ConnectionError as error:
            raise ClientGone from error
        except TimeoutError as error:
            # What waits for it would wait, and hold the engine, as long as it likes.
            if self._request.transport is not None:
                self._request.transport.abort()
            raise ClientGone from error

    @asynccontextmanager
    async def pinged(self, ping_s: float) -> AsyncIterator[None]:
        """Keep the connection alive with comments while the first byte is awaited.

        Balancers cut connections that are silent for a minute. The first ping sends the
        headers, without an outcome, which is not known then. Comments are no events: no
        client sees them, and no first token is counted.

        Args:
            ping_s: seconds of silence before each ping, 0 for none.
        """
        if ping_s <= 0:
            yield
            return
        stop = asyncio.Event()
        pings = asyncio.create_task(self._ping(ping_s, stop))
        try:
            yield
        finally:
            # Not cancelled: a half-sent header cannot be taken back.
            stop.set()
            await asyncio.gather(pings, return_exceptions=True)

    async def _ping(self, ping_s: float, stop: asyncio.Event) -> None:
        while not await _is_set(stop, ping_s):
            if not self.started:
                await self.start(200, {"content-type": "text/event-stream; charset=utf-8"})
            await self.write(_PING)


async def _is_set(event: asyncio.Event, timeout_s: float) -> bool:
    try:
        async with asyncio.timeout(timeout_s):
            return await event.wait()
    except TimeoutError:
        return False
