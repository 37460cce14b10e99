"""One HTTP/1.1 exchange as bytes: a request written, an answer read. Pure.

An answer is read in one way or not at all. What two readers could take for two different
answers (a length and chunks, two lengths, a chunk size with a sign, folded headers, a bare
line feed) is refused, because the bytes of one call must never be read as another's.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from typing import Final

#: Most bytes of an answer's headers, and of its trailers.
MAX_HEAD_BYTES: Final = 64 * 1024
_MAX_HEADERS: Final = 256
#: Most bytes of the line with a chunk's size: extensions are legal, and nobody sends them.
_MAX_SIZE_LINE: Final = 1024
#: Longest header line that is read once for all answers.
_KEPT_LINE_BYTES: Final = 100

_STATUS: Final = re.compile(rb"HTTP/1\.([01]) ([1-9][0-9]{2})(?: [^\x00-\x08\x0a-\x1f\x7f]*)?")
_FIELD: Final = re.compile(
    rb"([!#$%&'*+\-.^_`|~0-9A-Za-z]+):[ \t]*([^\x00-\x08\x0a-\x1f\x7f]*)", re.DOTALL
)
_SIZE: Final = re.compile(rb"([0-9A-Fa-f]{1,15})[ \t]*(?:;[^\x00-\x08\x0a-\x1f\x7f]*)?\r\n")
_LENGTH: Final = re.compile(r"[0-9]{1,18}")


class WireError(Exception):
    """Raised when bytes are no answer that can be read in only one way."""


def request_head(
    method: str, host: str, path: str, headers: Mapping[str, str], size_bytes: int | None
) -> bytes:
    """Return the head of a request.

    Args:
        method: in capitals.
        host: value of the header.
        path: of the resource, from the first slash.
        headers: ASCII.
        size_bytes: of the body, None without one.

    Raises:
        ValueError: something would break the line that it belongs to.
    """
    lines = [f"{method} {path} HTTP/1.1", f"host: {host}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    if size_bytes is not None:
        lines.append(f"content-length: {size_bytes}")
    head = "\r\n".join(lines).encode("ascii")
    if head.count(b"\r") != len(lines) - 1 or head.count(b"\n") != len(lines) - 1 or 0 in head:
        raise ValueError("a line end in a header or a path")
    return head + b"\r\n\r\n"


class AnswerReader:
    """Reads one answer from the bytes of a connection, however they are cut.

    Attributes:
        status: HTTP status, 0 before the headers have arrived.
        headers: by lower-case names; values of a name that occurs twice are joined.
        done: the answer has ended.
        reusable: after the end the connection can take another request.
    """

    def __init__(self) -> None:
        self.status = 0
        self.headers: Mapping[str, str] = {}
        self.done = False
        self.reusable = False
        self._kept = b""  # begun and not ended: head, line of a chunk's size, trailers
        self._left = 0  # bytes of the body, or of a chunk with the line end that follows it
        self._in_trailers = False
        self._read: Callable[[bytes], bytes] = self._head

    def feed(self, data: bytes) -> bytes:
        """Take bytes, and return those of the body among them.

        Raises:
            WireError: they are no answer, or go on after its end.
        """
        return self._read(data)

    def end(self) -> None:
        """Take the end of the connection.

        Raises:
            WireError: the answer has not ended.
        """
        if self._read == self._until_end:
            self.done = True
        if not self.done:
            raise WireError("the connection ended before the answer")

    def _head(self, data: bytes) -> bytes:
        data = self._kept + data
        while True:
            end = data.find(b"\r\n\r\n")
            if end > MAX_HEAD_BYTES or (end < 0 and len(data) > MAX_HEAD_BYTES):
                raise WireError(f"headers of more than {MAX_HEAD_BYTES} bytes")
            if end < 0:
                self._kept = data
                return b""
            lines = data[:end].split(b"\r\n")
            status = _STATUS.fullmatch(lines[0])
            if status is None:
                raise WireError("no status line")
            data = data[end + 4 :]
            # "Go on", "I am at it": the answer comes later. Nobody asked for another protocol.
            if not status[2].startswith(b"1"):
                break
            if status[2] == b"101":
                raise WireError("another protocol, which nobody asked for")
        self._kept = b""
        headers = _fields(lines[1:])
        self._frame(int(status[2]), status[1] == b"1", headers)
        self.headers = headers
        return self._read(data)

    def _frame(self, status: int, current: bool, headers: Mapping[str, str]) -> None:
        """Choose how the body is read (RFC 9112, 6.3)."""
        coding, length = headers.get("transfer-encoding"), headers.get("content-length")
        self.status = status
        # A server whose handler failed closes after its answer, often without a word of it: a
        # request that is written meanwhile would be lost, and may not be sent twice.
        goes_on = current and status != 500
        self.reusable = goes_on and "close" not in _tokens(headers.get("connection", ""))
        if coding is not None and (length is not None or not current):
            raise WireError("a length and chunks")
        if coding is not None and coding.lower() != "chunked":
            raise WireError("an encoding that is not asked for")
        if length is not None and not _LENGTH.fullmatch(length):
            raise WireError("no length")
        if status in (204, 304):
            self._read, self._left = self._counted, 0
        elif coding is not None:
            self._read = self._chunked
        elif length is not None:
            self._read, self._left = self._counted, int(length)
        else:
            self._read, self.reusable = self._until_end, False

    def _until_end(self, data: bytes) -> bytes:
        return data

    def _counted(self, data: bytes) -> bytes:
        left = self._left - len(data)
        if left > 0:
            self._left = left
            return data
        self._finish(data[self._left :])
        return data[: self._left] if left else data

    def _after(self, data: bytes) -> bytes:
        """Take what comes after the end: nobody asked for it."""
        if data:
            self.reusable = False
        return b""

    def _finish(self, rest: bytes) -> None:
        self.done = True
        self._read = self._after
        self._after(rest)

    def _chunked(self, data: bytes) -> bytes:
        if not (self._left or self._kept or self._in_trailers):
            # One whole chunk: nearly every read of a stream.
            match = _SIZE.match(data)
            if match is not None:
                start, size = match.end(), int(match[1], 16)
                if size and start + size + 2 == len(data) and data.endswith(b"\r\n"):
                    return data[start:-2]
        return self._any_chunks(data)

    def _any_chunks(self, data: bytes) -> bytes:
        data, self._kept = self._kept + data, b""
        parts: list[bytes] = []
        at = 0
        while at < len(data):
            if self._in_trailers:
                self._trailers(data[at:])
                break
            if self._left:
                at = self._in_chunk(data, at, parts)
                continue
            match = _SIZE.match(data, at)
            if match is None:
                self._keep_size(data[at:])
                break
            at, size = match.end(), int(match[1], 16)
            if size and data[at + size : at + size + 2] == b"\r\n":
                parts.append(data[at : at + size])
                at += size + 2
            else:
                self._left = size + 2 if size else 0
                self._in_trailers = not size
        return b"".join(parts)

    def _in_chunk(self, data: bytes, at: int, parts: list[bytes]) -> int:
        """Take what there is of a chunk that has begun; return the index after it."""
        if self._left > 2:
            end = min(len(data), at + self._left - 2)
            parts.append(data[at:end])
        else:
            end = at + 1
            if data[at:end] != (b"\r" if self._left == 2 else b"\n"):
                raise WireError("a chunk longer than its size")
        self._left -= end - at
        return end

    def _keep_size(self, line: bytes) -> None:
        if b"\n" in line or len(line) > _MAX_SIZE_LINE:
            raise WireError("no size of a chunk")
        self._kept = line

    def _trailers(self, data: bytes) -> None:
        """Take what follows the last chunk: read, and nobody's business."""
        if data.startswith(b"\r\n"):
            self._finish(data[2:])
            return
        end = data.find(b"\r\n\r\n")
        if max(end, len(data) if end < 0 else 0) > MAX_HEAD_BYTES:
            raise WireError(f"trailers of more than {MAX_HEAD_BYTES} bytes")
        if end < 0:
            self._kept = data
            return
        _fields(data[:end].split(b"\r\n"))
        self._finish(data[end + 4 :])


def _fields(lines: list[bytes]) -> dict[str, str]:
    """Read header lines.

    Raises:
        WireError: one is no header, there are too many, or a length occurs twice.
    """
    if len(lines) > _MAX_HEADERS:
        raise WireError(f"more than {_MAX_HEADERS} headers")
    headers: dict[str, str] = {}
    for line in lines:
        name, value = _known_field(line) if len(line) <= _KEPT_LINE_BYTES else _field(line)
        # Two lengths read as "5, 5", which is none.
        headers[name] = f"{headers[name]}, {value}" if name in headers else value
    return headers


def _field(line: bytes) -> tuple[str, str]:
    match = _FIELD.fullmatch(line)
    if match is None:
        raise WireError("a line that is no header")
    return match[1].decode("ascii").lower(), match[2].rstrip(b" \t").decode("latin-1")


# An engine says the same of every answer, but for the date and the length.
_known_field: Final = functools.lru_cache(maxsize=256)(_field)


def _tokens(value: str) -> set[str]:
    return {token.strip().lower() for token in value.split(",")}
