"""Faults that others have hit with LangGraph, one test per kind; numbers are of the reports."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.runnables import RunnableConfig
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition
from langgraph.types import Command, interrupt

import turncache
from tests.integrations.conftest import Run
from tests.integrations.support import (
    HELLO,
    at,
    child_ids,
    config,
    lookup,
    loop_graph,
    other_lookup,
    our_model,
    session_ids,
    stock_model,
    thread_id_of,
)
from turncache.langgraph import TurncacheMiddleware, session_node, thread_session
from turncache.testing import FakeServer, Reply, forget_everything

LOOP = [(1, 1, "user"), (1, 2, "tool")]


def test_93_config_is_not_visible_in_async_nodes(server: FakeServer, run: Run) -> None:
    """An async node with parallel tools has its session, with and without a config argument."""
    model = our_model(server).bind_tools([lookup, other_lookup])

    async def with_config(state: Any, config: RunnableConfig) -> Any:
        return {"messages": [await model.ainvoke(state["messages"], config)]}

    async def without(state: Any) -> Any:
        return {"messages": [await model.ainvoke(state["messages"])]}

    for node in (with_config, without):
        server.clear()
        server.script(Reply(tools=[("lookup", {}), ("other_lookup", {})]), Reply())
        run(loop_graph(node, tools=[lookup, other_lookup]).ainvoke(HELLO, config()))
        assert session_ids(server.requests) == [thread_id_of()] * 2
        assert at(server) == LOOP


def test_94_per_call_headers_are_ignored(server: FakeServer, run: Run) -> None:
    """Session and turn are on every way to call a model, whatever headers a call adds."""
    model = our_model(server)
    more: dict[str, Any] = {"extra_headers": {"X-Mine": "1"}}

    async def node(state: Any) -> Any:
        messages = state["messages"]
        model.invoke(messages, **more)
        await model.ainvoke(messages, **more)
        list(model.stream(messages, **more))
        _ = [chunk async for chunk in model.astream(messages, **more)]
        model.batch([messages], **more)
        _ = [event async for event in model.astream_events(messages, version="v2", **more)]
        return {"messages": [AIMessage("done")]}

    run(loop_graph(node).ainvoke(HELLO, config()))
    assert session_ids(server.requests) == [thread_id_of()] * 6
    assert at(server) == [LOOP[0]] * 6
    assert {request.headers["x-mine"] for request in server.requests} == {"1"}


def test_96_nested_graphs_lose_or_inherit_their_namespace(server: FakeServer) -> None:
    """Three levels: a child per level below the thread's; its own thread is its own session."""
    model = our_model(server)

    def ask(state: Any) -> Any:
        return {"messages": [model.invoke(state["messages"])]}

    def level(name: str, inner: Any = None, checkpointer: Any = None) -> Any:
        builder = StateGraph(MessagesState).add_node(name, ask).add_edge(START, name)
        if inner is not None:
            builder.add_node(f"{name}-sub", inner).add_edge(name, f"{name}-sub")
        return builder.compile(checkpointer=checkpointer)

    level("a", level("b", level("c")), InMemorySaver()).invoke(HELLO, config())
    a, b, c = session_ids(server.requests)
    assert a == thread_id_of()
    assert child_ids([b, c], str(a)) == {b, c}
    assert child_ids([c], str(b)) == {c}
    parents = [request.headers.get("x-parent-session-id") for request in server.requests]
    assert parents == [None, a, a]

    own = level("own", checkpointer=InMemorySaver())

    def calls_own(state: Any) -> Any:
        own.invoke(HELLO, config("t2"))
        return {"messages": []}

    loop_graph(calls_own).invoke(HELLO, config("t1"))
    assert session_ids(server.requests)[-1] == thread_id_of("t2")


def test_97_two_graphs_on_one_thread_mix(server: FakeServer) -> None:
    """Named graphs on a thread have their own sessions; a run repeated is the same calls."""
    model = our_model(server).bind_tools([lookup])

    def node(state: Any) -> Any:
        return {"messages": [model.invoke(state["messages"])]}

    names = ("writer", "critic")
    graphs = [loop_graph(node).with_config(configurable={"turncache_graph": n}) for n in names]
    for graph in graphs:
        graph.invoke(HELLO, config())
    assert session_ids(server.requests) == [
        thread_id_of("t1", name) for name in names for _ in range(2)
    ]
    assert at(server) == [*LOOP, *LOOP]
    again = loop_graph(node).with_config(configurable={"turncache_graph": "writer"})
    again.invoke(HELLO, config())
    assert at(server)[-2:] == LOOP, "the same message on a fresh state: the same turn and calls"
    assert thread_session("t1", graph="writer").advice == ()


def test_99_a_node_restarts_after_an_interrupt(server: FakeServer) -> None:
    """However often a node restarts, its call stays the same turn and call."""
    model = our_model(server)

    def node(state: Any) -> Any:
        answer = model.invoke(state["messages"])
        for question in ("one?", "two?", "three?"):
            interrupt(question)
        return {"messages": [answer]}

    graph = loop_graph(node)
    graph.invoke(HELLO, config())
    for _ in range(3):
        graph.invoke(Command(resume="yes"), config())
    assert session_ids(server.requests) == [thread_id_of()] * 4
    assert at(server) == [LOOP[0]] * 4
    calls = thread_session("t1").calls
    assert [call.boundary for call in calls] == ["user"] * 4, "each answer announced a wait"
    graph.invoke(HELLO, config())
    assert at(server)[-1] == (2, 1, "user"), "and no turn was counted for them"


def test_101_a_cancelled_tool_leaves_calls_without_results(server: FakeServer, run: Run) -> None:
    """After a cancelled tool a made-up result continues the session; nothing is left over."""
    entered = asyncio.Event()

    @tool
    async def hang() -> str:
        """Never return."""
        entered.set()
        await asyncio.Event().wait()
        return "never"

    server.script(Reply(tools=[("hang", {})]), Reply())
    graph = create_agent(
        stock_model(server),
        [hang],
        middleware=[TurncacheMiddleware()],
        checkpointer=InMemorySaver(),
    )

    async def drive() -> None:
        running = asyncio.create_task(graph.ainvoke(HELLO, config()))
        await entered.wait()
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running
        messages = (await graph.aget_state(config())).values["messages"]
        made_up = ToolMessage("cancelled", tool_call_id=messages[-1].tool_calls[0]["id"])
        # The thread is repaired elsewhere, as people do.
        await graph.ainvoke(
            {"messages": [*messages, made_up, HumanMessage("go on")]}, config("repaired")
        )

    run(drive())
    assert session_ids(server.requests) == [thread_id_of(), thread_id_of("repaired")]
    for name in ("t1", "repaired"):
        assert thread_session(name)._scopes == ()
    assert turncache.current_session() is None


def test_103_bookkeeping_is_reset_by_an_interrupt_or_restart(server: FakeServer) -> None:
    """A process that knows nothing says the same of a resumed run: it is in the messages."""
    model = our_model(server).bind_tools([lookup])
    saver = InMemorySaver()

    def call_model(state: Any) -> Any:
        return {"messages": [model.invoke(state["messages"])]}

    graph = (
        StateGraph(MessagesState)
        .add_node("model", call_model)
        .add_node("tools", ToolNode([lookup]))
        .add_edge(START, "model")
        .add_conditional_edges("model", tools_condition)
        .add_edge("tools", "model")
        .compile(checkpointer=saver, interrupt_before=["tools"])
    )
    graph.invoke(HELLO, config())
    forget_everything()
    graph.invoke(None, config())
    assert session_ids(server.requests) == [thread_id_of()] * 2
    assert at(server) == LOOP
    arguments = [
        call["function"]["arguments"]
        for message in server.requests[-1].body["messages"]
        for call in message.get("tool_calls") or ()
    ]
    assert arguments == ["{}"], "and nothing in the history is doubled"


def test_104_objects_in_config_or_state_break_a_checkpointer(server: FakeServer) -> None:
    """Checkpoints hold what they hold without us, and a strict serialiser takes them."""
    stored: list[Any] = []
    for ours in (False, True):
        saver = InMemorySaver(serde=JsonPlusSerializer(pickle_fallback=False))
        graph = create_agent(
            our_model(server) if ours else stock_model(server),
            [lookup],
            middleware=[TurncacheMiddleware()] if ours else [],
            checkpointer=saver,
        )
        graph.invoke(HELLO, config())
        stored.append(
            [
                (sorted(item.checkpoint["channel_values"]), sorted(item.metadata))
                for item in saver.list(config())
            ]
        )
    assert stored[0] == stored[1]
    assert "turncache" not in str(stored[1])


@pytest.mark.parametrize("asked", [True, False])
def test_105_a_base_url_disables_streamed_usage(server: FakeServer, asked: bool) -> None:
    """Usage is there when asked for, absent otherwise, and tokens stream either way."""
    model = our_model(server, stream_usage=asked)
    graph = create_agent(model, [], checkpointer=InMemorySaver())
    chunks = [chunk for chunk, _ in graph.stream(HELLO, config(), stream_mode="messages")]
    assert any(chunk.content for chunk in chunks)
    assert any(chunk.usage_metadata for chunk in chunks) is asked
    options = server.requests[0].body.get("stream_options") or {}
    assert options.get("include_usage", False) is asked


def test_106_sub_agents_share_the_parents_session(
    server: FakeServer, caplog: pytest.LogCaptureFixture
) -> None:
    """Sub-agents are children; calls that share one session anyway keep their own turns."""
    model = our_model(server)

    def talk(name: str, history: list[Any]) -> None:
        history += [HumanMessage(f"{name} {len(history)}")]
        history += [model.invoke([HumanMessage(f"I am {name}."), *history])]

    @session_node(session="shared")
    def node(state: Any) -> Any:
        histories: dict[str, list[Any]] = {name: [] for name in ("parent", "a", "b", "c")}
        for _ in range(3):
            for name, history in histories.items():
                talk(name, history)
        return {"messages": [AIMessage("done")]}

    with caplog.at_level(logging.WARNING, logger="turncache"):
        loop_graph(node).invoke(HELLO, config())
    assert session_ids(server.requests) == ["shared"] * 12
    turns: dict[str, list[Any]] = {}
    for request, (turn, _, _) in zip(server.requests, at(server), strict=True):
        turns.setdefault(request.body["messages"][0]["content"], []).append(turn)
    assert list(turns.values()) == [[1, 2, 3]] * 4
    assert caplog.messages == [], "four lineages, and none is taken for another's rewriting"
