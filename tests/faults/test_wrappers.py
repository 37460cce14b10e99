"""What wrappers around the OpenAI client broke for their users: ours does not."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import gc
import json
import pickle
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

import turncache
from tests.sdk.support import HELLO, HTTPX, Recorder, printed_by, said, session_ids
from turncache.testing import FakeServer

BASE_URL = "http://127.0.0.1:9/v1"


def ask(client: openai.OpenAI) -> Any:
    """Make a chat completion."""
    return client.chat.completions.create(model="m", messages=HELLO)


def test_copies_lose_settings(server: FakeServer) -> None:
    """Copies of copies keep class, session, conversations, Azure's route and HTTP client."""
    with turncache.AzureOpenAI(
        azure_endpoint=server.azure_endpoint,
        azure_deployment="d",
        api_key="-",
        api_version="2024-10-01",
    ) as client:
        own = client.with_session("ticket")
        twice = own.with_options(timeout=3).copy(max_retries=0)
        assert type(twice) is turncache.AzureOpenAI
        assert twice._client is client._client
        ask(own)
        ask(twice)
        ask(client.with_options(timeout=3))
        ask(client)
    assert {request.path.partition("?")[0] for request in server.requests} == {
        "/openai/deployments/d/chat/completions"
    }
    first, second, followed, again = session_ids(server.requests)
    assert first == second == "ticket"
    assert followed == again != first


def test_async_streaming_response_not_recorded(server: FakeServer) -> None:
    """An answer that is parsed later, awaited, is in the session exactly once."""

    async def main() -> None:
        async with turncache.AsyncOpenAI(base_url=server.url, api_key="-") as client:
            api = client.chat.completions.with_streaming_response
            with turncache.session("ticket"):
                async with api.create(model="m", messages=HELLO) as response:
                    await response.parse()
                    await response.parse()
                async with api.create(model="m", messages=HELLO) as response:
                    await response.read()

    asyncio.run(main())
    parsed, unread = turncache.session("ticket").calls
    assert (parsed.boundary, parsed.error) == ("user", None)
    assert (unread.boundary, unread.error) == (None, None)


@pytest.mark.parametrize(
    "answer",
    [
        {"choices": None},
        {"choices": []},
        {"choices": [{"index": 0, "finish_reason": "stop"}]},
        {"choices": [{"index": 0, "finish_reason": "tool_calls", "message": None}]},
        {"choices": [{"index": 0, "finish_reason": "stop", "message": {"tool_calls": 3}}]},
        {"choices": "none", "usage": "none"},
    ],
)
def test_bookkeeping_replaces_the_answer(answer: Any) -> None:
    """Whatever a server sends, whole, streamed or awaited, the caller gets what the stock
    client gives, an error included.
    """
    headers = {"turncache": "v=1"}
    events = f"data: {json.dumps(answer)}\n\ndata: [DONE]\n\n"
    whole = Recorder(lambda _: HTTPX.Response(200, json=answer, headers=headers))
    streamed = Recorder(lambda _: HTTPX.Response(200, text=events, headers=headers))

    async def main(kind: type[openai.AsyncOpenAI]) -> Any:
        async with whole.client(kind, base_url=BASE_URL) as client, turncache.session():
            return await ask(client)

    results: list[list[Any]] = []
    for kind, awaited in (
        (openai.OpenAI, openai.AsyncOpenAI),
        (turncache.OpenAI, turncache.AsyncOpenAI),
    ):
        with turncache.session(), whole.client(kind, base_url=BASE_URL) as client:
            results.append([ask(client), asyncio.run(main(awaited))])
        with turncache.session(), streamed.client(kind, base_url=BASE_URL) as client:
            try:
                stream = client.chat.completions.create(model="m", messages=HELLO, stream=True)
                results[-1] += stream
            except Exception as error:  # noqa: BLE001 - whatever upstream makes of it
                results[-1].append(repr(error))
    assert results[0] == results[1]
    assert len(results[0]) == 3


def test_subclass_not_taken_for_a_client() -> None:
    """isinstance(), the class's name and its type are what libraries look at."""
    for name in ("OpenAI", "AsyncOpenAI", "AzureOpenAI", "AsyncAzureOpenAI"):
        own, stock = getattr(turncache, name), getattr(openai, name)
        assert issubclass(own, stock)
        assert own.__name__ == stock.__name__
    assert issubclass(turncache.AzureOpenAI, openai.OpenAI)
    assert not issubclass(turncache.AsyncOpenAI, openai.OpenAI)
    with Recorder().client(turncache.OpenAI) as client:
        assert isinstance(client, openai.OpenAI)
        assert type(client).__mro__.index(openai.OpenAI) < type(client).__mro__.index(object)
        assert type(ask(client)) is openai.types.chat.ChatCompletion


# Upstream's half-copied HTTP client complains when it is collected.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_client_copied_or_pickled(client: turncache.OpenAI, server: FakeServer) -> None:
    """A copy has conversations of its own; what upstream refuses, ours refuses alike."""
    twin = copy.copy(client)
    ask(client)
    ask(twin)
    first, second = session_ids(server.requests)
    assert first != second
    with openai.OpenAI(base_url=server.url, api_key="-") as stock:
        for way in (pickle.dumps, copy.deepcopy):
            texts = []
            for one in (stock, client):
                with pytest.raises(Exception, match=r".+") as caught:
                    way(one)  # type: ignore[operator]
                texts.append((type(caught.value), str(caught.value)))
                del caught
            assert texts[0] == texts[1]
    gc.collect()


def test_current_session_in_a_module_global(client: turncache.OpenAI, server: FakeServer) -> None:
    """Fifty threads and fifty tasks at once: each call has its own, and no exit clears another."""
    ready = threading.Barrier(50)
    seen: list[tuple[str, str | None]] = []

    def in_thread(name: str) -> None:
        with turncache.session(name):
            ready.wait(20)
            answer = ask(client)
            owner = turncache.session_of(answer)
            seen.append((name, None if owner is None else owner.id))

    recorder = Recorder()

    async def in_task(awaited: Any, name: str) -> None:
        async with turncache.session(name):
            await asyncio.sleep(0)
            answer = await ask(awaited)
            current, owner = turncache.current_session(), turncache.session_of(answer)
            assert current is owner
            seen.append((name, None if current is None else current.id))
        assert turncache.current_session() is None

    async def main() -> None:
        async with recorder.client(turncache.AsyncOpenAI, base_url=BASE_URL) as awaited:
            await asyncio.gather(*(in_task(awaited, f"task{at}") for at in range(50)))

    with ThreadPoolExecutor(50) as pool:
        list(pool.map(in_thread, [f"thread{at}" for at in range(50)]))
    asyncio.run(main())
    assert len(seen) == 100
    assert all(name == found for name, found in seen)
    assert sorted(filter(None, session_ids(server.requests))) == sorted(
        f"thread{at}" for at in range(50)
    )
    assert sorted(filter(None, session_ids(recorder.requests))) == sorted(
        f"task{at}" for at in range(50)
    )


def test_generator_closed_in_another_context(
    server: FakeServer, caplog: pytest.LogCaptureFixture
) -> None:
    """Left after one chunk, dropped, collected or cancelled: no noise, and closed once."""

    async def chunks(client: turncache.AsyncOpenAI) -> AsyncIterator[Any]:
        with turncache.session("ticket"):
            stream = await client.chat.completions.create(model="m", messages=HELLO, stream=True)
            async for chunk in stream:
                yield chunk

    async def one(client: turncache.AsyncOpenAI) -> None:
        async for _ in chunks(client):
            assert turncache.current_session() is None
            break

    async def main() -> None:
        async with turncache.AsyncOpenAI(base_url=server.url, api_key="-") as client:
            await one(client)
            generator = chunks(client)
            await anext(generator)
            await asyncio.create_task(generator.aclose())  # type: ignore[attr-defined]
            task = asyncio.create_task(one(client))
            await asyncio.sleep(0)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            gc.collect()

    asyncio.run(main())
    gc.collect()
    assert turncache.current_session() is None
    assert [record for record in caplog.records if record.levelname != "DEBUG"] == []
    errors = [call.error for call in turncache.session("ticket").calls]
    assert len(errors) >= 2
    assert set(errors) <= {"abandoned", "CancelledError"}


def test_worker_threads_without_context(client: turncache.OpenAI, server: FakeServer) -> None:
    """Work of a pool is followed by content or wrapped into the session: never another's id."""
    with turncache.session("other"):
        pass
    with turncache.session("ticket") as session, ThreadPoolExecutor(1) as pool:
        pool.submit(ask, client).result(20)
        pool.submit(session.wrap(ask), client).result(20)
        pool.submit(ask, client).result(20)
    plain, wrapped, plain_again = session_ids(server.requests)
    assert wrapped == "ticket"
    assert plain == plain_again
    assert str(plain).startswith("auto-")


def test_http_library_of_the_wrong_family() -> None:
    """Importing and using ours imports no HTTP library that the stock client does not."""
    code = (
        "import sys\n"
        "import openai\n"
        "openai.OpenAI(api_key='-'), openai.AsyncOpenAI(api_key='-')\n"
        "before = {name.split('.')[0] for name in sys.modules}\n"
        "import turncache\n"
        "for name in turncache.__all__: getattr(turncache, name)\n"
        "turncache.OpenAI(api_key='-'), turncache.AsyncOpenAI(api_key='-')\n"
        "after = {name.split('.')[0] for name in sys.modules}\n"
        "print(sorted(n for n in after - before if n.startswith('http')))\n"
    )
    assert printed_by(code) == "[]\n"
    # The matching family's own transport, and its own errors, on whatever version this is.
    recorder = Recorder(_refuse)
    with (
        recorder.client(turncache.OpenAI, base_url=BASE_URL, max_retries=0) as client,
        pytest.raises(openai.APIConnectionError),
    ):
        ask(client)


def _refuse(_: Any) -> Any:
    raise HTTPX.ConnectError("nobody there")


@pytest.fixture
def lost() -> Iterator[tuple[Recorder, list[int]]]:
    """Give a transport that takes the body and loses the connection, twice per call."""
    tries: list[int] = []

    def answer(request: Any) -> Any:
        tries.append(len(request.content))
        if len(tries) % 3:
            raise HTTPX.ReadError("gone")
        return HTTPX.Response(
            200,
            json={
                "id": "a",
                "object": "chat.completion",
                "created": 1,
                "model": "m",
                "choices": [
                    {
                        "index": 0,
                        "finish_reason": "stop",
                        "message": {"role": "assistant", "content": "x"},
                    }
                ],
            },
        )

    yield Recorder(answer), tries
    assert tries


def test_retry_counted_as_another_call(
    lost: tuple[Recorder, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call whose first tries were lost after its body arrived is one call: turn, call and
    cause of every try are equal, and the next call counts on from it.
    """
    recorder, tries = lost
    monkeypatch.setattr("time.sleep", lambda _: None)
    with (
        recorder.client(turncache.OpenAI, base_url=BASE_URL, max_retries=2) as client,
        turncache.session("ticket") as session,
    ):
        ask(client)
        more = [*HELLO, {"role": "assistant", "content": "x"}, *HELLO]
        client.chat.completions.create(model="m", messages=more)
    assert len(tries) == 6
    places = [said(request) for request in recorder.requests]
    assert places == [(1, 1, "user")] * 3 + [(2, 1, "user")] * 3
    assert [request.headers["x-stainless-retry-count"] for request in recorder.requests] == [
        *("0", "1", "2"),
        *("0", "1", "2"),
    ]
    assert len(session.calls) == 2
    assert all("x-request-id" not in request.headers for request in recorder.requests)
