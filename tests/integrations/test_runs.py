"""Runs as they happen: retries, interrupts, time travel, fan-out, subgraphs, cancellation."""

from __future__ import annotations

import asyncio
import contextlib
import operator
import sqlite3
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, TypedDict

import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import HumanInTheLoopMiddleware
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.checkpoint.sqlite import SqliteSaver
from langgraph.checkpoint.sqlite.aio import AsyncSqliteSaver
from langgraph.func import entrypoint, task
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.types import Command, RetryPolicy, Send, interrupt

import turncache
from tests.integrations.conftest import Run
from tests.integrations.support import (
    HELLO,
    at,
    child_ids,
    config,
    lookup,
    loop_graph,
    our_model,
    said,
    session_ids,
    stock_model,
    thread_id_of,
)
from turncache.langgraph import ChatOpenAI, TurncacheMiddleware, session_node, thread_session
from turncache.notices import NOTIFIER
from turncache.testing import FakeServer, Reply, forget_everything

LOOP = [(1, 1, "user"), (1, 2, "tool")]


def asking(model: Any) -> Callable[[Any], Any]:
    """Return a node that asks the model."""
    return lambda state: {"messages": [model.invoke(state["messages"])]}


def one_node(node: Any, checkpointer: Any = None, **more: Any) -> Any:
    """Return a graph of one node on messages."""
    return (
        StateGraph(MessagesState)
        .add_node("call", node, **more)
        .add_edge(START, "call")
        .compile(checkpointer=InMemorySaver() if checkpointer is None else checkpointer)
    )


def test_a_node_that_is_retried_makes_the_same_call(server: FakeServer) -> None:
    """A node under ``RetryPolicy`` that fails after its call repeats turn and call."""
    model = our_model(server).bind_tools([lookup])
    failures = iter([ConnectionError("after the call")])

    def node(state: Any) -> Any:
        answer = model.invoke(state["messages"])
        for failure in failures:
            raise failure
        return {"messages": [answer]}

    graph = loop_graph(node, retry_policy=RetryPolicy(initial_interval=0.01))
    graph.invoke(HELLO, config())
    assert session_ids(server.requests) == [thread_id_of()] * 3
    assert at(server) == [LOOP[0], LOOP[0], LOOP[1]]


def test_an_interrupted_node_makes_the_same_call_when_it_resumes(server: FakeServer) -> None:
    """A node that asks and then waits for a person sends its call again: the same one."""
    model = our_model(server)

    def node(state: Any) -> Any:
        answer = model.invoke(state["messages"])
        interrupt("well?")
        return {"messages": [answer]}

    graph = one_node(node)
    graph.invoke(HELLO, config())
    assert turncache.current_session() is None
    graph.invoke(Command(resume="yes"), config())
    assert session_ids(server.requests) == [thread_id_of()] * 2
    assert at(server) == [LOOP[0]] * 2
    assert thread_session("t1").calls[0].boundary == "user", "the wait was announced"
    assert thread_session("t1").advice == ()


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_an_interrupt_of_hours_is_announced(server: FakeServer, run: Run, mode: str) -> None:
    """A node that knows how long its person takes tells the server when it interrupts."""
    model = our_model(server)

    @session_node(person_s=600)
    def node(state: Any) -> Any:
        answer = model.invoke(state["messages"])
        interrupt("well?")
        return {"messages": [answer]}

    @session_node(person_s=600)
    async def anode(state: Any) -> Any:
        answer = await model.ainvoke(state["messages"])
        interrupt("well?")
        return {"messages": [answer]}

    if mode == "sync":
        graph = one_node(node)
        graph.invoke(HELLO, config())
        assert NOTIFIER.flush(5)
        graph.invoke(Command(resume="yes"), config())
    else:
        graph = one_node(anode)

        async def drive() -> None:
            await graph.ainvoke(HELLO, config())
            await asyncio.gather(*NOTIFIER._tasks)
            await graph.ainvoke(Command(resume="yes"), config())

        run(drive())
    call, notice, again = server.requests
    assert session_ids([call, notice, again]) == [thread_id_of()] * 3
    assert (notice.path, notice.body) == ("/v1/sessions", {"notice": "wait", "expect_s": 600})
    assert said(call) == said(again) == LOOP[0]


def test_a_tool_that_a_person_approves(server: FakeServer) -> None:
    """An approval between answer and tool is a part of the tool wait."""
    graph = create_agent(
        stock_model(server),
        [lookup],
        middleware=[
            HumanInTheLoopMiddleware(interrupt_on={"lookup": True}),
            TurncacheMiddleware(),
        ],
        checkpointer=InMemorySaver(),
    )
    graph.invoke(HELLO, config())
    graph.invoke(Command(resume={"decisions": [{"type": "approve"}]}), config())
    assert session_ids(server.requests) == [thread_id_of()] * 2
    assert at(server) == LOOP
    assert [call.boundary for call in thread_session("t1").calls] == ["tool", "user"]


def test_a_tool_that_interrupts(server: FakeServer) -> None:
    """A tool that waits for a person itself runs again; its calls are the same ones."""
    model = our_model(server)

    @tool
    def ask_person() -> str:
        """Ask."""
        model.invoke("draft a question")
        return str(interrupt("well?"))

    server.script(Reply(tools=[("ask_person", {})]))
    graph = create_agent(model, [ask_person], checkpointer=InMemorySaver())
    graph.invoke(HELLO, config())
    graph.invoke(Command(resume="yes"), config())
    first, draft, again, last = session_ids(server.requests)
    assert first == last == thread_id_of()
    assert draft == again, "a task keeps its id when it resumes"
    assert child_ids([draft], thread_id_of()) == {draft}
    assert at(server) == [LOOP[0], LOOP[0], LOOP[0], LOOP[1]]


def test_time_travel_stays_in_the_session(server: FakeServer) -> None:
    """A run from an old checkpoint, and one from an edited state, are calls of their turn."""
    graph = loop_graph(asking(our_model(server).bind_tools([lookup])))
    graph.invoke(HELLO, config())
    graph.invoke(HELLO, config())
    old = [s for s in graph.get_state_history(config()) if s.next == ("model",)][-1]
    server.requests.clear()
    graph.invoke(None, old.config)
    assert session_ids(server.requests) == [thread_id_of()] * 2
    assert at(server) == LOOP
    edited = graph.update_state(
        old.config, {"messages": [HumanMessage("other", id=old.values["messages"][0].id)]}
    )
    server.requests.clear()
    graph.invoke(None, edited)
    assert session_ids(server.requests) == [thread_id_of()] * 2
    assert at(server) == LOOP
    assert server.requests[0].body["messages"][0]["content"] == "other"


@pytest.mark.parametrize("edit", [False, True], ids=["time travel", "update_state"])
def test_a_fork_leaves_its_origin_as_it_was(server: FakeServer, edit: bool) -> None:
    """Fork and origin go on side by side: each its turns, what they share found, no advice."""
    graph = loop_graph(asking(our_model(server).bind_tools([lookup])))
    for text in ("a first question", "the second question"):
        graph.invoke({"messages": [HumanMessage(text)]}, config())
    history = list(graph.get_state_history(config()))
    origin = history[0].config
    # Before the second turn's first call: what was said until then is shared.
    point = next(state for state in history if state.next == ("model",) and state.metadata["step"])
    start = point.config
    if edit:
        last = point.values["messages"][-1]
        start = graph.update_state(start, {"messages": [HumanMessage("another one", id=last.id)]})
    server.requests.clear()
    graph.invoke(None, start)
    graph.invoke(
        {"messages": [HumanMessage("a third")]},
        {"configurable": {**origin["configurable"], "thread_id": "t1"}},
    )
    assert session_ids(server.requests) == [thread_id_of()] * len(server.requests)
    assert at(server)[-2:] == [(3, 1, "user"), (3, 2, "tool")]
    fork, third = thread_session("t1").calls[4], thread_session("t1").calls[-2]
    for call in (fork, third):
        assert call.local is not None
        assert call.local > 0
        assert call.lost == 0
    assert thread_session("t1").advice == ()


class Fan(TypedDict):
    messages: list[Any]
    answers: Annotated[list[str], operator.add]


@pytest.mark.parametrize("wrapped", [False, True], ids=["model", "session_node"])
def test_send_fans_out_into_children_that_share_a_prefix(server: FakeServer, wrapped: bool) -> None:
    """Branches are children of the thread's session, and find its prefix."""
    model = our_model(server)
    head = [HumanMessage("a long question about many things")]

    def branch(state: Any) -> Any:
        model.invoke([*state["messages"], HumanMessage(f"part {state['part']}")])
        return {"answers": ["done"]}

    def start(state: Any) -> Any:
        return {"messages": [*head, model.invoke(head)]}

    def fan_out(state: Any) -> list[Send]:
        return [Send("branch", {"messages": state["messages"], "part": part}) for part in range(3)]

    graph = (
        StateGraph(Fan)
        .add_node("start", start)
        .add_node("branch", session_node(branch) if wrapped else branch)
        .add_edge(START, "start")
        .add_conditional_edges("start", fan_out, ["branch"])
        .compile(checkpointer=InMemorySaver())
    )
    graph.invoke({"messages": [], "answers": []}, config())
    first, *branches = session_ids(server.requests)
    assert first == thread_id_of()
    assert len(child_ids(branches, thread_id_of())) == 3
    assert {r.headers.get("x-parent-session-id") for r in server.requests[1:]} == {first}
    for child in thread_session("t1").children:
        [call] = child.calls
        assert call.local is not None
        assert call.local > 5, "the parent's prefix is shared"


def test_subgraphs_are_children(server: FakeServer) -> None:
    """A subgraph as a node is a child session, per run, with the thread as its parent."""
    inner = one_node(asking(our_model(server)), checkpointer=False)
    outer = (
        StateGraph(MessagesState)
        .add_node("first", asking(our_model(server)))
        .add_node("sub", inner)
        .add_edge(START, "first")
        .add_edge("first", "sub")
        .compile(checkpointer=InMemorySaver())
    )
    outer.invoke(HELLO, config())
    outer.invoke(HELLO, config())
    ids = session_ids(server.requests)
    assert ids[0] == ids[2] == thread_id_of()
    assert len(child_ids(ids, thread_id_of())) == 2
    labels = [child.label for child in thread_session("t1").children]
    assert all(str(label).startswith("t1/sub:") for label in labels)


def test_a_subgraph_with_its_own_memory_keeps_its_session(server: FakeServer) -> None:
    """A subgraph compiled with ``checkpointer=True`` has one history, so one session."""
    inner = (
        StateGraph(MessagesState)
        .add_node("call", asking(our_model(server)))
        .add_edge(START, "call")
        .compile(checkpointer=True)
    )
    outer = (
        StateGraph(MessagesState)
        .add_node("sub", inner)
        .add_edge(START, "sub")
        .compile(checkpointer=InMemorySaver())
    )
    outer.invoke(HELLO, config())
    outer.invoke(HELLO, config())
    ids = session_ids(server.requests)
    assert len(set(ids)) == 1
    assert child_ids(ids, thread_id_of()) == set(ids)


@pytest.mark.parametrize("middleware", [False, True], ids=["model", "middleware"])
def test_agents_as_tools_are_children(server: FakeServer, middleware: bool) -> None:
    """A sub-agent called in a tool has its own session, each time anew, whoever tags it."""
    make = stock_model if middleware else our_model
    more: dict[str, Any] = {"middleware": [TurncacheMiddleware()]} if middleware else {}
    sub = create_agent(make(server), [lookup], **more)

    @tool
    def research(q: str = "") -> str:
        """Ask the researcher twice."""
        first = sub.invoke({"messages": [HumanMessage(f"one {q}")]})
        second = sub.invoke({"messages": [HumanMessage(f"two {q}")]})
        return str(first["messages"][-1].content) + str(second["messages"][-1].content)

    server.script(Reply(tools=[("research", {})]))
    create_agent(make(server), [research], checkpointer=InMemorySaver(), **more).invoke(
        HELLO, config()
    )
    ids = session_ids(server.requests)
    assert ids[0] == ids[-1] == thread_id_of()
    one, also_one, two, also_two = ids[1:-1]
    assert one == also_one != two == also_two
    assert child_ids([one, two], thread_id_of()) == {one, two}
    assert at(server) == [LOOP[0], *LOOP, *LOOP, LOOP[1]]


def test_ids_are_the_same_with_and_without_wrappers(server: FakeServer) -> None:
    """A session id depends on the place in the graph, not on who found it."""
    model = our_model(server)
    seen: list[list[str]] = []
    for wrap in (lambda node: node, session_node):
        sub = one_node(wrap(asking(model)), checkpointer=False)

        def outer(state: Any, sub: Any = sub) -> Any:
            sub.invoke(state)
            sub.invoke(state)
            return {"messages": []}

        graph = one_node(wrap(outer))
        graph.invoke(HELLO, {**config(), "run_id": uuid.UUID(int=1)})
        seen.append([str(child.label).partition(":")[0] for child in thread_session("t1").children])
        ids = session_ids(server.requests)[-2:]
        assert len(child_ids(ids, thread_id_of())) == 2
        assert str(ids[1]).startswith(f"{ids[0]}/"), "the second is counted below the first's task"
    assert set(seen[0]) == set(seen[1]) == {"t1/call"}


def test_the_functional_api(server: FakeServer) -> None:
    """Tasks of an entrypoint are parts of it: one session over its turns."""
    model = our_model(server)

    @task
    def ask(messages: list[Any]) -> Any:
        return model.invoke(messages)

    @entrypoint(checkpointer=InMemorySaver())
    def flow(text: str, *, previous: list[Any] | None = None) -> Any:
        messages = [*(previous or []), HumanMessage(text)]
        messages.append(ask(messages).result())
        return entrypoint.final(value="done", save=messages)

    flow.invoke("one", config())
    flow.invoke("two", config())
    assert session_ids(server.requests) == [thread_id_of()] * 2
    assert at(server) == [(1, 1, "user"), (2, 1, "user")]


def test_two_graphs_on_one_thread_are_told_apart_by_name(server: FakeServer) -> None:
    """Graphs on one thread share a session, with right turns; a name gives each its own."""
    one, two = (loop_graph(asking(our_model(server).bind_tools([lookup]))) for _ in range(2))
    for graph in (one, two, one, two):
        graph.invoke(HELLO, config())
    assert session_ids(server.requests) == [thread_id_of()] * 8
    second = [(2, 1, "user"), (2, 2, "tool")]
    assert at(server) == [*LOOP, *LOOP, *second, *second]
    assert thread_session("t1").advice == ()
    server.requests.clear()
    planner = two.with_config(configurable={"turncache_graph": "planner"})
    planner.invoke(HELLO, config())
    assert session_ids(server.requests) == [thread_id_of("t1", "planner")] * 2
    assert thread_id_of("t1", "planner") != thread_id_of()
    assert thread_session("t1", graph="planner").label == "planner: t1"


def test_a_child_graph_with_its_own_thread(server: FakeServer) -> None:
    """A graph that a node runs on another thread is in that thread's session."""
    own = one_node(asking(our_model(server)))

    @session_node
    def node(state: Any) -> Any:
        own.invoke(HELLO, config("t2"))
        return {"messages": []}

    one_node(node).invoke(HELLO, config("t1"))
    assert session_ids(server.requests) == [thread_id_of("t2")]
    assert "x-parent-session-id" not in server.requests[0].headers


def test_long_and_personal_thread_ids(server: FakeServer) -> None:
    """E-mail addresses, other alphabets and very long names are hashed, everything else equal."""
    graph = one_node(asking(our_model(server)))
    for thread in ("ann@example.com", "日本語 スレッド", "x" * 5000, uuid.UUID(int=7)):
        graph.invoke(HELLO, {"configurable": {"thread_id": thread}})
    for request in server.requests:
        assert request.headers["x-session-id"].startswith("h-")
        assert "example" not in str(request.headers)
    assert thread_session("ann@example.com").label == "ann@example.com"


def test_a_cancelled_run_leaves_nothing(server: FakeServer, run: Run) -> None:
    """A run that is cancelled in a tool leaves no scope, and the thread goes on right."""
    model = our_model(server)
    entered = asyncio.Event()

    @tool
    async def hang() -> str:
        """Never return."""
        entered.set()
        await asyncio.Event().wait()
        return "never"

    server.script(Reply(tools=[("hang", {})]))
    graph = create_agent(
        model, [hang, lookup], middleware=[TurncacheMiddleware()], checkpointer=InMemorySaver()
    )

    async def drive() -> None:
        running = asyncio.create_task(graph.ainvoke(HELLO, config()))
        await entered.wait()
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running
        assert turncache.current_session() is None
        state = await graph.aget_state(config())
        [call] = state.values["messages"][-1].tool_calls
        # What people do with such a thread: a result that says so, and the next message.
        await graph.aupdate_state(
            config(),
            {"messages": [ToolMessage("cancelled", tool_call_id=call["id"])]},
            as_node="tools",
        )
        server.script(Reply())
        await graph.ainvoke(HELLO, config())

    run(drive())
    assert session_ids(server.requests) == [thread_id_of()] * 2
    assert at(server)[-1] == (1, 2, "tool")
    assert all(not scope.open for scope in thread_session("t1")._scopes)
    assert not thread_session("t1").ledger._waiting


def test_a_call_that_is_cancelled_is_recorded(server: FakeServer, run: Run) -> None:
    """A run that is cancelled while the model answers leaves a record with the error."""
    model = our_model(server)
    entered = asyncio.Event()

    async def node(state: Any) -> Any:
        async for _ in model.astream(state["messages"]):
            entered.set()
            await asyncio.Event().wait()
        return {}

    async def drive() -> None:
        running = asyncio.create_task(one_node(node).ainvoke(HELLO, config()))
        await entered.wait()
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running

    run(drive())
    [call] = thread_session("t1").calls
    assert call.error is not None
    assert call.boundary is None
    assert turncache.current_session() is None


@contextlib.contextmanager
def sqlite_saver(path: Path) -> Iterator[SqliteSaver]:
    """Open a saver on a file."""
    with contextlib.closing(sqlite3.connect(path, check_same_thread=False)) as connection:
        yield SqliteSaver(connection)


def test_checkpointers_get_plain_data_only(server: FakeServer, tmp_path: Path) -> None:
    """A checkpoint in SQLite holds nothing of ours, and another process goes on from it."""
    model = our_model(server).bind_tools([lookup])
    for turn in (1, 2):
        with sqlite_saver(tmp_path / "db.sqlite") as saver:
            graph = loop_graph(session_node(asking(model)), checkpointer=saver)
            graph.invoke(HELLO, config())
            assert at(server)[-2:] == [(turn, 1, "user"), (turn, 2, "tool")]
        # As after a restart: nothing is known but what the checkpoint holds.
        forget_everything()
    assert session_ids(server.requests) == [thread_id_of()] * 4
    content = (tmp_path / "db.sqlite").read_bytes()
    assert b"hello" in content
    assert b"turncache" not in content.lower()
    assert thread_id_of().encode() not in content


def test_an_async_checkpointer(server: FakeServer, run: Run, tmp_path: Path) -> None:
    """The async SQLite saver with an agent and the middleware holds plain data as well."""

    async def drive() -> None:
        async with AsyncSqliteSaver.from_conn_string(str(tmp_path / "db.sqlite")) as saver:
            graph = create_agent(
                stock_model(server),
                [lookup],
                middleware=[TurncacheMiddleware()],
                checkpointer=saver,
            )
            await graph.ainvoke(HELLO, config())

    run(drive())
    assert session_ids(server.requests) == [thread_id_of()] * 2
    assert b"turncache" not in (tmp_path / "db.sqlite").read_bytes().lower()


def test_a_pool_inside_a_node_follows_the_content(server: FakeServer) -> None:
    """A plain thread sees no graph; with ``session.wrap`` its calls are in the session."""
    model: ChatOpenAI = our_model(server)

    @session_node
    def node(state: Any) -> Any:
        session = turncache.current_session()
        assert session is not None
        for ask in (lambda: model.invoke("a"), session.wrap(lambda: model.invoke("b"))):
            worker = threading.Thread(target=ask)
            worker.start()
            worker.join()
        return {"messages": [AIMessage("done")]}

    one_node(node).invoke(HELLO, config())
    alone, wrapped = session_ids(server.requests)
    assert str(alone).startswith("auto-")
    assert wrapped == thread_id_of()
