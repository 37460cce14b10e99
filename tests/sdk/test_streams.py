"""Streams stay upstream's, and tell when the first token came and how they ended."""

from __future__ import annotations

import asyncio
import gc
import itertools
from typing import Any

import openai
import pytest

import turncache
from tests.sdk.support import HELLO, HTTPX, TOOLS, Recorder, result, user
from turncache.attempt import STREAMS
from turncache.streams import watched
from turncache.testing import FakeServer, Reply


def stream(client: turncache.OpenAI, **more: Any) -> Any:
    """Start a streamed chat completion."""
    return client.chat.completions.create(model="m", messages=HELLO, stream=True, **more)


def test_a_stream_is_upstreams(client: turncache.OpenAI, server: FakeServer) -> None:
    """Its class is a subclass of upstream's with the same name, and so is its interface."""
    chunks: Any
    with turncache.session(), stream(client) as chunks:
        assert isinstance(chunks, openai.Stream)
        assert type(chunks).__name__ == "Stream"
        assert chunks.response.headers["turncache"] == "v=1"
        assert next(chunks).choices[0].delta.role == "assistant"
        assert [chunk.choices[0].delta.content for chunk in chunks] == ["fine", None]


def test_the_class_is_made_once() -> None:
    """A class of streams is subclassed once, not for every call."""
    kind: Any = openai.Stream[int]
    assert watched(kind) is watched(openai.Stream[int])
    assert watched(openai.AsyncStream[int]) is not watched(kind)

    class Mine(openai.Stream[int]):
        """A caller's own stream class."""

    assert issubclass(watched(Mine), Mine)
    assert watched(dict) is dict


def test_a_complete_stream_is_recorded(client: turncache.OpenAI, server: FakeServer) -> None:
    """Boundary, tokens and times of a stream are in its session."""
    server.script(Reply(text=None, reasoning="hm", tools=[("search", "{}")]))
    with turncache.session() as session:
        chunks = stream(client, tools=TOOLS, stream_options={"include_usage": True})
        assert len(session.calls) == 0
        list(chunks)
    call = session.calls[0]
    assert (call.boundary, call.error) == ("tool", None)
    assert call.ttft_s is not None
    assert 0 < call.ttft_s <= call.seconds
    assert call.prompt == turncache.outcome(chunks).prompt  # type: ignore[union-attr]


def test_usage_is_read_without_our_server() -> None:
    """A plain server's usage fills prompt and local; what it does not say is unknown."""
    text = (
        'data: {"id":"a","object":"chat.completion.chunk","created":1,"model":"m","choices":'
        '[{"index":0,"delta":{"content":"x"},"finish_reason":"stop"}]}\n\n'
        'data: {"id":"a","object":"chat.completion.chunk","created":1,"model":"m","choices":'
        '[],"usage":{"prompt_tokens":9,"completion_tokens":1,"total_tokens":10,'
        '"prompt_tokens_details":{"cached_tokens":4}}}\n\ndata: [DONE]\n\n'
    )
    headers = {"content-type": "text/event-stream"}
    recorder = Recorder(lambda _: HTTPX.Response(200, text=text, headers=headers))
    with (
        recorder.client(turncache.OpenAI, base_url="http://127.0.0.1:9/v1") as client,
        turncache.session() as session,
    ):
        list(stream(client))
    [call] = session.calls
    assert (call.prompt, call.local, call.computed) == (9, 4, 5)
    assert (call.returned, call.lost, call.reason) == (None, None, None)


@pytest.mark.parametrize("cut_after", [0, 1, 2])
def test_a_broken_stream_is_an_error(
    client: turncache.OpenAI, server: FakeServer, cut_after: int
) -> None:
    """A connection that breaks raises what upstream raises, and is no boundary."""
    stock = openai.OpenAI(base_url=server.url, api_key="-", http_client=client._client)
    server.script(Reply(cut_after=cut_after), Reply(cut_after=cut_after))
    # Upstream 2 lets the HTTP library's error through, upstream 3 has its own.
    broken = (openai.APIConnectionError, HTTPX.RemoteProtocolError)
    with pytest.raises(broken) as expected:
        list(stream(stock))  # type: ignore[arg-type]
    with turncache.session() as session, pytest.raises(type(expected.value)):
        list(stream(client))
    [call] = session.calls
    assert (call.error, call.boundary) == (type(expected.value).__name__, None)


def test_an_abandoned_stream_is_recorded_once(client: turncache.OpenAI, server: FakeServer) -> None:
    """Left in its block, closed, or dropped: the call has ended, without a boundary."""
    with turncache.session() as session:
        with stream(client) as chunks:
            next(chunks)
        chunks.close()
        dropped = stream(client)
        next(dropped)
        del dropped
        gc.collect()
        unread = stream(client)
        unread.close()
    assert [(call.error, call.boundary) for call in session.calls] == [("abandoned", None)] * 3


def test_a_stream_without_finish_reason_is_incomplete(
    client: turncache.OpenAI, server: FakeServer
) -> None:
    """A stream that just ends is no answer."""
    recorder = Recorder(
        lambda _: HTTPX.Response(
            200, text="data: [DONE]\n\n", headers={"content-type": "text/event-stream"}
        )
    )
    with (
        recorder.client(turncache.OpenAI, base_url="http://127.0.0.1:9/v1") as other,
        turncache.session() as session,
    ):
        assert list(stream(other)) == []
    assert session.calls[0].error == "incomplete"


def test_odd_chunks_reach_the_caller() -> None:
    """Chunks that have not the shape of their type are passed on as they are."""
    text = 'data: {"choices": [{"delta": null}]}\n\ndata: {"choices": 3}\n\ndata: []\n\n'
    recorder = Recorder(
        lambda _: HTTPX.Response(200, text=text, headers={"content-type": "text/event-stream"})
    )
    counts = []
    for kind in (openai.OpenAI, turncache.OpenAI):
        with (
            recorder.client(kind, base_url="http://127.0.0.1:9/v1") as client,
            turncache.session(),
        ):
            counts.append(len(list(stream(client))))
    assert counts == [3, 3]


def test_streams_leave_nothing_behind(client: turncache.OpenAI, server: FakeServer) -> None:
    """Once a stream is gone, so is what was kept for it."""
    gc.collect()
    before = len(STREAMS)
    for _ in range(3):
        list(stream(client))
    gc.collect()
    assert len(STREAMS) == before


def test_async_streams(server: FakeServer) -> None:
    """Async streams tell the same: complete, left, and cancelled."""
    server.script(Reply(), Reply(), Reply(text="a " * 50))

    async def main() -> turncache.Session:
        async with (
            turncache.AsyncOpenAI(base_url=server.url, api_key="-") as client,
            turncache.session() as session,
        ):
            create: Any = client.chat.completions.create
            chunks = await create(model="m", messages=[user()], stream=True)
            assert isinstance(chunks, openai.AsyncStream)
            assert len([chunk async for chunk in chunks]) == 3
            async with await create(model="m", messages=[user()], stream=True) as left:
                await anext(left)

            reading = asyncio.Event()

            async def read() -> None:
                async for _ in await create(model="m", messages=[user()], stream=True):
                    reading.set()
                    await asyncio.Event().wait()

            task = asyncio.create_task(read())
            await reading.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            del task
            gc.collect()
            await asyncio.sleep(0)
        return session

    session = asyncio.run(main())
    gc.collect()
    first, *rest = session.calls
    assert (first.boundary, first.error) == ("user", None)
    assert {call.error for call in rest} <= {"abandoned", "CancelledError"}
    assert len(rest) == 2


def test_tool_durations_are_measured(client: turncache.OpenAI, server: FakeServer) -> None:
    """From the answer with tool calls to the request with their results, by the clock."""
    from turncache.family import binding_of

    times = itertools.count(0, 10)
    binding_of(client).family.clock = lambda: float(next(times))
    server.script(Reply(tools=[("search", "{}")]))
    with turncache.session():
        answer = client.chat.completions.create(model="m", messages=[user()], tools=TOOLS)
        assert answer.choices[0].message.tool_calls
        call_id = answer.choices[0].message.tool_calls[0].id
        messages: Any = [user(), answer.choices[0].message, result(call_id)]
        for _ in range(2):
            client.chat.completions.create(model="m", messages=messages, tools=TOOLS)
    first, second, again = (request.headers.get("turncache-tools") for request in server.requests)
    assert first is None
    assert second == again
    name, _, seconds = (second or "").rpartition(", ")[2].partition("=")
    assert (name, float(seconds) % 10) == ("search", 0.0)
