"""Retries where the stock client has none: before a stream's first chunk, between routers."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from typing import Any

import openai
import pytest

import turncache
from tests.sdk.support import HELLO, said, session_ids
from turncache import retrying
from turncache.testing import Failure, FakeServer, Reply

CUT_AT_ONCE = Reply(cut_after=0)


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tries follow each other at once."""
    monkeypatch.setattr("turncache.retrying.LONGEST_WAIT_S", 0.0)


@pytest.fixture
def second() -> Iterator[FakeServer]:
    """Give another router."""
    with FakeServer() as server:
        yield server


def streamed(client: openai.OpenAI) -> Any:
    """Start a stream."""
    return client.chat.completions.create(model="m", messages=HELLO, stream=True)


def ask(client: openai.OpenAI) -> Any:
    """Make a chat completion."""
    return client.chat.completions.create(model="m", messages=HELLO)


def test_a_stream_that_dies_before_its_first_chunk_is_opened_again(
    client: turncache.OpenAI, server: FakeServer
) -> None:
    """The second try says the same turn, call and session, and its chunks are all there."""
    server.script(CUT_AT_ONCE, Reply(text="one two"))
    with (
        turncache.session("ticket") as session,
        turncache.open_stream(lambda: streamed(client)) as stream,
    ):
        text = "".join(c.choices[0].delta.content or "" for c in stream)
    assert text == "onetwo"
    assert session_ids(server.requests) == ["ticket", "ticket"]
    assert said(server.requests[0]) == said(server.requests[1]) == (1, 1, "user")
    assert [call.error is None for call in session.calls] == [False, True]
    assert turncache.outcome(stream) is not None


def test_after_the_first_chunk_errors_pass_through(
    client: turncache.OpenAI, server: FakeServer
) -> None:
    """What was generated once is not asked for twice."""
    server.script(Reply(text="one two three", cut_after=2))
    stream = turncache.open_stream(lambda: streamed(client))
    with pytest.raises(Exception, match=r".+") as caught:
        list(stream)
    assert not isinstance(caught.value, turncache.TurncacheError)
    assert len(server.requests) == 1


def test_it_gives_up(client: turncache.OpenAI, server: FakeServer) -> None:
    """After the last try upstream's own error is raised, not a wrapper of it."""
    server.script(*[CUT_AT_ONCE] * 3)
    with pytest.raises(Exception, match=r".+") as caught:
        turncache.open_stream(lambda: streamed(client), attempts=3)
    assert retrying._broke(caught.value)
    assert len(server.requests) == 3


def test_an_error_that_the_server_states_is_not_retried(
    client: turncache.OpenAI, server: FakeServer
) -> None:
    """A refused request stays refused; upstream's own retries have been made."""
    server.script(Failure(status=400))
    with pytest.raises(openai.BadRequestError):
        turncache.open_stream(lambda: streamed(client))
    assert len(server.requests) == 1


def test_an_empty_stream_is_empty(client: turncache.OpenAI) -> None:
    """A stream that ends without a chunk is no failure."""

    class Empty:
        response = None

        def __iter__(self) -> Iterator[Any]:
            return iter(())

    assert list(turncache.open_stream(Empty)) == []


def test_async_streams_are_opened_again(server: FakeServer) -> None:
    """The async twin does the same."""
    server.script(CUT_AT_ONCE, Reply(text="one two"))

    async def main() -> list[Any]:
        async with turncache.AsyncOpenAI(base_url=server.url, api_key="-") as client:
            stream = await turncache.aopen_stream(
                lambda: client.chat.completions.create(model="m", messages=HELLO, stream=True)
            )
            async with stream:
                return [chunk async for chunk in stream]

    chunks = asyncio.run(main())
    assert [chunk.choices[0].delta.content for chunk in chunks[1:3]] == ["one", "two"]
    assert len(server.requests) == 2


def test_calls_go_to_the_next_router_and_stay(
    client: turncache.OpenAI, server: FakeServer, second: FakeServer
) -> None:
    """A router that fails is left after one try, and the one that answered is kept."""
    server.script(Failure(status=503))
    calls = turncache.Failover(client, [server.url, second.url])
    with turncache.session("ticket"):
        calls(ask)
        calls(ask)
    assert session_ids(server.requests) == ["ticket"]
    assert session_ids(second.requests) == ["ticket", "ticket"]
    assert said(server.requests[0]) == said(second.requests[0])
    assert str(calls.client.base_url).startswith(second.url)


def test_a_router_that_is_down_is_left(client: turncache.OpenAI, second: FakeServer) -> None:
    """No connection is a reason to go on too."""
    with FakeServer() as gone:
        url = gone.url
    calls = turncache.Failover(client, [url, second.url])
    calls(ask)
    assert len(second.requests) == 1


def test_the_callers_errors_pass_at_once(
    client: turncache.OpenAI, server: FakeServer, second: FakeServer
) -> None:
    """A request that is wrong is wrong everywhere."""
    server.script(Failure(status=422))
    with pytest.raises(openai.UnprocessableEntityError):
        turncache.Failover(client, [server.url, second.url])(ask)
    assert not second.requests


def test_every_router_down_raises_upstreams_error(
    client: turncache.OpenAI, server: FakeServer, second: FakeServer
) -> None:
    """Each is tried twice; then the last error is the caller's."""
    server.script(*[Failure(status=503)] * 2)
    second.script(*[Failure(status=503)] * 2)
    with pytest.raises(openai.InternalServerError):
        turncache.Failover(client, [server.url, second.url])(ask)
    assert (len(server.requests), len(second.requests)) == (2, 2)


def test_async_calls_go_to_the_next_router(server: FakeServer, second: FakeServer) -> None:
    """acall() is for async clients."""
    server.script(Failure(status=503))

    async def main() -> None:
        async with turncache.AsyncOpenAI(base_url=server.url, api_key="-") as client:
            calls = turncache.Failover(client, [server.url, second.url])
            await calls.acall(lambda own: own.chat.completions.create(model="m", messages=HELLO))

    asyncio.run(main())
    assert (len(server.requests), len(second.requests)) == (1, 1)


@pytest.mark.parametrize("urls", ["http://localhost:8000/v1", []])
def test_routers_come_as_a_list(client: turncache.OpenAI, urls: Any) -> None:
    """One string would be read as a list of letters."""
    with pytest.raises(turncache.TurncacheError, match="at least one URL"):
        turncache.Failover(client, urls)


def test_without_tenacity_the_extra_is_named(
    client: turncache.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rest of the package works without it."""
    monkeypatch.setitem(sys.modules, "tenacity", None)
    with pytest.raises(turncache.TurncacheError, match=r"turncache\[retry\]"):
        turncache.open_stream(lambda: streamed(client))
