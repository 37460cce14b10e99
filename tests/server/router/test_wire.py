"""How an engine's answer is read from the bytes of a connection."""

from __future__ import annotations

import itertools
from typing import Final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fakes.engine import Answer, Script
from turncache_server.router.ending import ChatEnding
from turncache_server.router.passing import AnswerStream
from turncache_server.router.wire import AnswerReader, WireError, request_head

CHUNKED: Final = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


def chunk(data: bytes, extension: bytes = b"") -> bytes:
    """Return a chunk of the transfer encoding."""
    return b"%x%b\r\n%b\r\n" % (len(data), extension, data)


#: Answers by name: (bytes, status, body, whether the connection goes on).
ANSWERS: Final[dict[str, tuple[bytes, int, bytes, bool]]] = {
    "length": (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello", 200, b"hello", True),
    "no body": (b"HTTP/1.1 503 \r\ncontent-length:0\r\n\r\n", 503, b"", True),
    "no content": (b"HTTP/1.1 204 No Content\r\n\r\n", 204, b"", True),
    "chunks": (CHUNKED + chunk(b"a\r\nb") + chunk(b"c") + b"0\r\n\r\n", 200, b"a\r\nbc", True),
    "extensions and trailers": (
        CHUNKED + chunk(b"0\r\n\r\n", b" ;a=b") + b"000;x\r\nA: b\r\nServer-Timing: c\r\n\r\n",
        200,
        b"0\r\n\r\n",
        True,
    ),
    "to the end": (b"HTTP/1.1 200 OK\r\n\r\nall that comes", 200, b"all that comes", False),
    "go on": (
        (
            b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: a\r\n\r\n"
            b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
        ),
        200,
        b"ok",
        True,
    ),
    "closes": (
        b"HTTP/1.1 200 OK\r\nConnection: Keep-Alive, Close\r\nContent-Length: 2\r\n\r\nok",
        200,
        b"ok",
        False,
    ),
    "failed": (b"HTTP/1.1 500 Oops\r\nContent-Length: 2\r\n\r\nno", 500, b"no", False),
    "older": (b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\nok", 200, b"ok", False),
    "more than was asked for": (
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nokHTTP/1.1 200 OK\r\n\r\n",
        200,
        b"ok",
        False,
    ),
}


def read(parts: list[bytes]) -> tuple[int, bytes, bool]:
    """Read an answer to the end of its connection: (status, body, whether it goes on)."""
    reader = AnswerReader()
    body = b"".join(reader.feed(part) for part in parts)
    if not reader.done:
        reader.end()
    assert reader.done
    return reader.status, body, reader.reusable


@pytest.mark.parametrize("name", ANSWERS)
def test_an_answer_reads_the_same_however_it_is_cut(name: str) -> None:
    """Cut once at every byte, and into single bytes."""
    raw, *expected = ANSWERS[name]
    for at in range(len(raw) + 1):
        assert read([raw[:at], raw[at:]]) == tuple(expected), at
    assert read([raw[at : at + 1] for at in range(len(raw))]) == tuple(expected)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.binary(max_size=40)), st.lists(st.integers(0, 3000), max_size=12))
def test_chunks_read_the_same_however_they_are_cut(parts: list[bytes], cuts: list[int]) -> None:
    """Whatever the chunks hold, line ends and sizes included."""
    raw = CHUNKED + b"".join(chunk(part) for part in parts if part) + b"0\r\n\r\n"
    edges = [0, *sorted(cut % len(raw) for cut in cuts), len(raw)]
    pieces = [raw[a:b] for a, b in itertools.pairwise(edges)]
    assert read(pieces) == (200, b"".join(parts), True)


def test_a_stream_passes_byte_for_byte_however_its_connection_is_cut() -> None:
    """A read that ends at any byte of framing or event changes nothing of what goes out."""
    body = {"messages": [{"role": "user", "content": "déjà vu"}]}
    events = Answer.to(body, 10, 0).events(Script())
    raw = CHUNKED + b"".join(chunk(event) for event in events) + b"0\r\n\r\n"
    for at in range(len(raw) + 1):
        reader, stream = AnswerReader(), AnswerStream(ChatEnding(num_choices=1))
        out = b"".join(stream.feed(reader.feed(part)) for part in (raw[:at], raw[at:]))
        assert out + stream.close() == b"".join(events), at
        assert reader.done
        assert stream.done


def head(*lines: bytes, status: bytes = b"HTTP/1.1 200 OK") -> bytes:
    """Return an answer's head."""
    return b"\r\n".join([status, *lines, b"", b""])


#: What two readers could take for different answers, or what is none.
REFUSED: Final[dict[str, bytes]] = {
    "length and chunks": head(b"Content-Length: 3", b"Transfer-Encoding: chunked") + b"0\r\n\r\n",
    "two lengths": head(b"Content-Length: 3", b"Content-Length: 4"),
    "one length twice": head(b"Content-Length: 3", b"content-length: 3"),
    "listed length": head(b"Content-Length: 3, 3"),
    "signed length": head(b"Content-Length: +3"),
    "negative length": head(b"Content-Length: -3"),
    "empty length": head(b"Content-Length:"),
    "two encodings": head(b"Transfer-Encoding: chunked", b"Transfer-Encoding: chunked"),
    "other encoding": head(b"Transfer-Encoding: gzip, chunked"),
    "chunks before 1.1": head(b"Transfer-Encoding: chunked", status=b"HTTP/1.0 200 OK"),
    "folded header": head(b"A: b", b" c"),
    "space before the colon": head(b"Content-Length : 3"),
    "no name": head(b": b"),
    "no colon": head(b"abc"),
    "bare CR": head(b"A: b\rContent-Length: 3"),
    "bare LF": head(b"A: b\nContent-Length: 3"),
    "NUL": head(b"A: b\0"),
    "too many headers": head(*[b"A: b"] * 300),
    "large headers": head(b"A: " + b"b" * 70_000),
    "headers without end": b"HTTP/1.1 200 OK\r\nA: " + b"b" * 70_000,
    "no answer": b"SSH-2.0-OpenSSH\r\n\r\n",
    "other version": head(status=b"HTTP/2 200"),
    "no status": head(status=b"HTTP/1.1 99 OK"),
    "long status": head(status=b"HTTP/1.1 2000 OK"),
    "another protocol": head(status=b"HTTP/1.1 101 Switching Protocols"),
    "chunk of a signed size": CHUNKED + b"+3\r\nabc\r\n",
    "chunk of a prefixed size": CHUNKED + b"0x3\r\nabc\r\n",
    "chunk of a grouped size": CHUNKED + b"0_3\r\nabc\r\n",
    "chunk without size": CHUNKED + b"\r\nabc\r\n",
    "chunk with a bare LF": CHUNKED + b"3\nabc\r\n",
    "chunk of a huge size": CHUNKED + b"1" * 16 + b"\r\n",
    "chunk longer than its size": CHUNKED + b"3\r\nabcd\r\n",
    "size line without end": CHUNKED + b"3;" + b"a" * 2000,
    "trailer that is none": CHUNKED + b"0\r\nabc\r\n\r\n",
    "trailers without end": CHUNKED + b"0\r\nA: " + b"b" * 70_000,
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_can_be_read_in_two_ways_is_refused(name: str) -> None:
    """In one piece, and in small ones."""
    raw = REFUSED[name]
    step = 1 + len(raw) // 200
    for parts in ([raw], [raw[at : at + step] for at in range(0, len(raw), step)]):
        reader = AnswerReader()
        with pytest.raises(WireError):
            list(map(reader.feed, parts))


@pytest.mark.parametrize("name", ["length", "chunks", "extensions and trailers", "go on"])
def test_an_end_before_the_end_is_none(name: str) -> None:
    """Wherever the connection ends, only the whole answer counts as one."""
    raw = ANSWERS[name][0]
    for at in range(len(raw)):
        reader = AnswerReader()
        reader.feed(raw[:at])
        with pytest.raises(WireError):
            reader.end()


@pytest.mark.parametrize("bad", ["a\r\nb: c", "a\nb", "a\rb", "a\0"])
def test_a_request_cannot_be_made_to_hold_another(bad: str) -> None:
    """A line end in a header, a path or a host is an error of ours, and not sent."""
    assert request_head("GET", "h", "/", {"a": "b"}, None) == (
        b"GET / HTTP/1.1\r\nhost: h\r\na: b\r\n\r\n"
    )
    for arguments in (("h", "/", {"a": bad}), ("h", "/" + bad, {}), ("h" + bad, "/", {})):
        with pytest.raises(ValueError, match="line end"):
            request_head("POST", *arguments, 3)
