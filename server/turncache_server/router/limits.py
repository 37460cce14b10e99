"""What a client may do to the router before anybody knows who it is: time, size and form.

:class:`BoundedRunner` serves an application as aiohttp does, with three differences: the
first request of a connection has to arrive in time, what is no HTTP is answered in the shape
of the API, and its bytes are not logged, because they may hold a prompt or a key.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import sys
from collections import Counter
from typing import Any, Final

from aiohttp import HttpVersion10, HttpVersion11, web

from turncache.protocol import CALL_HEADER, PROTOCOL_VERSION, SessionSource
from turncache_server.router.errors import ApiError, invalid

logger = logging.getLogger(__name__)

_SESSION_HEADERS: Final = tuple(
    source.value for source in SessionSource if source is not SessionSource.OWN_HEADER
)
#: Headers that the router or an engine reads: of two, each could take another one.
_ONCE: Final = (
    *_SESSION_HEADERS,
    CALL_HEADER,
    "authorization",
    "content-encoding",
    "traceparent",
    "x-api-key",
)


#: Left in a request whose version is none that the router speaks.
_FOREIGN: Final = web.RequestKey("turncache_foreign_version", bool)
#: Left in a request whose client has been told to send its body.
_ASKED: Final = web.RequestKey("turncache_asked_for_body", bool)


def check_headers(
    request: web.Request, *, max_bytes: int, max_headers: int, own_header: str = ""
) -> None:
    """Refuse headers that are too many or too large, or of which it matters which one counts.

    Args:
        request: the request.
        max_bytes: of all headers.
        max_headers: their number.
        own_header: name of one more that the router reads.

    Raises:
        ApiError: 431 or 400.
    """
    if _FOREIGN in request:
        raise invalid("The request line does not end in HTTP/1.1 or HTTP/1.0.")
    expected = request.headers.get("expect")
    if expected is not None and request.version == HttpVersion11 and not _waits(request):
        raise ApiError(417, "expect: expected 100-continue, or no such header.")
    if len(request.raw_headers) > max_headers:
        raise ApiError(
            431,
            f"There are {len(request.raw_headers)} headers; at most {max_headers} are allowed.",
        )
    size = sum(len(name) + len(value) for name, value in request.raw_headers)
    if size > max_bytes:
        raise ApiError(431, f"The headers have {size} bytes; at most {max_bytes} are allowed.")
    # Most requests have no header twice.
    if len({name.lower() for name, _ in request.raw_headers}) == len(request.raw_headers):
        return
    for name in (*_ONCE, own_header):
        if len(request.headers.getall(name, ())) > 1:
            raise invalid(f"{name}: sent twice; which of them counts is undefined.", param=name)


def more_files() -> int:
    """Let this process have as many open files as it may, and return how many those are.

    A call has up to three connections, and many systems begin with 1,024 files.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        # Refused where a limit of the system's lies below the process's.
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
    return sys.maxsize if soft == resource.RLIM_INFINITY else soft


async def continue_later(_: web.Request) -> None:
    """Do nothing of what is due when a request expects a word before it sends its body.

    :func:`read_body` says it: whoever is refused by its headers need not send 60 MiB first.
    """


def _waits(request: web.Request) -> bool:
    """Say whether a client sends its body only when it is told to go on."""
    expected = request.headers.get("expect", "")
    return request.version == HttpVersion11 and expected.lower() == "100-continue"


def close_unread(request: web.Request, response: web.Response) -> None:
    """End the connection of a request whose client was not told to send its body.

    Whether it comes all the same nobody knows, so that what comes next could be read as either.
    """
    if _waits(request) and not request.content.is_eof() and not request.get(_ASKED, False):
        response.force_close()


async def read_body(request: web.Request, *, max_bytes: int, timeout_s: float) -> bytes:
    """Read a body within its limits.

    Raises:
        ApiError: 413, or 408 when it has not arrived in time, however steadily it came.
    """
    if (request.content_length or 0) > max_bytes:
        raise _too_large(max_bytes)
    parts: list[bytes] = []
    size = 0
    try:
        if request.content.is_eof():
            # It came with its headers, as all but the largest do.
            body = request.content.read_nowait()
            if len(body) > max_bytes:
                raise _too_large(max_bytes)
            return body
        if _waits(request):
            request[_ASKED] = True
            await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            request.writer.output_size = 0  # no part of the answer
        async with asyncio.timeout(timeout_s):
            async for part in request.content.iter_any():
                size += len(part)
                if size > max_bytes:
                    raise _too_large(max_bytes)
                parts.append(part)
    except TimeoutError as error:
        raise ApiError(
            408, f"The body did not arrive within {timeout_s:g} s.", code="body_timeout"
        ) from error
    except web.PayloadAccessError as error:
        raise invalid("The body breaks off, or is not what its headers announce.") from error
    return b"".join(parts)


class InFlight:
    """How many calls each tenant has in flight, and the bound on it.

    Args:
        limit: calls of one tenant at once, 0 for any number.
        retry_after_s: what those beyond it are told.
    """

    def __init__(self, limit: int, retry_after_s: float) -> None:
        self._limit = limit
        self._retry_after_s = retry_after_s
        self._calls: Counter[str | None] = Counter()

    def one_more(self, tenant: str | None) -> _Counted:
        """Count a call for the length of a block.

        Raises:
            ApiError: 429, when the tenant has as many as it may.
        """
        if self._limit and self._calls[tenant] >= self._limit:
            raise ApiError(
                429,
                f"{self._limit} calls are in flight, as many as may be at once. Try again when "
                "one has ended.",
                kind="rate_limit_error",
                code="too_many_calls",
                retry_after_s=self._retry_after_s,
            )
        return _Counted(self._calls, tenant)


class _Counted:
    """A call that counts among its tenant's, for the length of a block."""

    __slots__ = ("_calls", "_tenant")

    def __init__(self, calls: Counter[str | None], tenant: str | None) -> None:
        self._calls = calls
        self._tenant = tenant

    def __enter__(self) -> None:
        self._calls[self._tenant] += 1

    def __exit__(self, *_: object) -> None:
        self._calls[self._tenant] -= 1
        if not self._calls[self._tenant]:
            del self._calls[self._tenant]


class BoundedRunner(web.AppRunner):
    """Serves an application to clients that nobody vouches for.

    Args:
        app: the application.
        header_timeout_s: time for the headers of a connection's first request; for the next
            ones, and for a connection that is not used, ``keepalive_timeout`` holds.
        arguments: as for ``web.AppRunner``.
    """

    def __init__(self, app: web.Application, *, header_timeout_s: float, **arguments: Any) -> None:
        super().__init__(app, logger=_quiet, **arguments)
        self._header_timeout_s = header_timeout_s
        cancels = arguments.pop("handler_cancellation", False)
        arguments.pop("shutdown_timeout", None)
        self._arguments = {"logger": _quiet, "handler_cancellation": cancels, **arguments}

    async def _make_server(self) -> web.Server:
        made = await super()._make_server()
        return _Server(
            made.request_handler,
            request_factory=made.request_factory,
            header_timeout_s=self._header_timeout_s,
            **self._arguments,
        )


class _Server(web.Server):
    def __init__(self, handler: Any, *, header_timeout_s: float, **arguments: Any) -> None:
        super().__init__(handler, **arguments)
        self._header_timeout_s = header_timeout_s
        self._make = self.request_factory
        self.request_factory = self._arrived

    def __call__(self) -> web.RequestHandler:
        return _Connection(self, self._header_timeout_s, loop=self._loop, **self._kwargs)

    def _arrived(
        self, message: Any, payload: Any, protocol: Any, writer: Any, task: Any
    ) -> web.BaseRequest:
        protocol.in_time()
        foreign = message.version not in (HttpVersion10, HttpVersion11)
        if foreign:
            # The parser takes a line without a version, and 2.0. The answer is in ours.
            message = message._replace(version=HttpVersion11, should_close=True)
        request = self._make(message, payload, protocol, writer, task)
        if foreign:
            request[_FOREIGN] = True
        return request


class _Connection(web.RequestHandler):
    __slots__ = ("_deadline", "_header_timeout_s")

    def __init__(self, manager: _Server, header_timeout_s: float, **arguments: Any) -> None:
        super().__init__(manager, **arguments)
        self._header_timeout_s = header_timeout_s
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        loop = asyncio.get_running_loop()
        self._deadline = loop.call_later(self._header_timeout_s, self._too_late)

    def connection_lost(self, exc: BaseException | None) -> None:
        self.in_time()
        super().connection_lost(exc)

    def in_time(self) -> None:
        """Stop waiting: a request has arrived, or nobody will send one."""
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Answer what aiohttp cannot make a request of, or could not answer."""
        del message  # quotes what came
        logger.info("a request could not be served: %s", type(exc).__name__)
        if request.writer.output_size > 0:
            raise ConnectionError("a part of an answer is out: the connection has to break")
        if isinstance(exc, ValueError):
            # Whatever the application raises is answered before: aiohttp stumbled over what
            # came, as over an Expect header of no characters.
            status = 400
        error = ApiError(status, "This is no HTTP/1.1 request that the router can read.")
        response = web.Response(
            status=status, body=error.to_json(), content_type="application/json"
        )
        response.headers["server"] = "turncache"
        response.headers[CALL_HEADER] = f"v={PROTOCOL_VERSION}"
        response.force_close()
        return response

    def _too_late(self) -> None:
        self._deadline = None
        if self.transport is not None:
            self.transport.abort()


class _NoBytes(logging.Filter):
    """Keeps what clients sent out of the log: aiohttp's tracebacks quote it."""

    def filter(self, record: logging.LogRecord) -> bool:
        if record.exc_info:
            kind = record.exc_info[0]
            record.exc_info = record.exc_text = None
            record.msg, record.args = "connection failed: %s", (getattr(kind, "__name__", "?"),)
        return True


_quiet: Final = logging.getLogger(__name__ + ".http")
_quiet.addFilter(_NoBytes())


def _too_large(limit: int) -> ApiError:
    return ApiError(413, f"The body has more than {limit} bytes, the most that this router takes.")
