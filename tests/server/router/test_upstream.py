"""The connections to engines: kept, given up, cut, and what is read from them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import httpx2
import pytest

from tests.fakes.certificate import CERTIFICATE, PRIVATE_KEY
from tests.server.router.support import CHAT, MESSAGES
from tests.server.router.test_wire import chunk
from turncache.protocol import Boundary
from turncache_server.router.app import serving
from turncache_server.router.config import EngineConfig, RouterConfig, parse_config
from turncache_server.router.errors import LegFailed
from turncache_server.router.events import CallEnded, Event
from turncache_server.router.upstream import Upstream

pytestmark = pytest.mark.anyio

OK: Final = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}"
EVENTS: Final = (
    b'data: {"choices":[{"index":0,"delta":{"content":"a"}}]}\n\n',
    b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\n',
    b"data: [DONE]\n\n",
)
STREAM: Final = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
)


class RawEngine:
    """Sends the bytes that it is told to.

    Attributes:
        answers: what a request is answered with, one after the other; None closes the
            connection instead, and so does the end of the list. Of two parts the second is
            sent when ``resume`` is set; then the connection is closed, unless they end a body.
        heads: of all calls, as they came.
        connections: number of the connection that each call came on.
        port: where it listens.
    """

    def __init__(
        self, answers: Sequence[bytes | tuple[bytes, bytes] | None], *, reads_body: bool = True
    ) -> None:
        self.answers = list(answers)
        self.heads: list[bytes] = []
        self.connections: list[int] = []
        self.port = 0
        self.resume = asyncio.Event()
        self.gone = asyncio.Event()
        self.writers: list[asyncio.StreamWriter] = []
        self._reads_body = reads_body

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection."""
        self.writers.append(writer)
        number = len(self.writers)
        ended = (asyncio.IncompleteReadError, asyncio.LimitOverrunError, ConnectionError)
        with contextlib.suppress(*ended):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                if head.startswith(b"GET"):
                    writer.write(OK)
                    continue
                size = int(head.partition(b"content-length: ")[2].split(b"\r\n")[0])
                if self._reads_body:
                    await reader.readexactly(size)
                self.heads.append(head)
                self.connections.append(number)
                answer = self.answers.pop(0) if self.answers else None
                if answer is None:
                    break
                if isinstance(answer, tuple):
                    writer.write(answer[0])
                    await self.resume.wait()
                    writer.write(answer[1])
                    if not answer[1].endswith(b"0\r\n\r\n"):
                        break
                    continue
                writer.write(answer)
                if b"connection: close" in answer:
                    break
        writer.close()
        self.gone.set()


@asynccontextmanager
async def listening(engine: RawEngine, host: str = "127.0.0.1", **tls: Any) -> AsyncIterator[None]:
    """Let an engine listen."""
    server = await asyncio.start_server(engine.serve, host, 0, **tls)
    engine.port = server.sockets[0].getsockname()[1]
    try:
        yield
    finally:
        server.close()
        for writer in engine.writers:
            writer.transport.abort()


def settings_for(engine: RawEngine, base: str = "http://127.0.0.1", **more: Any) -> RouterConfig:
    """Make a router's settings for one engine."""
    config = {"name": "raw", "side": "single", "url": f"{base}:{engine.port}"}
    return parse_config({"port": 0, "engines": [config], "health_interval_s": 300, **more})


@asynccontextmanager
async def connected(config: RouterConfig, **more: Any) -> AsyncIterator[Callable[..., Any]]:
    """Give a function that posts to the only engine: (status, body)."""
    upstream = Upstream(config, **more)
    engine: EngineConfig = config.engines[0]
    tries = iter(range(1000))

    async def post(body: bytes = b"{}") -> tuple[int, bytes]:
        leg = await upstream.post(engine, "/x", body, lambda: {"x-try": str(next(tries))})
        async with leg:
            return leg.status, await leg.rest(await leg.first_chunk(), 1 << 20)

    post.upstream = upstream  # type: ignore[attr-defined]
    try:
        yield post
    finally:
        await upstream.close()


async def chat(
    engine: RawEngine, use: Callable[[httpx2.AsyncClient], Awaitable[Any]], **settings: Any
) -> Any:
    """Run a router in front of an engine, and use it."""
    async with (
        listening(engine),
        serving(settings_for(engine, **settings)) as router,
        httpx2.AsyncClient(base_url=router.url, timeout=20, verify=False) as http,
    ):
        return await use(http)


async def _stream(http: httpx2.AsyncClient) -> httpx2.Response:
    return await http.post(CHAT, json={"messages": MESSAGES, "stream": True})


async def test_a_connection_that_an_engine_gave_up_costs_no_call() -> None:
    """A request that crosses the end of an idle connection is sent again, with a new id."""
    engine = RawEngine([OK, None, OK])
    async with listening(engine), connected(settings_for(engine), stale_s=0.0) as post:
        assert await post() == (200, b"{}")
        assert await post() == (200, b"{}")
    assert engine.connections == [1, 1, 2]
    assert [head.partition(b"x-try: ")[2][:1] for head in engine.heads] == [b"0", b"1", b"2"]


async def test_a_request_that_may_have_been_worked_on_is_not_sent_again() -> None:
    """A connection that was busy until now, or is new, or has begun to answer, is no excuse."""
    for answers, stale_s in (
        ([OK, None], 60.0),
        ([None], 0.0),
        ([OK, b"HTTP/1.1 200 OK\r\nconnection: close\r\n"], 0.0),
    ):
        engine = RawEngine([*answers, None, OK])
        async with listening(engine), connected(settings_for(engine), stale_s=stale_s) as post:
            for _ in answers[:-1]:
                await post()
            with pytest.raises(LegFailed) as failed:
                await post()
            assert (failed.value.kind, failed.value.consumed) == ("disconnected", True)
            assert len(engine.heads) == len(answers)


async def test_connections_are_kept_and_cut_by_what_engines_say() -> None:
    """One after the other on one connection, until an answer ends it or is followed by more."""
    closes = OK.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n")
    trailers = STREAM + chunk(b"{}") + b"0\r\nServer-Timing: a\r\n\r\n"
    engine = RawEngine([OK, trailers, OK, closes, OK + OK, OK])
    async with listening(engine), connected(settings_for(engine)) as post:
        assert [await post() for _ in range(6)] == [(200, b"{}")] * 6
    assert engine.connections == [1, 1, 1, 1, 2, 3]


async def test_an_answer_before_the_request_is_read_is_an_answer() -> None:
    """An engine refuses a large body by its head; the connection is of no more use."""
    refusal = b"HTTP/1.1 413 Too Large\r\ncontent-length: 0\r\n\r\n"
    engine = RawEngine([refusal], reads_body=False)
    async with listening(engine), connected(settings_for(engine)) as post:
        assert await post(b" " * 20_000_000) == (413, b"")
        await engine.gone.wait()


async def test_what_is_not_taken_is_not_read() -> None:
    """An engine waits while the taker recovers; nothing is lost, and nothing comes twice.

    A taker that fails does not cut the connection: whoever drains it reads on.
    """
    body = bytes(range(256)) * 160_000
    engine = RawEngine([b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)])
    async with listening(engine), connected(settings_for(engine)) as post:
        leg = await post.upstream.post(  # type: ignore[attr-defined]
            settings_for(engine).engines[0], "/x", b"{}", dict
        )
        taken = [await leg.first_chunk()]
        async with leg:
            assert await leg.flow(lambda part: taken.append(part) is not None)
            await asyncio.sleep(0.03)
            left = engine.writers[0].transport.get_write_buffer_size()
            assert left > 1_000_000, "41 MB do not fit into the buffers in between"
            assert sum(map(len, taken)) < 1_000_000
            with pytest.raises(ZeroDivisionError):
                await leg.flow(lambda part: taken.append(part) is None and 1 / 0 > 1)
            assert not await leg.flow(lambda part: taken.append(part) is None)
    assert b"".join(taken) == body


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param(STREAM.replace(b"\r\n\r\n", b"\r\ncontent-length: 9\r\n\r\n"), id="two"),
        pytest.param(b"220 smtp ready\r\n\r\n", id="none"),
    ],
)
async def test_an_answer_that_can_be_read_in_two_ways_is_a_502(answer: bytes) -> None:
    """Nothing of it reaches the client, and its connection is cut."""
    engine = RawEngine([answer])
    got = await chat(engine, _stream)
    assert (got.status_code, got.json()["error"]["code"]) == (502, "engine_bad_answer")
    await engine.gone.wait()


async def test_trailers_are_the_engines_own_business() -> None:
    """They end the answer, and do not go to the client."""
    body = b"".join(map(chunk, EVENTS))
    got = await chat(RawEngine([STREAM + body + b"0\r\nA: b\r\n\r\n"]), _stream)
    assert got.content == b"".join(EVENTS)


@pytest.mark.parametrize(
    ("cut", "code"),
    [
        pytest.param(b"%x\r\n%b" % (len(EVENTS[1]), EVENTS[1][:9]), "disconnected", id="chunk"),
        pytest.param(b"1", "disconnected", id="size"),
        pytest.param(chunk(b"data: half"), "disconnected", id="event"),
        pytest.param(b"nonsense\r\n", "bad_answer", id="framing"),
        pytest.param(chunk(EVENTS[1])[:-2] + b"xx", "bad_answer", id="longer"),
    ],
)
async def test_a_stream_that_breaks_anywhere_ends_in_an_error_event(cut: bytes, code: str) -> None:
    """Whole events have passed, nothing of the broken one, and the client is told."""
    engine = RawEngine([(STREAM + chunk(EVENTS[0]), cut)])

    async def use(http: httpx2.AsyncClient) -> list[bytes]:
        body = {"messages": MESSAGES, "stream": True}
        async with http.stream("POST", CHAT, json=body) as answer:
            assert answer.status_code == 200
            parts = answer.aiter_raw()
            first = await anext(parts)
            engine.resume.set()
            return [first, *[part async for part in parts]]

    got = b"".join(await chat(engine, use))
    assert got.startswith(EVENTS[0])
    last = got.removeprefix(EVENTS[0]).removeprefix(EVENTS[1])
    assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == f"engine_{code}"


async def test_a_client_that_leaves_with_the_last_event_has_had_its_answer() -> None:
    """OpenAI's reads no further than [DONE]: the call ended well, the connection is kept."""
    whole = b"".join(chunk(event) for event in EVENTS)
    engine = RawEngine([(STREAM + whole, b"0\r\n\r\n"), OK])
    ended: list[CallEnded] = []
    over = asyncio.Event()

    def listen(event: Event) -> None:
        if isinstance(event, CallEnded):
            ended.append(event)
            over.set()

    async with (
        listening(engine),
        serving(settings_for(engine), listeners=[listen]) as router,
        httpx2.AsyncClient(base_url=router.url, timeout=20) as http,
    ):
        async with http.stream("POST", CHAT, json={"messages": MESSAGES, "stream": True}) as answer:
            async for line in answer.aiter_lines():
                if line == "data: [DONE]":
                    break
        await over.wait()
        assert (ended[0].code, ended[0].problem) == (200, None)
        assert ended[0].boundary is Boundary.USER
        engine.resume.set()
        await _stream(http)
        assert not engine.gone.is_set(), "the first connection was not cut"


async def test_an_engine_of_an_older_version_ends_its_stream_with_its_connection() -> None:
    """Without a length or chunks the end of the connection is the end of the answer."""
    head = b"HTTP/1.0 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"
    got = await chat(RawEngine([head + b"".join(EVENTS)]), _stream)
    assert got.content == b"".join(EVENTS)


async def test_a_client_of_an_older_version_gets_no_chunks() -> None:
    """Its answer, too, ends with its connection, byte for byte."""
    engine = RawEngine([STREAM + b"".join(map(chunk, EVENTS)) + b"0\r\n\r\n"])
    async with listening(engine), serving(settings_for(engine)) as router:
        host, _, port = router.url.removeprefix("http://").partition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        body = json.dumps({"messages": MESSAGES, "stream": True}).encode()
        lines = [f"POST {CHAT} HTTP/1.0", "content-type: application/json"]
        lines += [f"content-length: {len(body)}", "", ""]
        writer.write("\r\n".join(lines).encode() + body)
        head, _, rest = (await reader.read(-1)).partition(b"\r\n\r\n")
        writer.close()
    assert b"chunked" not in head
    assert rest == b"".join(EVENTS)


@pytest.mark.parametrize(("host", "address"), [("localhost", "127.0.0.1"), ("[::1]", "::1")])
async def test_engines_are_reached_by_name_and_by_any_address(host: str, address: str) -> None:
    """The host header names what the settings name."""
    engine = RawEngine([OK])
    async with (
        listening(engine, address),
        connected(settings_for(engine, f"http://{host}")) as post,
    ):
        assert await post() == (200, b"{}")
    assert f"host: {host}:{engine.port}\r\n".encode() in engine.heads[0]


async def test_engines_are_reached_by_tls_when_their_certificate_is_trusted(
    tmp_path: Path,
) -> None:
    """Whoever answers with another certificate gets no prompt."""
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    certificate.write_text(CERTIFICATE)
    key.write_text(PRIVATE_KEY)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    engine = RawEngine([OK, STREAM + chunk(b"x" * 300_000) + b"0\r\n\r\n"])
    async with listening(engine, ssl=context):
        settings = settings_for(engine, "https://127.0.0.1")
        async with connected(settings) as post:
            with pytest.raises(LegFailed, match="accept connections"):
                await post()
        assert not engine.heads
        async with connected(replace(settings, engines_ca_file=str(certificate))) as post:
            assert await post() == (200, b"{}")
            assert await post() == (200, b"x" * 300_000)
    assert len(set(engine.connections)) == 1
