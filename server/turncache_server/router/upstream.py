"""HTTP to the engines: one request, one answer, bytes as they come."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Final, Self

from turncache_server.router.address import Address
from turncache_server.router.config import EngineConfig, RouterConfig
from turncache_server.router.connection import Broken, Connection, Take
from turncache_server.router.errors import LegFailed
from turncache_server.router.tls import engines_trust
from turncache_server.router.wire import request_head

#: A connection that was idle for this long, and ends this soon after a request without a
#: byte of an answer, was given up by the engine before it read the request. Any other request
#: that is lost may have been worked on, and must not be sent twice.
_STALE_S: Final = 1.0
#: Most bytes of one read.
_READ_BYTES: Final = 64 * 1024
#: What an engine did by kind of :class:`Broken`, before and after the headers of its answer.
_BEFORE: Final = {
    "disconnected": "closed the connection",
    "bad_answer": "answered with what is no HTTP",
}
_AFTER: Final = {
    "disconnected": "broke off its answer",
    "bad_answer": "went on with what is no HTTP",
}

Headers = Callable[[], Mapping[str, str]]


class EngineAnswer:
    """An engine's answer whose headers have arrived.

    Attributes:
        status: HTTP status.
        content_type: media type without parameters.
    """

    def __init__(
        self,
        engine: EngineConfig,
        address: Address,
        connection: Connection,
        *,
        first_byte_deadline_s: float,
        idle_timeout_s: float,
    ) -> None:
        self._engine = engine
        self._address = address
        self._connection = connection
        self._first_byte_deadline_s = first_byte_deadline_s
        self._idle_timeout_s = idle_timeout_s
        self._headers = connection.answer.headers
        self._closed = False
        self.status = connection.answer.status
        content_type = self._headers.get("content-type", "application/octet-stream")
        self.content_type = content_type.partition(";")[0].strip().lower()

    @property
    def ended(self) -> bool:
        """Whether the last byte of the answer has arrived."""
        return self._connection.answer.done

    def headers(self, names: tuple[str, ...]) -> dict[str, str]:
        """Return the headers among ``names``, which are in lower case."""
        return {name: self._headers[name] for name in names if name in self._headers}

    async def first_chunk(self) -> bytes:
        """Return the first bytes of the body, empty when it has none.

        Raises:
            LegFailed: the connection broke, or nothing came in time.
        """
        try:
            return await self._connection.part(until_s=self._first_byte_deadline_s)
        except Broken as error:
            raise self._failed(error, "sent no first byte in time") from error

    async def chunk(self) -> bytes:
        """Return the next bytes, empty at the end of the body.

        Raises:
            LegFailed: the connection broke, or nothing came in time.
        """
        try:
            return await self._connection.part(idle_s=self._idle_timeout_s)
        except Broken as error:
            raise self._failed(error) from error

    async def flow(self, take: Take) -> bool:
        """Give the bytes to ``take`` as they arrive, while it can take more.

        Returns:
            Whether the body goes on; the engine is made to wait until the next call.

        Raises:
            LegFailed: the connection broke, or nothing came in time.
        """
        try:
            return await self._connection.flow(take, idle_s=self._idle_timeout_s)
        except Broken as error:
            raise self._failed(error) from error

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
        if not self._closed:
            self._closed = True
            self._address.put(self._connection)

    def _failed(self, error: Broken, late: str | None = None) -> LegFailed:
        late = late or f"sent nothing for {self._idle_timeout_s:g} s"
        problem = _AFTER.get(error.kind, late)
        return LegFailed(self._engine.name, error.kind, problem, consumed=True)


class Upstream:
    """The connections to all engines.

    There is no limit to their number: a call that waits for a connection would wait for a
    stream to end, and how much an engine takes on is the engine's decision.

    Args:
        config: the router's settings.
        stale_s: idle seconds after which an engine may have given up a connection.

    Raises:
        ConfigError: ``engines_ca_file`` cannot be used.
    """

    def __init__(self, config: RouterConfig, *, stale_s: float = _STALE_S) -> None:
        self._config = config
        self._stale_s = stale_s
        self._space = memoryview(bytearray(_READ_BYTES))
        # Reading certificates takes longer than a call: once, and only when they are needed.
        self._trust = functools.cache(lambda: engines_trust(config.engines_ca_file))
        if config.engines_ca_file:
            self._trust()
        self._addresses: dict[str, Address] = {}
        for engine in config.engines:
            self.meet(engine.url)

    def meet(self, url: str) -> None:
        """Keep idle connections to an engine from now on."""
        if url not in self._addresses:
            self._addresses[url] = Address(url, self._space, self._trust)

    def leave(self, url: str) -> None:
        """Close the idle connections to an engine, and keep none any more."""
        if (address := self._addresses.pop(url, None)) is not None:
            address.close()

    async def post(
        self,
        engine: EngineConfig,
        path: str,
        body: bytes,
        headers: Headers,
        *,
        limit_s: float | None = None,
    ) -> EngineAnswer:
        """Send a request and await the headers of its answer.

        Args:
            engine: whom to ask.
            path: of the resource.
            body: JSON.
            headers: makes the headers of one try. There is a second one, on a new connection,
                when the engine gave up the first one before it read the request.
            limit_s: time for the first byte of the answer, None for ``first_byte_timeout_s``.

        Raises:
            LegFailed: no connection, or it broke or timed out before the headers.
        """
        limit_s = limit_s or self._config.first_byte_timeout_s
        until_s = asyncio.get_running_loop().time() + limit_s
        address = self._at(engine.url)

        def head() -> bytes:
            sent = {**headers(), "accept-encoding": "identity"}
            return request_head("POST", address.host, path, sent, len(body))

        try:
            connection = await self._asked(engine, head, body, until_s, self._stale_s)
        except Broken as error:
            problem = _BEFORE.get(error.kind, f"did not answer within {limit_s:g} s")
            raise LegFailed(engine.name, error.kind, problem, consumed=True) from error
        return EngineAnswer(
            engine,
            address,
            connection,
            first_byte_deadline_s=until_s,
            idle_timeout_s=self._config.idle_timeout_s,
        )

    async def get(
        self, engine: EngineConfig, path: str, headers: Mapping[str, str], *, timeout_s: float
    ) -> tuple[int, bytes]:
        """Ask an engine for a small document and return (status, body).

        Raises:
            LegFailed: no answer in time.
        """
        until_s = asyncio.get_running_loop().time() + timeout_s
        address = self._at(engine.url)

        def head() -> bytes:
            return request_head("GET", address.host, path, headers, None)

        try:
            # What only asks can be asked again.
            connection = await self._asked(engine, head, b"", until_s, 0.0)
        except Broken as error:
            problem = _BEFORE.get(error.kind, f"did not answer within {timeout_s:g} s")
            raise LegFailed(engine.name, error.kind, problem, consumed=False) from error
        answer = EngineAnswer(
            engine, address, connection, first_byte_deadline_s=until_s, idle_timeout_s=timeout_s
        )
        try:
            async with asyncio.timeout_at(until_s), answer:
                first = await answer.first_chunk()
                return answer.status, await answer.rest(first, self._config.max_answer_bytes)
        except TimeoutError as error:
            problem = f"did not answer within {timeout_s:g} s"
            raise LegFailed(engine.name, "timeout", problem, consumed=False) from error

    async def close(self) -> None:
        """Close every idle connection; who holds another one closes it."""
        for address in self._addresses.values():
            address.close()

    def _at(self, url: str) -> Address:
        # Of an engine that has just left: its idle connection is dropped by its own timer.
        return self._addresses.get(url) or Address(url, self._space, self._trust)

    async def _asked(
        self,
        engine: EngineConfig,
        head: Callable[[], bytes],
        body: bytes,
        until_s: float,
        stale_s: float,
    ) -> Connection:
        """Send a request; returns its connection once the headers of the answer are there.

        Raises:
            Broken: they will not come.
            LegFailed: there is no connection.
        """
        loop = asyncio.get_running_loop()
        address = self._at(engine.url)
        if (idle := address.take()) is not None:
            connection, idle_s = idle
            asked_s = loop.time()
            try:
                await connection.ask(head(), body, until_s)
            except Broken as error:
                at_once = loop.time() - asked_s < _STALE_S
                if not (error.untouched and at_once and idle_s >= stale_s):
                    raise
                address.close()  # the others are older
            else:
                return connection
        try:
            limit_s = min(self._config.connect_timeout_s, until_s - loop.time())
            connection = await address.connect(limit_s)
        except OSError as error:
            late = isinstance(error, TimeoutError)
            problem = "accepts no connection in time" if late else "does not accept connections"
            raise LegFailed(engine.name, "refused", problem, consumed=False) from error
        await connection.ask(head(), body, until_s)
        return connection
