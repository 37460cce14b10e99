"""The drop-in clients: every way to call carries the session, and nothing else changes."""

from __future__ import annotations

import asyncio
import copy
import itertools
from collections.abc import Awaitable, Callable
from typing import Any

import openai
import pydantic
import pytest

import turncache
from tests.sdk.support import (
    COMPLETION,
    HELLO,
    HTTPX,
    RESPONSE_TOOLS,
    TOOLS,
    Recorder,
    Unreadable,
    said,
    session_ids,
)
from turncache.testing import Failure, FakeServer, Reply


class Shape(pydantic.BaseModel):
    a: int


def _stream_helper(client: openai.OpenAI) -> Any:
    with client.chat.completions.stream(model="m", messages=HELLO) as stream:
        return stream.get_final_completion()


def _responses_helper(client: openai.OpenAI) -> Any:
    with client.responses.stream(model="m", input="hello") as stream:
        return stream.get_final_response()


def _streaming_response(client: openai.OpenAI) -> Any:
    api = client.chat.completions.with_streaming_response
    with api.create(model="m", messages=HELLO) as response:
        return response.parse()


def _streamed_streaming_response(client: openai.OpenAI) -> Any:
    api = client.chat.completions.with_streaming_response
    with api.create(model="m", messages=HELLO, stream=True) as response:
        return list(response.parse())


def _raw_stream(client: openai.OpenAI) -> Any:
    raw = client.chat.completions.with_raw_response.create(model="m", messages=HELLO, stream=True)
    return list(raw.parse())


SYNC: dict[str, Callable[[openai.OpenAI], Any]] = {
    "create": lambda c: c.chat.completions.create(model="m", messages=HELLO),
    "create with tools": lambda c: c.chat.completions.create(
        model="m", messages=HELLO, tools=TOOLS
    ),
    "create from a generator": lambda c: c.chat.completions.create(
        model="m", messages=(message for message in HELLO)
    ),
    "stream": lambda c: list(c.chat.completions.create(model="m", messages=HELLO, stream=True)),
    "stream helper": _stream_helper,
    "parse": lambda c: c.chat.completions.parse(model="m", messages=HELLO, response_format=Shape),
    "raw": lambda c: c.chat.completions.with_raw_response.create(model="m", messages=HELLO).parse(),
    "raw client": lambda c: c.with_raw_response.chat.completions.create(
        model="m", messages=HELLO
    ).parse(),
    "raw stream": _raw_stream,
    "streaming response": _streaming_response,
    "streamed streaming response": _streamed_streaming_response,
    "responses": lambda c: c.responses.create(model="m", input="hello"),
    "responses with tools": lambda c: c.responses.create(
        model="m", input="hello", tools=RESPONSE_TOOLS
    ),
    "responses stream": lambda c: list(c.responses.create(model="m", input="hello", stream=True)),
    "responses helper": _responses_helper,
    "completions": lambda c: c.completions.create(model="m", prompt="hello"),
    "completions stream": lambda c: list(
        c.completions.create(model="m", prompt="hello", stream=True)
    ),
    "post": lambda c: c.post(
        "/chat/completions", body={"model": "m", "messages": HELLO}, cast_to=object
    ),
}


async def _astream(stream: Any) -> list[Any]:
    return [chunk async for chunk in await stream]


async def _astream_helper(client: openai.AsyncOpenAI) -> Any:
    async with client.chat.completions.stream(model="m", messages=HELLO) as stream:
        return await stream.get_final_completion()


async def _aresponses_helper(client: openai.AsyncOpenAI) -> Any:
    async with client.responses.stream(model="m", input="hello") as stream:
        return await stream.get_final_response()


async def _araw(client: openai.AsyncOpenAI) -> Any:
    api = client.chat.completions.with_raw_response
    return (await api.create(model="m", messages=HELLO)).parse()


async def _araw_stream(client: openai.AsyncOpenAI) -> Any:
    api = client.chat.completions.with_raw_response
    raw = await api.create(model="m", messages=HELLO, stream=True)
    return [chunk async for chunk in raw.parse()]


async def _astreaming_response(client: openai.AsyncOpenAI) -> Any:
    api = client.chat.completions.with_streaming_response
    async with api.create(model="m", messages=HELLO) as response:
        return await response.parse()


ASYNC: dict[str, Callable[[openai.AsyncOpenAI], Awaitable[Any]]] = {
    "create": lambda c: c.chat.completions.create(model="m", messages=HELLO),
    "stream": lambda c: _astream(c.chat.completions.create(model="m", messages=HELLO, stream=True)),
    "stream helper": _astream_helper,
    "parse": lambda c: c.chat.completions.parse(model="m", messages=HELLO, response_format=Shape),
    "raw": _araw,
    "raw stream": _araw_stream,
    "streaming response": _astreaming_response,
    "responses": lambda c: c.responses.create(model="m", input="hello"),
    "responses stream": lambda c: _astream(
        c.responses.create(model="m", input="hello", stream=True)
    ),
    "responses helper": _aresponses_helper,
    "completions": lambda c: c.completions.create(model="m", prompt="hello"),
    "completions stream": lambda c: _astream(
        c.completions.create(model="m", prompt="hello", stream=True)
    ),
}


@pytest.mark.parametrize("way", SYNC)
def test_every_way_to_call_carries_the_session(
    way: str, client: turncache.OpenAI, server: FakeServer
) -> None:
    """However a model is called, the request says which session it belongs to."""
    if way == "parse":
        server.script(Reply(text='{"a": 1}'))
    with turncache.session("ticket") as session:
        assert SYNC[way](client) is not None
    assert session_ids(server.requests) == ["ticket"]
    assert session.calls[-1].error is None


@pytest.mark.parametrize("way", SYNC)
def test_results_are_what_the_stock_client_returns(
    way: str, client: turncache.OpenAI, server: FakeServer
) -> None:
    """Type and content of a result do not depend on which of the clients made the call."""
    stock = openai.OpenAI(base_url=server.url, api_key="-", http_client=client._client)
    results = []
    for caller in (stock, client):
        server.clear()
        server._numbers = itertools.count(7)  # answers carry their number
        if way == "parse":
            server.script(Reply(text='{"a": 1}'))
        with turncache.session():
            results.append(SYNC[way](caller))
    assert type(results[0]) is type(results[1])
    assert results[0] == results[1]


def test_every_async_way_to_call_carries_the_session(server: FakeServer) -> None:
    """The async clients say the same as the sync ones, in all their ways."""

    async def main() -> None:
        async with turncache.AsyncOpenAI(base_url=server.url, api_key="-") as client:
            for way, call in ASYNC.items():
                server.clear()
                if way == "parse":
                    server.script(Reply(text='{"a": 1}'))
                async with turncache.session("ticket") as session:
                    assert await call(client) is not None, way
                assert session_ids(server.requests) == ["ticket"], way
                assert session.calls[-1].error is None, way
                assert session.calls[-1].prompt is not None, way

    asyncio.run(main())


def test_other_requests_are_left_alone(client: turncache.OpenAI, server: FakeServer) -> None:
    """Embeddings and model lists carry nothing of ours."""
    with turncache.session("ticket"):
        client.embeddings.create(model="m", input="text")
        list(client.models.list())
    for request in server.requests:
        assert not any(name.startswith(("turncache", "x-session")) for name in request.headers)


def test_user_agent_is_upstreams(client: turncache.OpenAI, server: FakeServer) -> None:
    """Servers that look at User-Agent see the stock client."""
    client.chat.completions.create(model="m", messages=HELLO)
    expected = f"OpenAI/Python {openai.__version__}"
    assert server.requests[0].headers["user-agent"] == expected


def test_copies_keep_class_session_and_conversations(
    client: turncache.OpenAI, server: FakeServer
) -> None:
    """with_options() and copy() give clients of our class, in the same session."""
    bound = client.with_session("ticket")
    for copied in (
        bound.with_options(timeout=3),
        bound.copy(max_retries=0).with_options(timeout=3),
        bound.with_options(default_headers={"x-more": "1"}),
    ):
        assert type(copied) is turncache.OpenAI
        copied.chat.completions.create(model="m", messages=HELLO)
    client.with_options(timeout=3).chat.completions.create(model="m", messages=HELLO)
    client.with_options(timeout=4).chat.completions.create(model="m", messages=HELLO)
    *named, first, second = session_ids(server.requests)
    assert named == ["ticket"] * 3
    assert first == second
    assert first is not None
    assert first.startswith("auto-")


def test_azure_clients_keep_their_routes(server: FakeServer) -> None:
    """An Azure client sends to its deployment, also after copies, and says the session."""
    with turncache.AzureOpenAI(
        azure_endpoint=server.azure_endpoint, api_key="-", api_version="2024-10-01"
    ) as client:
        assert isinstance(client, openai.AzureOpenAI)
        bound = client.with_session("ticket").with_options(timeout=5).copy(max_retries=1)
        assert type(bound) is turncache.AzureOpenAI
        bound.chat.completions.create(model="m", messages=HELLO)
    [request] = server.requests
    assert request.path.startswith("/openai/deployments/m/chat/completions?api-version=")
    assert session_ids([request]) == ["ticket"]


def test_async_azure_clients_say_the_session(server: FakeServer) -> None:
    """The async Azure client does what the sync one does."""

    async def main() -> None:
        async with turncache.AsyncAzureOpenAI(
            azure_endpoint=server.azure_endpoint, api_key="-", api_version="2024-10-01"
        ) as client:
            bound = client.with_session("ticket").with_options(timeout=5)
            await bound.chat.completions.create(model="m", messages=HELLO)

    asyncio.run(main())
    assert session_ids(server.requests) == ["ticket"]


def test_retries_are_upstreams_and_say_the_same(
    client: turncache.OpenAI, server: FakeServer
) -> None:
    """Upstream's three tries of one call carry one turn, call and session."""
    server.script(Failure(), Failure())
    with turncache.session("ticket") as session:
        client.chat.completions.create(model="m", messages=HELLO)
    assert [said(request) for request in server.requests] == [(1, 1, "user")] * 3
    counts = [request.headers["x-stainless-retry-count"] for request in server.requests]
    assert counts == ["0", "1", "2"]
    assert len(session.calls) == 1


def test_errors_are_upstreams_and_recorded(client: turncache.OpenAI, server: FakeServer) -> None:
    """An API error is the stock client's, and the session's table names it."""
    server.script(Failure(status=400, message="no such model"))
    with turncache.session() as session, pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="m", messages=HELLO)
    assert "no such model" in str(caught.value)
    [call] = session.calls
    assert (call.error, call.boundary) == ("BadRequestError", None)


def test_connection_errors_are_upstreams(client: turncache.OpenAI, server: FakeServer) -> None:
    """A connection that breaks before an answer raises upstream's error."""
    server.script(Failure(status=0))
    with turncache.session() as session, pytest.raises(openai.APIConnectionError):
        client.with_options(max_retries=0).chat.completions.create(model="m", messages=HELLO)
    assert session.calls[0].error == "APIConnectionError"


def test_explicit_headers_win(client: turncache.OpenAI, server: FakeServer) -> None:
    """What a call says itself is sent as it is, whatever the case of its name."""
    call = client.with_session("bound").chat.completions.create
    call(model="m", messages=HELLO, extra_headers={"x-session-id": "own"})
    call(model="m", messages=HELLO, extra_headers={"turncache": "v=1, cause=compaction"})
    call(model="m", messages=HELLO, extra_headers={"X-Session-ID": openai.Omit()})
    own, stated, omitted = server.requests
    assert session_ids(server.requests) == ["own", "bound", None]
    assert said(own) == (1, 1, "user")
    assert stated.headers["turncache"] == "v=1, cause=compaction"
    assert "turncache" not in omitted.headers
    assert turncache.session("bound").calls[0].cause == "compaction"


def test_default_headers_win(server: FakeServer) -> None:
    """A session id among the constructor's default headers is the client's session."""
    with turncache.OpenAI(
        base_url=server.url, api_key="-", default_headers={"X-Session-Id": "fixed"}
    ) as client:
        client.chat.completions.create(model="m", messages=HELLO)
    assert session_ids(server.requests) == ["fixed"]
    assert said(server.requests[0]) == (1, 1, "user")


def test_raw_default_header_is_respected(server: FakeServer) -> None:
    """A client made to return raw responses returns them."""
    with turncache.OpenAI(
        base_url=server.url,
        api_key="-",
        default_headers={"X-Stainless-Raw-Response": "true"},
    ) as client:
        raw: Any = client.chat.completions.create(model="m", messages=HELLO)
    assert raw.parse().choices[0].message.content == "fine"


def test_an_id_that_cannot_be_ours_is_left_to_the_server(
    client: turncache.OpenAI, server: FakeServer
) -> None:
    """A session id with spaces is sent as the caller wrote it, and nothing is added."""
    client.chat.completions.create(
        model="m", messages=HELLO, extra_headers={"X-Session-ID": "two words"}
    )
    [request] = server.requests
    assert session_ids([request]) == ["two words"]
    assert "turncache" not in request.headers


@pytest.mark.parametrize(
    "answer",
    [
        {"id": None, "choices": None},
        {"choices": []},
        {"choices": [{"index": 0}]},
        {"choices": [{"message": {"tool_calls": [{"id": 3}]}, "finish_reason": 7}]},
        {"usage": {"prompt_tokens": "many"}},
        [],
    ],
    ids=repr,
)
def test_odd_answers_reach_the_caller(answer: Any) -> None:
    """Whatever a server sends, the caller gets what the stock client makes of it."""
    headers = {"Turncache": "v=1", "Turncache-Outcome": "prompt=nonsense"}
    recorder = Recorder(lambda _: _response(answer, headers))
    results = []
    for kind in (openai.OpenAI, turncache.OpenAI):
        with (
            recorder.client(kind, base_url="http://127.0.0.1:9/v1") as caller,
            turncache.session(),
        ):
            results.append(caller.chat.completions.create(model="m", messages=HELLO))
    assert results[0] == results[1]


def _response(answer: Any, headers: dict[str, str]) -> Any:
    return HTTPX.Response(200, json=answer, headers=headers)


@pytest.mark.odd_request
def test_odd_requests_pass_through(
    client: turncache.OpenAI, server: FakeServer, caplog: pytest.LogCaptureFixture
) -> None:
    """A body that we cannot read is sent as it is, without tags, and that is said once."""
    body = {"model": "m", "messages": [Unreadable(role="user", content="hello")]}
    with turncache.session("ticket"):
        for _ in range(2):
            client.post("/chat/completions", body=body, cast_to=object)
    assert session_ids(server.requests) == [None, None]
    [record] = caplog.records
    assert "could not prepare a call (TypeError)" in record.getMessage()


def test_text_answers_reach_the_caller() -> None:
    """An answer that is no JSON comes back as text, as the stock client has it."""
    recorder = Recorder(lambda _: HTTPX.Response(200, text="<html>"))
    with recorder.client(turncache.OpenAI, base_url="http://127.0.0.1:9/v1") as client:
        assert client.chat.completions.create(model="m", messages=HELLO) == "<html>"


def test_clients_copy_as_upstreams_do(client: turncache.OpenAI, server: FakeServer) -> None:
    """A client copied by the copy module works, with conversations of its own."""
    twin = copy.copy(client)
    client.chat.completions.create(model="m", messages=HELLO)
    twin.chat.completions.create(model="m", messages=HELLO)
    first, second = session_ids(server.requests)
    assert first != second


def test_options_of_the_caller_are_not_changed(
    client: turncache.OpenAI, server: FakeServer
) -> None:
    """Headers, bodies and messages that the caller passed stay as they were."""
    headers = {"x-mine": "1"}
    body = {"top_k": 3}
    messages = [{"role": "user", "content": "hello"}]
    client.with_profile("vllm").with_session("ticket").chat.completions.create(
        model="m",
        messages=messages,  # type: ignore[arg-type]
        extra_headers=headers,
        extra_body=body,
    )
    assert headers == {"x-mine": "1"}
    assert body == {"top_k": 3}
    assert messages == [{"role": "user", "content": "hello"}]


def test_legacy_http_clients_still_work() -> None:
    """Upstream 3 takes a client of the older httpx, and so do ours."""
    httpx = pytest.importorskip("httpx")
    seen = []

    def answer(request: Any) -> Any:
        seen.append(request.headers["x-session-id"])
        return httpx.Response(200, json=COMPLETION)

    with httpx.Client(transport=httpx.MockTransport(answer)) as http_client:
        client = turncache.OpenAI(
            base_url="http://127.0.0.1:9/v1", api_key="-", http_client=http_client
        )
        client.with_session("ticket").chat.completions.create(model="m", messages=HELLO)
    assert seen == ["ticket"]
