"""Tool waits shared over a real Redis: what replicas learn, and what happens without it."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from redis.asyncio import Redis

from tests.fakes.engine import FakeEngine, fake_engines
from tests.fakes.redis_server import RedisServer
from tests.server.router.support import MESSAGES, TOOLS, Bench, bench
from turncache.errors import ConfigError
from turncache.protocol import MAX_RETAIN_S
from turncache_server.router.config import parse_config
from turncache_server.router.events import CallStarted, SignalSent, WaitEnded
from turncache_server.router.forecast import MAX_TENANTS, Forecast
from turncache_server.router.keys import Caller, add_key
from turncache_server.router.shared import MAX_UNSENT, MAX_WAITS, SharedWaits, read_wait

pytestmark = pytest.mark.anyio

EXCHANGES = "turncache_router_shared_exchanges_total"
WAITS = "turncache_router_shared_waits_total"
SECRET = "geheim"
NOBODY = [{"name": "a", "side": "single", "url": "http://127.0.0.1:1"}]


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    """One Redis for the tests of this file."""
    with RedisServer() as running:
        yield running


def sharing(server: RedisServer, prefix: str) -> dict[str, Any]:
    """Make a router's settings: quick, and with keys of its own."""
    return {"redis_url": server.url, "redis_prefix": prefix, "redis_interval_s": 0.02}


async def wait_once(running: Bench, session: str, **members: Any) -> None:
    """Run a call that ends in a tool call, and the one that brings the result."""
    first = await running.chat(tools=TOOLS, session=session, **members)
    reply = first.json()["choices"][0]["message"]
    history = [*MESSAGES, reply, {"role": "tool", "tool_call_id": "1", "content": SECRET}]
    await running.chat(tools=TOOLS, session=session, messages=history, **members)


def started(tenant: str) -> CallStarted:
    """Make the event of a tenant's call."""
    return CallStarted(request="r", api="chat", tenant=tenant, elapsed_s=0.0, trace={})


async def taken(running: Bench, count: int) -> None:
    """Wait until a router has learnt so many waits of others."""
    sample = f'{WAITS}{{what="taken"}}'
    await running.eventually(lambda: running.metric(sample), lambda seen: seen >= count)


def keys(path: Path, *tenants: str) -> dict[str, dict[str, str]]:
    """Write a file of keys; return the headers of each tenant."""
    return {
        tenant: {"Authorization": f"Bearer {add_key(path, tenant, admin=False)}"}
        for tenant in tenants
    }


async def test_a_replica_expects_what_another_has_measured(
    server: RedisServer, tmp_path: Path
) -> None:
    """Of the same tenant; another learns nothing of it, and Redis holds nobody's words."""
    engine = FakeEngine()
    path = tmp_path / "keys.toml"
    headers = keys(path, "team-a", "team-b")
    common = {**sharing(server, "share"), "keys_file": str(path)}
    async with (
        fake_engines(engine),
        bench(engine, **common) as first,
        bench(engine, **common) as second,
    ):
        for running in (first, second):
            running.http.headers.update(headers["team-a"])
        for team in headers.values():
            await second.chat(session="early", headers=team)
        await wait_once(first, f"session-{SECRET}", headers=headers["team-a"])
        (ended,) = first.of_kind(WaitEnded)
        await taken(second, 1)
        engine.signals.clear()
        await second.chat(tools=TOOLS, session="s", headers=headers["team-b"])
        await second.chat(tools=TOOLS, session="s", headers=headers["team-a"])
        await second.eventually(lambda: second.of_kind(SignalSent), bool)
        (told,) = engine.signals
        assert told.expect_s == pytest.approx(ended.seconds, rel=0.01)
        assert await first.metric(f'{WAITS}{{what="sent"}}') == 1
        assert await first.metric(f'{WAITS}{{what="taken"}}') == 0
    async with Redis.from_url(server.url, decode_responses=True) as redis:
        label = Caller(tenant="team-a").label
        (key,) = [each async for each in redis.scan_iter("share:*")]
        assert key == f"share:1:waits:{label}"
        entries = await redis.xrange(key)
        assert entries
        for _, fields in entries:
            assert fields["tools"] == "search"
            assert set(fields) == {"by", "tools", "s"}
            assert SECRET not in f"{key} {fields}"
        assert 0 < await redis.ttl(key) <= 7 * 24 * 3600


@pytest.mark.parametrize("how", ["killed", "frozen"])
async def test_without_redis_only_a_counter_changes(
    server: RedisServer, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Calls are served, expectations stay, and when it is back the waits of meanwhile go out."""
    engine = FakeEngine()
    common = {**sharing(server, how), "redis_timeout_s": 0.25}
    failed = f'{EXCHANGES}{{result="failed"}}'
    async with (
        fake_engines(engine),
        bench(engine, **common) as first,
        bench(engine, **common) as second,
    ):
        await second.chat(session="early")
        await wait_once(first, "before")
        await taken(second, 1)
        (server.kill if how == "killed" else server.freeze)()
        await first.eventually(lambda: first.metric(failed), bool)
        engine.signals.clear()
        await wait_once(first, "meanwhile")
        assert [told.session for told in engine.signals] == ["meanwhile"]
        await wait_once(second, "meanwhile-too")
        assert len(engine.signals) == 2
        (server.start if how == "killed" else server.thaw)()
        await taken(second, 2)
        await taken(first, 1)
    warned = [m for m in caplog.messages if m.startswith("tool waits are not shared")]
    assert len(warned) >= 2


@asynccontextmanager
async def late(server: RedisServer, command: bytes) -> AsyncIterator[tuple[str, asyncio.Event]]:
    """Stand before a Redis, and hold its answers back, from a command to the event's end."""
    holds, release = asyncio.Event(), asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", server.port)

        async def pass_on(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
            with contextlib.suppress(ConnectionError):
                while data := await source.read(65536):
                    if source is far_reader and holds.is_set():
                        await release.wait()
                    elif source is reader and command in data:
                        holds.set()
                    sink.write(data)
            sink.close()

        await asyncio.gather(pass_on(reader, far_writer), pass_on(far_reader, writer))

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as standing:
        yield f"redis://127.0.0.1:{standing.sockets[0].getsockname()[1]}", release
        release.set()


def ended(tenant: str, seconds: float) -> WaitEnded:
    """Make the event of a tool wait."""
    return WaitEnded(request="r", tenant=tenant, tool_names=("a",), seconds=seconds, expect_s=None)


async def test_what_redis_does_and_answers_late_is_not_done_twice(server: RedisServer) -> None:
    """Nobody can tell it from what was lost: it counts as lost, and later waits go out."""
    learn = Forecast(10).learn
    async with (
        Redis.from_url(server.url, decode_responses=True) as redis,
        late(server, b"XADD") as (url, release),
        Redis.from_url(url, decode_responses=True) as slow,
    ):
        shared = SharedWaits(slow, learn, prefix="late", timeout_s=0.2)
        shared(started("t"))
        shared(ended("t", 1.0))
        done = await shared.exchange()
        assert (done.num_sent, done.num_dropped) == (0, 1)
        assert done.problem is not None
        shared(ended("t", 2.0))
        # It is still away: this one has not been asked for, and is kept.
        assert (await shared.exchange()).num_dropped == 0
        release.set()
        assert (await shared.exchange()).num_sent == 1
        entries = await redis.xrange("late:1:waits:t")
        assert [fields["s"] for _, fields in entries] == ["1", "2"]


async def test_what_redis_refuses_of_one_tenant_is_asked_for_again_alone(
    server: RedisServer,
) -> None:
    """The waits of the others have been taken, and are read."""
    async with Redis.from_url(server.url, decode_responses=True) as redis:
        forecast = Forecast(10)
        shared = SharedWaits(redis, forecast.learn, prefix="refuse", timeout_s=20)
        await redis.set("refuse:1:waits:odd", "no stream")
        for tenant in ("odd", "t"):
            shared(started(tenant))
            shared(ended(tenant, 1.0))
        other = {"by": "other", "tools": "a", "s": "7"}
        await redis.xadd("refuse:1:waits:t", other)
        done = await shared.exchange()
        assert (done.num_sent, done.num_taken, done.num_dropped) == (1, 1, 0)
        assert "WRONGTYPE" in (done.problem or "")
        done = await shared.exchange()
        assert (done.num_sent, done.num_taken) == (0, 0)
        assert await redis.xlen("refuse:1:waits:t") == 2
        await redis.delete("refuse:1:waits:odd")
        assert (await shared.exchange()).num_sent == 1


async def test_a_router_starts_without_redis_and_ends_without_it(server: RedisServer) -> None:
    """Nobody needs it for a call."""
    engine = FakeEngine()
    gone = {"redis_url": "redis://127.0.0.1:1", "redis_interval_s": 0.02}
    async with fake_engines(engine), bench(engine, **gone) as running:
        assert (await running.chat()).status_code == 200
        sample = f'{EXCHANGES}{{result="failed"}}'
        await running.eventually(lambda: running.metric(sample), bool)


async def test_what_waits_for_redis_and_what_lies_there_is_bounded(server: RedisServer) -> None:
    """The oldest go first, counted; so do the tenants that have been quiet for longest."""
    async with Redis.from_url(server.url, decode_responses=True) as redis:
        forecast = Forecast(10)
        shared = SharedWaits(redis, forecast.learn, prefix="bound", timeout_s=20)
        for number in range(2 * MAX_UNSENT):
            shared(
                WaitEnded(request="r", tenant="t", tool_names=("a",), seconds=number, expect_s=None)
            )
        done = await shared.exchange()
        assert (done.num_sent, done.num_dropped, done.problem) == (MAX_UNSENT, MAX_UNSENT, None)
        assert MAX_WAITS <= await redis.xlen("bound:1:waits:t") < 2 * MAX_WAITS
        other = SharedWaits(redis, forecast.learn, prefix="bound", timeout_s=20)
        for number in range(MAX_TENANTS + 5):
            other(started(f"t{number}"))
        other(started("t"))
        num_taken = 0
        for _ in range(MAX_TENANTS // 16 + 1):
            num_taken += (await other.exchange()).num_taken
        # The newest first, and what comes later: nothing twice.
        assert num_taken == 64
        assert forecast.begins("s", ["a"], {}, tenant="t", now_s=0) > MAX_UNSENT
        await redis.xadd("bound:1:waits:t", {"tools": "A", "s": "1"})
        assert (await other.exchange()).num_dropped == 0
        dropped = 0
        for _ in range(MAX_TENANTS // 16 + 1):
            dropped += (await other.exchange()).num_dropped
        assert dropped == 1


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"tools": "search"},
        {"tools": "search", "s": "soon"},
        {"tools": "search", "s": "nan"},
        {"tools": "search", "s": "-1"},
        {"tools": "search", "s": "1e9"},
        {"tools": "", "s": "1"},
        {"tools": "Search", "s": "1"},
        {"tools": "a" * 65, "s": "1"},
        {"tools": ",".join("abcdefghijklmnopq"), "s": "1"},
    ],
)
def test_what_no_router_writes_is_not_learnt(fields: dict[str, str]) -> None:
    """Whoever else writes there."""
    assert read_wait(fields) is None


@settings(max_examples=50)
@given(
    fields=st.fixed_dictionaries({"tools": st.text("ab,*_A", max_size=9), "s": st.text("1.e-n")})
)
def test_any_entry_is_read_or_refused(fields: dict[str, str]) -> None:
    """Nothing that lies in Redis stops a router."""
    wait = read_wait(fields)
    assert wait is None or 0 <= wait[1] <= MAX_RETAIN_S


@pytest.mark.parametrize(
    "url",
    [
        "localhost:6379",
        "http://h",
        "redis://",
        "unix://",
        f"redis://user:{SECRET}@h",
        f"redis://h?password={SECRET}",
        f"redis://h?password=a@{SECRET}",
        "redis://h:port",
    ],
)
def test_a_url_that_is_none_is_refused_at_start(url: str) -> None:
    """And one with a password, which is not repeated."""
    with pytest.raises(ConfigError, match="redis_url") as caught:
        parse_config({"engines": NOBODY, "redis_url": url})
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize(
    ("changed", "word"),
    [
        ({"redis_password_env": "TURNCACHE_NO_SUCH_VARIABLE"}, "redis_password_env"),
        ({"redis_url": "redis://h?no_such_option=1"}, "redis_url"),
    ],
)
async def test_a_connection_that_cannot_be_made_is_refused_at_start(
    changed: dict[str, str], word: str
) -> None:
    """Not when the first exchange fails."""
    with pytest.raises(ConfigError, match=word):
        async with bench(engines=NOBODY, **{"redis_url": "redis://h", **changed}):
            pass


async def test_without_the_package_the_router_says_which(monkeypatch: pytest.MonkeyPatch) -> None:
    """Redis is an extra."""
    monkeypatch.setitem(sys.modules, "redis.asyncio", None)
    with pytest.raises(ConfigError, match=r"turncache\[redis\]"):
        async with bench(engines=NOBODY, redis_url="redis://h"):
            pass
