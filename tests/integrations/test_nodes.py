"""``session_node``: nodes that call our client or any other, in their graph's session."""

from __future__ import annotations

import functools
import json
import operator
import urllib.request
from typing import Annotated, Any, TypedDict

import pytest
from langchain_core.runnables import RunnableConfig, RunnableLambda
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, StateGraph
from langgraph.runtime import Runtime
from langgraph.types import Command, Send

import turncache
from tests.integrations.conftest import Run
from tests.integrations.support import child_ids, config, session_ids, thread_id_of
from turncache.errors import UsageError
from turncache.langgraph import graph_session, session_node, thread_session
from turncache.testing import FakeServer

MESSAGES: Any = [{"role": "user", "content": "hello"}]


class State(TypedDict):
    seen: Annotated[list[str], operator.add]


@pytest.fixture
def client(server: FakeServer) -> turncache.OpenAI:
    """Give our raw client."""
    return turncache.OpenAI(base_url=server.url, api_key="-")


def graph(node: Any, name: str | None = None) -> Any:
    """Return a graph of one node."""
    builder = StateGraph(State)
    builder.add_node(name, node) if name else builder.add_node(node)
    name = name or next(iter(builder.nodes))
    return builder.add_edge(START, name).compile(checkpointer=InMemorySaver())


def ask(client: turncache.OpenAI) -> dict[str, list[str]]:
    """Make a call; return an update of the state."""
    client.chat.completions.create(model="m", messages=MESSAGES)
    return {"seen": ["called"]}


def test_a_decorated_node(server: FakeServer, client: turncache.OpenAI) -> None:
    """A decorated function keeps its name, and its calls are in the thread's session."""

    @session_node
    def research(state: State) -> dict[str, list[str]]:
        """Research."""
        assert turncache.current_session() is thread_session("t1")
        return ask(client)

    built = graph(research)
    assert "research" in built.nodes
    assert research.__doc__ == "Research."
    built.invoke({"seen": []}, config())
    assert session_ids(server.requests) == [thread_id_of()]
    assert turncache.current_session() is None


def test_an_async_node(server: FakeServer, run: Run) -> None:
    """A coroutine function is awaited in the session."""

    @session_node()
    async def research(state: State) -> dict[str, list[str]]:
        async with turncache.AsyncOpenAI(base_url=server.url, api_key="-") as client:
            await client.chat.completions.create(model="m", messages=MESSAGES)
        return {"seen": ["called"]}

    run(graph(research).ainvoke({"seen": []}, config()))
    assert session_ids(server.requests) == [thread_id_of()]


def test_what_langgraph_injects_arrives(server: FakeServer, client: turncache.OpenAI) -> None:
    """Config, runtime and a command come through the wrapper unchanged."""

    @session_node
    def research(state: State, config: RunnableConfig, runtime: Runtime[None]) -> Command[Any]:
        assert config["configurable"]["thread_id"] == "t1"
        assert runtime.execution_info is not None
        ask(client)
        return Command(update={"seen": ["by command"]})

    result = graph(research).invoke({"seen": []}, config())
    assert result["seen"] == ["by command"]
    assert session_ids(server.requests) == [thread_id_of()]


def test_callable_objects_methods_and_partials(
    server: FakeServer, client: turncache.OpenAI, run: Run
) -> None:
    """Class-based nodes, sync and async, bound methods and partials are wrapped alike."""

    class Node:
        def __call__(self, state: State, config: RunnableConfig) -> dict[str, list[str]]:
            assert config["configurable"]["thread_id"] == "t1"
            return ask(client)

        def method(self, state: State) -> dict[str, list[str]]:
            return ask(client)

    class AsyncNode:
        async def __call__(self, state: State) -> dict[str, list[str]]:
            return ask(client)

    def with_argument(client: turncache.OpenAI, state: State) -> dict[str, list[str]]:
        return ask(client)

    wrapped = [
        session_node(Node()),
        session_node(Node().method),
        session_node(functools.partial(with_argument, client)),
    ]
    for node, name in zip(wrapped, ["Node", "method", "with_argument"], strict=True):
        assert node.__name__ == name
        graph(node, "n").invoke({"seen": []}, config())
    run(graph(session_node(AsyncNode())).ainvoke({"seen": []}, config()))
    assert session_ids(server.requests) == [thread_id_of()] * 4


def test_another_http_client(server: FakeServer) -> None:
    """Inside the node the session's headers are there for any client."""

    @session_node
    def research(state: State) -> dict[str, list[str]]:
        session = turncache.current_session()
        assert session is not None
        request = urllib.request.Request(
            f"{server.url}/chat/completions",
            data=json.dumps({"model": "m", "messages": MESSAGES}).encode(),
            headers={
                "Content-Type": "application/json",
                **session.headers(messages=MESSAGES),
            },
        )
        urllib.request.urlopen(request).close()
        return {"seen": []}

    graph(research).invoke({"seen": []}, config())
    assert session_ids(server.requests) == [thread_id_of()]
    assert "cause=user" in server.requests[0].headers["turncache"]


def test_branches_are_children(server: FakeServer, client: turncache.OpenAI) -> None:
    """What ``Send`` starts side by side are children of the thread's session."""

    @session_node
    def worker(state: Any) -> dict[str, list[str]]:
        return ask(client)

    def fan_out(state: State) -> list[Send]:
        return [Send("worker", {"number": number}) for number in range(3)]

    built = (
        StateGraph(State)
        .add_node("worker", worker)
        .add_conditional_edges(START, fan_out, ["worker"])
        .compile(checkpointer=InMemorySaver())
    )
    built.invoke({"seen": []}, config())
    ids = session_ids(server.requests)
    assert len(set(ids)) == 3
    assert child_ids(ids, thread_id_of()) == set(ids)
    parents = {request.headers["x-parent-session-id"] for request in server.requests}
    assert parents == {thread_id_of()}
    assert {child.id for child in thread_session("t1").children} == set(ids)


@pytest.mark.parametrize(("scope", "num_sessions"), [("thread", 1), ("node", 2), ("task", 2)])
def test_nodes_side_by_side(
    server: FakeServer, client: turncache.OpenAI, scope: Any, num_sessions: int
) -> None:
    """Nodes that run in parallel share the thread's session, or get a child each by choice."""
    builder = StateGraph(State)
    for name in ("left", "right"):
        builder.add_node(name, session_node(lambda state: ask(client), scope=scope))
        builder.add_edge(START, name)
    builder.compile(checkpointer=InMemorySaver()).invoke({"seen": []}, config())
    assert len(set(session_ids(server.requests))) == num_sessions


def test_a_session_of_ones_own(server: FakeServer, client: turncache.OpenAI) -> None:
    """An id, a session, or a function of the state replaces the graph's session."""
    chosen: list[Any] = ["by-id", turncache.session("by-object"), lambda state: state["seen"][0]]
    for session in chosen:
        node = session_node(lambda state: ask(client), session=session)
        graph(node, "n").invoke({"seen": ["by-state"]}, config())
    assert session_ids(server.requests) == ["by-id", "by-object", "by-state"]


def test_blocks_the_inner_one_wins(server: FakeServer, client: turncache.OpenAI) -> None:
    """A block inside the node beats the graph, and a block around the graph its thread."""

    @session_node
    def research(state: State) -> dict[str, list[str]]:
        ask(client)
        with turncache.session("inner"):
            assert graph_session() is turncache.session("inner")
            return ask(client)

    built = graph(research)
    built.invoke({"seen": []}, config())
    with turncache.session("outer"):
        built.invoke({"seen": []}, config())
    assert session_ids(server.requests) == [thread_id_of(), "inner", "outer", "inner"]


def test_without_a_thread_a_node_runs_as_it_is(
    server: FakeServer, client: turncache.OpenAI
) -> None:
    """Without a thread there is no session to be in: our client follows the content."""

    @session_node
    def research(state: State) -> dict[str, list[str]]:
        assert turncache.current_session() is None
        return ask(client)

    StateGraph(State).add_node("n", research).add_edge(START, "n").compile().invoke({"seen": []})
    assert str(session_ids(server.requests)[0]).startswith("auto-")


def test_what_cannot_be_wrapped_is_refused() -> None:
    """A Runnable, a generator function and a value say what to do instead."""

    def yields(state: State) -> Any:
        yield {}

    with pytest.raises(UsageError, match=r"needs no wrapper: use turncache\.langgraph"):
        session_node(RunnableLambda(lambda state: state))
    with pytest.raises(UsageError, match=r"yields.*with graph_session"):
        session_node(yields)
    with pytest.raises(UsageError, match="expected a function or a callable object"):
        session_node("node")  # type: ignore[type-var]
