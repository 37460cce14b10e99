"""Our client handed to LangChain: ChatOpenAI, agents, streams, structured output."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

import turncache
from tests.foreign.support import (
    TOOL_ROUND,
    check_in_session,
    check_nothing_of_ours,
    hosted,
    provider,
)
from tests.sdk.support import said
from turncache.testing import FakeServer, Reply


class Shape(BaseModel):
    """What structured output returns."""

    a: int


@tool
def search(q: str = "") -> str:
    """Search for something."""
    return "nothing"


def model(client: Any, async_client: Any, **more: Any) -> ChatOpenAI:
    """Return LangChain's model on our clients: all four places, or one way bypasses us."""
    return ChatOpenAI(
        model="m",
        client=client.chat.completions,
        root_client=client,
        async_client=async_client.chat.completions,
        root_async_client=async_client,
        **more,
    )


@pytest.fixture
def clients(server: FakeServer) -> tuple[turncache.OpenAI, turncache.AsyncOpenAI]:
    """Give a sync and an async client of the fake server."""
    return (
        turncache.OpenAI(base_url=server.url, api_key="-"),
        turncache.AsyncOpenAI(base_url=server.url, api_key="-"),
    )


def test_an_agent_runs_in_a_session(clients: Any, server: FakeServer) -> None:
    """Each call of the loop says its session, its place, and that a tool caused it."""
    agent = create_agent(model(*clients), tools=[search])
    with turncache.session("ticket") as session:
        answer = agent.invoke({"messages": [{"role": "user", "content": "hello"}]})
    assert answer["messages"][-1].content == "fine"
    check_in_session(server.requests, "ticket", 2)
    assert [said(request) for request in server.requests] == TOOL_ROUND
    assert [call.boundary for call in session.calls] == ["tool", "user"]
    assert session.advice == ()


def test_streams_and_usage(clients: Any, server: FakeServer) -> None:
    """Chunks come as they would, with the cached tokens where LangChain shows them."""
    chat = model(*clients, stream_usage=True)
    with turncache.session("ticket") as session:
        chat.invoke("hello")
        chunks = list(chat.stream("hello"))
    assert "".join(str(chunk.content) for chunk in chunks) == "fine"
    [usage] = [chunk.usage_metadata for chunk in chunks if chunk.usage_metadata]
    assert usage["input_token_details"]["cache_read"] > 0
    check_in_session(server.requests, "ticket", 2)
    assert session.calls[-1].ttft_s is not None


def test_async_client_silently_bypassed(clients: Any, server: FakeServer) -> None:
    """ainvoke, astream, structured output and agents come through our async client: none of
    them falls back to a client that LangChain makes itself.
    """

    async def main() -> None:
        chat = model(*clients)
        async with turncache.session("ticket"):
            await chat.ainvoke("hello")
            assert [chunk async for chunk in chat.astream("hello")]
            server.script(Reply(text='{"a": 1}'))
            structured = chat.with_structured_output(Shape, method="json_schema")
            assert await structured.ainvoke("hello") == Shape(a=1)
            agent = create_agent(chat, tools=[search])
            await agent.ainvoke({"messages": [{"role": "user", "content": "hello"}]})
        await clients[1].close()

    asyncio.run(main())
    check_in_session(server.requests, "ticket", 5)


def test_structured_output_and_responses(clients: Any, server: FakeServer) -> None:
    """parse() and the responses API are tagged too."""
    server.script(Reply(text='{"a": 1}'))
    with turncache.session("ticket"):
        structured = model(*clients).with_structured_output(Shape, method="json_schema")
        assert structured.invoke("hello") == Shape(a=1)
        model(*clients, use_responses_api=True).invoke("hello")
    check_in_session(server.requests, "ticket", 2)
    assert [request.path for request in server.requests] == [
        "/v1/chat/completions",
        "/v1/responses",
    ]


def test_without_a_session_the_conversation_is_followed(clients: Any, server: FakeServer) -> None:
    """An agent's loop is one automatic session."""
    agent = create_agent(model(*clients), tools=[search])
    agent.invoke({"messages": [{"role": "user", "content": "hello"}]})
    [owner] = clients[0].automatic_sessions
    check_in_session(server.requests, owner.id, 2)


def test_a_provider_gets_nothing_of_ours() -> None:
    """A hosted provider's requests carry no header or member of ours, in a session or not."""
    recorder = provider()
    chat = model(hosted(recorder), hosted(recorder, turncache.AsyncOpenAI))
    with turncache.session("ticket"):
        create_agent(chat, tools=[search]).invoke({"messages": [("user", "hello")]})
        list(chat.stream("hello"))
        asyncio.run(chat.ainvoke("hello"))
    assert len(recorder.requests) == 4
    check_nothing_of_ours(recorder)
