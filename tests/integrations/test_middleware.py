"""``TurncacheMiddleware`` in ``create_agent``, with stock models."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import ModelFallbackMiddleware, SummarizationMiddleware
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver

import turncache
from tests.integrations.conftest import Run
from tests.integrations.support import (
    HELLO,
    at,
    child_ids,
    config,
    lookup,
    other_lookup,
    our_model,
    said,
    session_ids,
    stock_model,
    thread_id_of,
)
from turncache.langgraph import TurncacheMiddleware, graph_session, thread_session
from turncache.notices import NOTIFIER
from turncache.protocol import parse_tools
from turncache.sessions import TOOL_DURATIONS
from turncache.testing import Failure, FakeServer, Reply

LOOP = [(1, 1, "user"), (1, 2, "tool")]


def agent(model: Any, tools: Any = (lookup,), **more: Any) -> Any:
    """Return an agent with the middleware and a checkpointer."""
    more.setdefault("middleware", [TurncacheMiddleware()])
    return create_agent(model, list(tools), checkpointer=InMemorySaver(), **more)


@pytest.mark.parametrize("make", [stock_model, our_model], ids=["stock", "ours"])
def test_an_agents_calls_are_in_its_threads_session(server: FakeServer, make: Any) -> None:
    """Two user turns with a tool each: one session, right turns, calls and causes."""
    graph = agent(make(server))
    graph.invoke(HELLO, config())
    graph.invoke(HELLO, config())
    assert session_ids(server.requests) == [thread_id_of()] * 4
    assert at(server) == [*LOOP, (2, 1, "user"), (2, 2, "tool")]
    assert [call.boundary for call in thread_session("t1").calls] == ["tool", "user"] * 2


@pytest.mark.parametrize("make", [stock_model, our_model], ids=["stock", "ours"])
def test_an_async_streamed_agent_is_tagged(server: FakeServer, run: Run, make: Any) -> None:
    """The async twin, streamed token by token, says the same."""
    graph = agent(make(server))

    async def drive() -> None:
        async for _ in graph.astream(HELLO, config(), stream_mode="messages"):
            pass

    run(drive())
    assert all(request.body.get("stream") for request in server.requests)
    assert session_ids(server.requests) == [thread_id_of()] * 2
    assert at(server) == LOOP


def test_many_threads_at_once_stay_apart(server: FakeServer, run: Run) -> None:
    """Runs of several threads in one loop keep their sessions."""
    graph = agent(stock_model(server))

    async def drive() -> None:
        await asyncio.gather(*(graph.ainvoke(HELLO, config(f"t{i}")) for i in range(5)))

    run(drive())
    for i in range(5):
        mine = [r for r in server.requests if r.headers["x-session-id"] == thread_id_of(f"t{i}")]
        assert [said(request) for request in mine] == LOOP


def test_tools_are_measured_and_parallel_tools_are_one_wait(server: FakeServer) -> None:
    """A wait is from the answer to the call with its results; it is the slowest tool's."""
    TOOL_DURATIONS.observe(["lookup"], 1e-6)
    server.script(Reply(tools=[("lookup", {"q": "a"}), ("other_lookup", {"q": "b"})]), Reply())
    graph = agent(stock_model(server), [lookup, other_lookup])
    graph.invoke(HELLO, config())
    graph.invoke(HELLO, config("t2"))
    first, _, last, _ = (parse_tools(r.headers["turncache-tools"]) for r in server.requests)
    assert set(first) == {"*", "lookup"}
    assert last["other_lookup"] > 0, "the unknown tool was the slower one"
    waits = {name: len(row.samples_s) for name, row in TOOL_DURATIONS._rows.items()}
    assert waits == {"lookup": 2, "other_lookup": 1}, "no wait was counted for both"


def test_a_tool_that_calls_a_model_has_a_child_session(server: FakeServer) -> None:
    """A raw client inside a tool is in the tool's child session, under ``graph_session()``."""
    client = turncache.OpenAI(base_url=server.url, api_key="-")

    @tool
    def summarise() -> str:
        """Ask a model."""
        session = graph_session()
        assert session is not None
        with session:
            result = client.chat.completions.create(
                model="m", messages=[{"role": "user", "content": "summarise"}]
            )
        return str(result.choices[0].message.content)

    agent(stock_model(server), [summarise]).invoke(HELLO, config())
    first, inner, last = session_ids(server.requests)
    assert first == last == thread_id_of()
    assert child_ids([inner], thread_id_of()) == {inner}
    assert server.requests[1].headers["x-parent-session-id"] == thread_id_of()


def test_the_last_place_sees_the_model_that_is_called(server: FakeServer) -> None:
    """A fallback that another middleware chooses is tagged when ours comes after it."""
    server.script(Failure(status=400), Reply())
    graph = agent(
        stock_model(server),
        [],
        middleware=[ModelFallbackMiddleware(stock_model(server)), TurncacheMiddleware()],
    )
    graph.invoke(HELLO, config())
    assert session_ids(server.requests) == [thread_id_of()] * 2


def test_calls_beside_the_conversation_stay_out(server: FakeServer) -> None:
    """A summary that a middleware makes with a stock model disturbs no session."""
    server.script(Reply(), Reply(text="short"), Reply())
    summarise = SummarizationMiddleware(
        model=stock_model(server), trigger=("messages", 3), keep=("messages", 1)
    )
    graph = agent(stock_model(server), [], middleware=[summarise, TurncacheMiddleware()])
    graph.invoke(HELLO, config())
    graph.invoke(HELLO, config())
    assert session_ids(server.requests) == [thread_id_of(), None, thread_id_of()]


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_end_tells_the_server_that_nothing_follows(server: FakeServer, run: Run, mode: str) -> None:
    """With ``end=True`` a notice after the run says that nothing follows in the session."""
    graph = agent(stock_model(server), middleware=[TurncacheMiddleware(end=True)])
    if mode == "sync":
        graph.invoke(HELLO, config())
    else:
        run(graph.ainvoke(HELLO, config()))
    assert NOTIFIER.flush(5)
    assert session_ids(server.requests) == [thread_id_of()] * 3
    notice = server.requests[-1]
    assert (notice.path, notice.body) == ("/v1/sessions", {"notice": "final"})
    assert len(thread_session("t1").calls) == 2, "a notice is no call"


def test_only_ending_adds_a_node(server: FakeServer) -> None:
    """The graph has the nodes that it has without us."""
    plain = agent(stock_model(server), middleware=[])
    ours = agent(stock_model(server))
    ending = agent(stock_model(server), middleware=[TurncacheMiddleware(end=True)])
    assert set(ours.nodes) == set(plain.nodes)
    assert set(ending.nodes) - set(plain.nodes) == {"TurncacheMiddleware.after_agent"}


def test_two_middlewares_of_ours_are_refused_by_langchain(server: FakeServer) -> None:
    """Both kinds bear one name, so that an agent cannot have two of them by accident."""
    with pytest.raises(AssertionError, match="duplicate"):
        agent(
            stock_model(server),
            middleware=[TurncacheMiddleware(), TurncacheMiddleware(end=True)],
        )
