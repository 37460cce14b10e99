"""instrument(): the same for clients that somebody else makes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import openai
import pytest

import turncache
from tests.sdk.support import HELLO, said, session_ids
from turncache.testing import FakeServer


@pytest.fixture
def stock(server: FakeServer, running_client: turncache.OpenAI) -> Iterator[openai.OpenAI]:
    """Give a stock client, and leave upstream's classes as they were."""
    before = (openai.OpenAI.request, openai.AsyncOpenAI.request)
    yield openai.OpenAI(base_url=server.url, api_key="-", http_client=running_client._client)
    turncache.uninstrument()
    assert (openai.OpenAI.request, openai.AsyncOpenAI.request) == before


def ask(client: Any) -> Any:
    """Make a chat completion."""
    return client.chat.completions.create(model="m", messages=HELLO)


def test_stock_clients_are_tagged_until_undone(stock: openai.OpenAI, server: FakeServer) -> None:
    """Between instrument() and uninstrument() a stock client says what ours says."""
    with turncache.session("ticket") as session:
        ask(stock)
        turncache.instrument()
        turncache.instrument()
        answer = ask(stock.with_options(timeout=3))
        turncache.uninstrument()
        turncache.uninstrument()
        ask(stock)
    assert session_ids(server.requests) == [None, "ticket", None]
    assert turncache.outcome(answer) is not None
    assert len(session.calls) == 1


def test_own_clients_are_not_tagged_twice(
    stock: openai.OpenAI, client: turncache.OpenAI, server: FakeServer
) -> None:
    """A call of our client is one call, instrumented or not."""
    turncache.instrument()
    with turncache.session() as session:
        ask(client)
    assert len(session.calls) == 1
    assert said(server.requests[0]) == (1, 1, "user")


def test_async_and_module_level_clients(stock: openai.OpenAI, server: FakeServer) -> None:
    """Async stock clients, and openai.chat itself, are included."""
    turncache.instrument()

    async def main() -> None:
        async with openai.AsyncOpenAI(base_url=server.url, api_key="-") as client:
            with turncache.session("async"):
                await ask(client)

    asyncio.run(main())
    openai.api_key, openai.base_url = "-", server.url + "/"
    openai.http_client = stock._client
    try:
        with turncache.session("module"):
            ask(openai)
    finally:
        openai.api_key = openai.base_url = openai.http_client = None
        openai._reset_client()
    assert session_ids(server.requests) == ["async", "module"]


def test_another_patch_is_left_alone(
    stock: openai.OpenAI, server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A library that patched on top of us keeps its patch, and ours passes calls on."""
    turncache.instrument()
    inner = openai.OpenAI.request

    def theirs(self: Any, *args: Any, **kwargs: Any) -> Any:
        return inner(self, *args, **kwargs)

    openai.OpenAI.request = theirs  # type: ignore[method-assign]
    try:
        turncache.uninstrument()
        assert openai.OpenAI.request is theirs
        with turncache.session("ticket"):
            ask(stock)
        assert session_ids(server.requests) == [None]
    finally:
        del openai.OpenAI.request
