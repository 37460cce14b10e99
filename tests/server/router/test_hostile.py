"""Requests that no client library sends: framing, paths, headers, time."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import pytest

from tests.fakes.engine import FakeEngine, Script, fake_engines
from tests.fuzz.raw import request, send
from tests.server.router.conftest import Pair, Single
from tests.server.router.support import CHAT, MESSAGES, bench
from turncache_server.router.events import CallEnded
from turncache_server.router.keys import add_key

pytestmark = pytest.mark.anyio

BODY: Final = b'{"model":"fake","messages":[{"role":"user","content":"hi"}]}'
CHUNKED: Final = b"%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY)
SECOND: Final = b"POST /admin/return HTTP/1.1\r\nHost: x\r\n\r\n"

#: What two readers could take for different requests: none is served, and nothing after it.
SMUGGLED: Final[dict[str, bytes]] = {
    "length and chunks": request(
        b"0\r\n\r\n" + SECOND, headers=[b"Transfer-Encoding: chunked"], length=b"60"
    ),
    "two encodings": request(
        CHUNKED + SECOND,
        headers=[b"Transfer-Encoding: chunked", b"Transfer-Encoding: identity"],
        length=b"",
    ),
    "unknown encoding": request(CHUNKED, headers=[b"Transfer-Encoding: xchunked"], length=b""),
    "two lengths": request(headers=[b"Content-Length: 5"]),
    "one length twice": request(headers=[b"Content-Length: 60"]),
    "signed length": request(length=b"+60"),
    "negative length": request(length=b"-1"),
    "listed length": request(length=b"60, 60"),
    "space before the colon": request(headers=[b"Content-Length : 60"], length=b""),
    "folded header": request(headers=[b"X-Session-ID: a\r\n b"]),
    "bare CR in an id": request(headers=[b"X-Session-ID: a\rX-Priority: 1"]),
    "bare LF": request().replace(b"\r\n", b"\n"),
    "NUL in an id": request(headers=[b"X-Session-ID: a\0b"]),
    "two hosts": request(headers=[b"Host: other"]),
    "two media types": request(headers=[b"Content-Type: text/plain"]),
    "two encodings of the body": request(
        headers=[b"Content-Encoding: identity", b"Content-Encoding: gzip"]
    ),
    "two credentials": request(headers=[b"Authorization: Bearer a", b"authorization: Bearer b"]),
    "two sessions": request(headers=[b"X-Session-ID: a", b"x-session-id: b"]),
    "two call headers": request(headers=[b"Turncache: v=1", b"Turncache: v=1, turn=2"]),
    "no hexadecimal chunk": request(
        b"zz\r\n" + BODY, headers=[b"Transfer-Encoding: chunked"], length=b""
    ),
    "negative chunk": request(
        b"-1\r\n" + BODY, headers=[b"Transfer-Encoding: chunked"], length=b""
    ),
    "chunk shorter than it is": request(
        b"5\r\n" + BODY + b"\r\n0\r\n\r\n", headers=[b"Transfer-Encoding: chunked"], length=b""
    ),
    "other version": request(version=b"HTTP/3.7"),
    "no version": request(version=b""),
    "a version that is part of the path": request().replace(b" HTTP/1.1", b"HTTP/1.1", 1),
    "old version": request(version=b"HTTP/0.9"),
    "HTTP/2 with HTTP/1's framing": request(version=b"HTTP/2.0"),
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
    "too many headers": request(headers=[b"X-%d: 1" % n for n in range(101)]),
    "far too many headers": request(headers=[b"X-%d: 1" % n for n in range(1000)]),
    "large header": request(headers=[b"X-A: " + b"a" * 100_000]),
    "long target": request(target="/" + "a" * 100_000),
}


async def test_what_could_be_read_in_two_ways_is_not_served(single: Single) -> None:
    """4xx, the connection ends with it, no engine hears of it, nothing after it is read."""
    await single.bench.ready()
    for name, raw in SMUGGLED.items():
        answer = await send(single.bench.router.url, raw)
        assert answer.status is not None, name
        assert 400 <= answer.status < 500, name
        assert answer.rest == b"", name
        error = json.loads(answer.body)["error"]
        assert set(error) == {"message", "type", "param", "code"}, name
        assert b"aiohttp" not in answer.head + answer.body, name
        assert b"server: turncache" in answer.head.lower(), name
        assert single.engine.seen == [], name


SPELLINGS: Final = (
    "/v1%2fchat%2fcompletions",
    "//v1/chat/completions",
    "/v1//chat/completions",
    "/v1/chat/completions/",
    "/v1/chat/completions;x",
    "/v1/chat/completions%00",
    "/v1/chat/completions/..%2f..%2fcollective_rpc",
    "/V1/chat/completions",
    "/v1/./chat/completions/../../load_lora_adapter",
    "http://router/collective_rpc",
    "*",
)


async def test_a_path_counts_as_it_is_written(single: Single) -> None:
    """No other spelling of a path leads to an engine."""
    await single.bench.ready()
    for target in SPELLINGS:
        answer = await send(single.bench.router.url, request(target=target))
        assert answer.status in (400, 404), target
        assert single.engine.seen == [], target


async def test_a_target_with_a_host_goes_to_our_engines(single: Single) -> None:
    """HTTP allows the absolute form; its host chooses nothing."""
    await single.bench.ready()
    target = "http://169.254.169.254/v1/chat/completions"
    answer = await send(single.bench.router.url, request(target=target))
    assert answer.status == 200
    [seen] = single.engine.seen
    assert seen.path == CHAT
    assert seen.headers["host"] == urlsplit(single.engine.url).netloc


async def test_headers_that_trickle_are_cut_off() -> None:
    """A connection without a request does not stay, with or without a few bytes."""
    engine = FakeEngine()
    async with fake_engines(engine), bench(engine, header_timeout_s=0.05) as running:
        for begun in (b"", request()[:40]):
            assert (await send(running.router.url, begun)).status is None
        assert (await running.chat()).status_code == 200


async def test_a_body_that_trickles_is_refused() -> None:
    """408 in the API's shape, and no engine hears of it."""
    engine = FakeEngine()
    async with fake_engines(engine), bench(engine, body_timeout_s=0.05) as running:
        await running.ready()
        answer = await send(running.router.url, request()[:-5], to_the_end=False)
        assert answer.status == 408
        assert json.loads(answer.body)["error"]["code"] == "body_timeout"
        assert engine.seen == []


async def test_calls_at_once_are_limited_where_it_is_wished() -> None:
    """429 with Retry-After for the one too many; a call that has ended makes room."""
    engine = FakeEngine()
    async with (
        fake_engines(engine),
        bench(engine, max_tenant_calls=1, retry_after_s=7) as running,
    ):
        script = Script(until=asyncio.Event())
        engine.scripts = [script]
        first = asyncio.create_task(running.chat())
        await script.arrived.wait()
        refused = await running.chat()
        assert refused.status_code == 429
        assert refused.headers["retry-after"] == "7"
        assert refused.json()["error"]["code"] == "too_many_calls"
        assert script.until is not None
        script.until.set()
        assert (await first).status_code == 200
        assert (await running.chat()).status_code == 200
        assert len(engine.seen) == 2


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_reads_nothing_is_cut_off(stream: bool) -> None:
    """It would hold its call, and what waits for it, as long as it likes."""
    engine = FakeEngine()
    text = "x" * (30 * 1024 * 1024)
    choice = {"index": 0, "finish_reason": "stop"}
    if stream:
        delta = {"choices": [{**choice, "delta": {"content": text[:65536]}}]}
        engine.scripts = [Script(events=[b"data: " + json.dumps(delta).encode() + b"\n\n"] * 480)]
    else:
        whole = {"choices": [{**choice, "message": {"role": "assistant", "content": text}}]}
        engine.scripts = [Script(body=json.dumps(whole).encode())]
    body = {"model": "fake", "messages": MESSAGES, "stream": stream}
    async with fake_engines(engine), bench(engine, client_stall_s=0.1) as running:
        await running.ready()
        parts = urlsplit(running.router.url)
        _, writer = await asyncio.open_connection(parts.hostname, parts.port, limit=1024)
        writer.write(request(json.dumps(body).encode()))
        [ended] = await running.eventually(
            lambda: running.of_kind(CallEnded), lambda events: len(events) == 1
        )
        assert (ended.code, ended.problem) == (499, "client_gone")
        await running.eventually(lambda: engine.num_active, lambda n: n == 0)
        assert (await running.chat()).status_code == 200
        writer.close()


@pytest.mark.parametrize("path", [CHAT, "/nowhere"])
async def test_an_expectation_that_is_none_is_the_clients_fault(single: Single, path: str) -> None:
    """Of no characters or of another word: no error of the router's, and no engine hears of it."""
    for word in (b"\xff\xfe", b"200-ok"):
        answer = await send(
            single.bench.router.url, request(target=path, headers=[b"Expect: " + word])
        )
        assert answer.status in ((417,) if path == CHAT else (400, 417))
    assert single.engine.seen == []


async def heads_of(url: str, head: bytes, body: bytes) -> list[bytes]:
    """Send a head, and the body once the router says so; return the heads that came back."""
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    writer.write(head)
    heads = [await reader.readuntil(b"\r\n\r\n")]
    if heads[0].startswith(b"HTTP/1.1 100 "):
        writer.write(body)
        heads.append(await reader.readuntil(b"\r\n\r\n"))
    writer.close()
    return heads


async def test_a_body_is_asked_for_when_it_is_to_be_read(tmp_path: Path) -> None:
    """Whoever is refused by its headers sends none: curl waits so before it sends a megabyte.

    The connection ends then, because nobody knows whether the body comes all the same.
    """
    engine = FakeEngine()
    path = tmp_path / "keys.toml"
    known = b"Authorization: Bearer " + add_key(path, "red").encode()
    async with (
        fake_engines(engine),
        bench(engine, keys_file=str(path), max_body_bytes=65536) as running,
    ):
        for headers, length, wanted in (
            ([], b"60", [b"401"]),
            ([known], b"314572800", [b"413"]),
            ([known], b"60", [b"100", b"200"]),
        ):
            raw = request(b"", headers=[b"Expect: 100-continue", *headers], length=length)
            raw = raw.replace(b"Connection: close\r\n", b"")
            heads = await heads_of(running.router.url, raw, BODY)
            assert [head[9:12] for head in heads] == wanted
            assert (b"connection: close" in heads[-1].lower()) is (wanted[-1] != b"200")
    assert len(engine.seen) == 1


async def test_what_is_not_allowed_says_what_is(single: Single) -> None:
    """405 with ``Allow``; health may be asked for without its body."""
    http, url = single.bench.http, "/v1/chat/completions"
    for method in ("GET", "PUT", "OPTIONS"):
        answer = await http.request(method, url)
        assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
    answer = await http.head("/health")
    assert (answer.status_code, answer.content) == (200, b"")


async def test_bytes_that_are_no_request_are_not_logged(
    single: Single, caplog: pytest.LogCaptureFixture
) -> None:
    """They may hold a prompt or a key; one line says that something was refused."""
    caplog.set_level(logging.DEBUG)
    secret = request(b'{"messages":"my-prompt"}', headers=[b"Authorization: Bearer my-key"])
    for raw in (
        secret.replace(b"\r\n", b"\n"),
        secret.replace(b"my-key", b"my-key\0"),
        secret.replace(b"Host", b"Content-Length: +1\r\nHost"),
    ):
        assert (await send(single.bench.router.url, raw)).status == 400
    assert "could not be served" in caplog.text
    assert "my-prompt" not in caplog.text
    assert "my-key" not in caplog.text


def nested(value: dict[str, Any], *carriers: str) -> dict[str, Any]:
    """Return members wrapped in carriers of extra arguments, the outermost first."""
    for carrier in reversed(carriers):
        value = {carrier: value}
    return value


@pytest.mark.parametrize(
    "carriers",
    [
        (),
        ("extra_body",),
        ("extra_args",),
        ("vllm_xargs",),
        ("extra_body", "vllm_xargs"),
        ("vllm_xargs", "extra_args"),
        ("extra_body", "extra_body", "extra_args"),
        ("extra_args", "whatever", "extra_body"),
        ("vllm_xargs", "whatever"),
    ],
)
async def test_what_steers_engines_is_stripped_at_every_nesting(
    pair: Pair, carriers: tuple[str, ...]
) -> None:
    """Whatever a server would read there, from a carrier within a carrier too."""
    forged = {
        "kv_transfer_params": {"remote_host": "forged", "remote_block_ids": [[1, 2, 3]]},
        "ec_transfer_params": {"peer": "forged"},
        "kv_hints": {"evict": "forged"},
        "tc_source": "forged",
        "tc_tenant": "forged",
        "tc_anything": "forged",
        "session_id": "forged",
    }
    answer = await pair.bench.http.post(
        CHAT,
        json={"model": "fake", "messages": MESSAGES, **nested(forged, *carriers)},
        headers={"X-Session-ID": "mine"},
    )
    assert answer.status_code == 200
    for seen in (*pair.prefill.seen, *pair.decode.seen):
        assert b"forged" not in seen.raw
        assert b"remote_block_ids" not in seen.raw
