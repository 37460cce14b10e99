"""Requests as bytes: sent over a socket that corrects nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit


@dataclass(frozen=True)
class RawAnswer:
    """What came back until the router closed, or had answered.

    Attributes:
        status: of the first answer, None when the connection was cut without one.
        head: its header lines.
        body: its bytes, as many as announced.
        rest: what came after it: a second answer means that one request was read as two.
    """

    status: int | None
    head: bytes = b""
    body: bytes = b""
    rest: bytes = b""


def request(
    body: bytes = b'{"model":"fake","messages":[{"role":"user","content":"hi"}]}',
    *,
    method: str = "POST",
    target: str | bytes = "/v1/chat/completions",
    headers: Sequence[bytes] = (),
    length: bytes | None = None,
    version: bytes = b"HTTP/1.1",
) -> bytes:
    """Make a request that is well formed except for what is given.

    Args:
        body: as it is sent.
        method: of the request.
        target: in the request line.
        headers: more header lines.
        length: value of ``Content-Length``; by default the true one, empty for no such line.
        version: in the request line.
    """
    path = target if isinstance(target, bytes) else target.encode()
    lines = [
        b" ".join((method.encode(), path, version)),
        b"Host: router",
        b"Content-Type: application/json",
        b"Connection: close",
        *headers,
    ]
    if length is None:
        length = b"%d" % len(body)
    if length:
        lines.append(b"Content-Length: " + length)
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


def leaves_more(raw: bytes) -> bool:
    """Tell whether bytes are left after the first request, by the strictest reading.

    What is left is a request of its own, to be answered on a connection that stays open. A
    request whose length can be read in two ways leaves nothing: it has to end its connection.
    """
    head, end, rest = raw.partition(b"\r\n\r\n")
    fields = [line.partition(b":") for line in head.split(b"\r\n")[1:]]
    names = [name.strip().lower() for name, _, _ in fields]
    if not end or b"transfer-encoding" in names:
        return False
    lengths = [value.strip() for name, _, value in fields if name.lower() == b"content-length"]
    if names.count(b"content-length") != len(lengths) or len(lengths) > 1:
        return False
    if lengths and not lengths[0].isdigit():
        return False
    return len(rest) > (int(lengths[0]) if lengths else 0)


async def send(
    url: str, raw: bytes, *, timeout_s: float = 20.0, to_the_end: bool = True
) -> RawAnswer:
    """Send bytes on a connection of their own, and read what comes back.

    Args:
        url: of the router.
        raw: the bytes.
        timeout_s: patience.
        to_the_end: read until the router closes, else what comes first.

    Raises:
        TimeoutError: nothing came, or no end: the router hangs.
    """
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    try:
        async with asyncio.timeout(timeout_s):
            try:
                writer.write(raw)
                await writer.drain()
                out = await _one(reader)
                if to_the_end and writer.can_write_eof():
                    # Nothing more comes: what the router has read so far is all there is.
                    writer.write_eof()
                    out += await reader.read(1024 * 1024)
                return _parsed(out)
            except ConnectionError:
                return RawAnswer(None)
    finally:
        writer.close()


async def _one(reader: asyncio.StreamReader) -> bytes:
    """Read one answer, or whatever comes until the end."""
    out = b""
    while chunk := await reader.read(65536):
        out += chunk
        if b"\r\n\r\n" in out and b"content-length:" in out.lower():
            answer = _parsed(out)
            if answer.status is not None and len(answer.body) >= _length(answer.head):
                break
    return out


def _parsed(raw: bytes) -> RawAnswer:
    head, _, rest = raw.partition(b"\r\n\r\n")
    if not head.startswith(b"HTTP/1."):
        return RawAnswer(None, rest=raw)
    status = int(head.split(b" ", 2)[1])
    if status == 100:
        return _parsed(rest)
    length = _length(head, len(rest))
    return RawAnswer(status, head, rest[:length], rest[length:])


def _length(head: bytes, otherwise: int = 0) -> int:
    for line in head.split(b"\r\n"):
        name, _, value = line.partition(b":")
        if name.lower() == b"content-length":
            return int(value)
    return otherwise
