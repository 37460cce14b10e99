"""The directory in a real Redis: what is entered, found, forgotten, and what a broken one costs."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from typing import Any

import pytest
from redis import Redis

from tests.fakes.redis_server import RedisServer
from turncache.errors import ConfigError, EngineFault
from turncache_server.connector import redis_directory
from turncache_server.connector.redis_directory import MAX_HOLDERS, REST_S, RedisDirectory
from turncache_server.control.keys import derive_keys
from turncache_server.redis_link import open_redis

SESSION = "ticket-4711"
_prefixes = map("fleet-{}".format, itertools.count())


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    """One Redis for the tests of this file."""
    with RedisServer() as running:
        yield running


class Fleet:
    """Directories of several engines, with a clock of the test's."""

    def __init__(self, stack: ExitStack, url: str, timeout_s: float = 2.0) -> None:
        self._stack = stack
        self._url = url
        self._timeout_s = timeout_s
        self.prefix = next(_prefixes)
        self.now_s = 100.0

    def engine(self, name: str, **more: Any) -> RedisDirectory:
        """Make an engine's directory."""
        redis = open_redis(self._url, password=None, timeout_s=self._timeout_s, asynchronous=False)
        made = RedisDirectory(
            redis, name=name, prefix=self.prefix, clock=lambda: self.now_s, **more
        )
        self._stack.callback(made.close)
        return made


@pytest.fixture
def fleet(server: RedisServer) -> Iterator[Fleet]:
    """Engines with a prefix of their own."""
    with ExitStack() as stack:
        yield Fleet(stack, server.url)


def named(future: Future[Sequence[str]]) -> list[str]:
    """Wait for what a directory names."""
    return list(future.result(timeout=10))


def enter(directory: RedisDirectory, session: str = SESSION, retain_s: float = 60.0) -> None:
    """Enter an engine, and wait until it stands there."""
    directory.keeps(session, retain_s)
    deadline_s = time.monotonic() + 10
    while directory._redis.lrange(directory._place(session), 0, 0) != [directory._name]:
        assert time.monotonic() < deadline_s
        time.sleep(0.001)


def test_who_kept_a_session_last_is_named_first(fleet: Fleet) -> None:
    """At most so many, each once, the asker left out."""
    prefill = fleet.engine("prefill-0")
    assert named(prefill.find(SESSION)) == []
    decodes = [fleet.engine(f"decode-{i}") for i in range(4)]
    for decode in (*decodes, decodes[1]):
        enter(decode)
    assert named(prefill.find(SESSION)) == ["decode-1", "decode-3", "decode-2"]
    assert len(named(prefill.find(SESSION))) == MAX_HOLDERS
    assert named(decodes[3].find(SESSION)) == ["decode-1", "decode-2"]
    assert named(prefill.find("another")) == []


def test_a_short_retention_does_not_shorten_a_long_one(server: RedisServer, fleet: Fleet) -> None:
    """A side call of a session, elsewhere or here: who keeps it for an hour is still named."""
    long, short = fleet.engine("decode-0"), fleet.engine("decode-1")
    enter(long, retain_s=3600.0)
    enter(short, retain_s=5.0)
    enter(long, retain_s=5.0)
    assert long._redis.ttl(long._place(SESSION)) > 3000


def test_it_is_forgotten_when_the_kv_is(server: RedisServer, fleet: Fleet) -> None:
    """The entry lives as long as the retention; without one there is no entry."""
    decode = fleet.engine("decode-0")
    enter(decode, retain_s=7.2)
    decode.keeps("short", 0.0)
    with Redis.from_url(server.url, decode_responses=True) as redis:
        (key,) = redis.keys(f"{fleet.prefix}:*")
        assert 0 < redis.ttl(key) <= 8
        redis.delete(key)
    assert named(fleet.engine("prefill-0").find(SESSION)) == []


@pytest.mark.parametrize("secret", [None, b"0" * 32])
def test_no_session_leaves_the_engine(
    server: RedisServer, fleet: Fleet, secret: bytes | None
) -> None:
    """A hash does, keyed where the fleet has a secret: it cannot be tried without it."""
    key = b"" if secret is None else derive_keys(secret).names
    decode = fleet.engine("decode-0", key=key)
    enter(decode)
    with Redis.from_url(server.url, decode_responses=True) as redis:
        (found,) = redis.keys(f"{fleet.prefix}:*")
        assert SESSION not in found
        assert redis.lrange(found, 0, -1) == ["decode-0"]
    stranger = fleet.engine("prefill-0")
    assert named(stranger.find(SESSION)) == (["decode-0"] if secret is None else [])
    assert named(fleet.engine("prefill-0", key=key).find(SESSION)) == ["decode-0"]


def test_whatever_stands_there_no_more_than_names_comes_back(
    server: RedisServer, fleet: Fleet
) -> None:
    """Rubbish is a name that nobody has; another type is a failure, and both end."""
    prefill = fleet.engine("prefill-0")
    place = prefill._place(SESSION)
    with Redis.from_url(server.url) as redis:
        redis.rpush(place, b"\xff\xfe", "x" * 10_000, "decode-0", "decode-1")
        found = named(prefill.find(SESSION))
        assert len(found) == 2
        assert "decode-0" in found
        redis.delete(place)
        redis.set(place, "no list")
        with pytest.raises(EngineFault, match="WRONGTYPE"):
            named(prefill.find(SESSION))


@pytest.mark.parametrize("how", ["kill", "freeze"])
def test_one_that_does_not_answer_is_left_alone_for_a_while(how: str) -> None:
    """One question waits for it, the others are told at once; when it is back all is well."""
    with RedisServer() as own, ExitStack() as stack:
        fleet = Fleet(stack, own.url, timeout_s=0.1)
        prefill, decode = fleet.engine("prefill-0"), fleet.engine("decode-0")
        enter(decode)
        getattr(own, how)()
        with pytest.raises(EngineFault):
            named(prefill.find(SESSION))
        asked = prefill.counters()["directory_asked"]
        for _ in range(20):
            prefill.keeps(SESSION, 5.0)
            with pytest.raises(EngineFault, match="just failed"):
                named(prefill.find(SESSION))
        assert prefill.counters()["directory_asked"] == asked
        assert prefill.counters()["directory_failed"] >= 21
        own.start() if how == "kill" else own.thaw()
        fleet.now_s += REST_S
        assert named(prefill.find(SESSION)) == (["decode-0"] if how == "freeze" else [])


def test_questions_do_not_pile_up(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond a bound they are refused at once: nobody waits for them any more."""
    monkeypatch.setattr(redis_directory, "MAX_WAITING", 0)
    prefill = fleet.engine("prefill-0")
    with pytest.raises(EngineFault, match="too many"):
        named(prefill.find(SESSION))
    assert prefill.counters() == {"directory_asked": 0.0, "directory_failed": 1.0}


def test_after_the_end_nothing_is_asked(fleet: Fleet) -> None:
    """A call that arrives while an engine shuts down is computed."""
    prefill = fleet.engine("prefill-0")
    prefill.close()
    with pytest.raises(EngineFault, match="closed"):
        named(prefill.find(SESSION))


def test_without_the_package_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is an extra."""
    monkeypatch.setitem(sys.modules, "redis.backoff", None)
    with pytest.raises(ConfigError, match=r"needs the package redis: pip install X"):
        open_redis(
            "redis://r", password=None, timeout_s=1, asynchronous=False, install="pip install X"
        )
