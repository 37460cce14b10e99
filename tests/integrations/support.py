"""What the LangGraph tests share: models, tools, small graphs, and readers of requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import langchain_openai
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition

from tests.sdk.support import said, session_ids
from turncache.langgraph import ChatOpenAI, thread_session
from turncache.testing import FakeServer

__all__ = [
    "HELLO",
    "at",
    "causes",
    "child_ids",
    "config",
    "lookup",
    "loop_graph",
    "other_lookup",
    "our_model",
    "said",
    "session_ids",
    "stock_model",
    "thread_id_of",
]

HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}]}


@tool
def lookup(q: str = "") -> str:
    """Look something up."""
    return f"42 {q}"


@tool
def other_lookup(q: str = "") -> str:
    """Look something else up."""
    return f"43 {q}"


def our_model(server: FakeServer, **more: Any) -> ChatOpenAI:
    """Return our model on the server."""
    return ChatOpenAI(model="m", base_url=server.url, api_key="-", **more)


def stock_model(server: FakeServer, **more: Any) -> langchain_openai.ChatOpenAI:
    """Return the stock model on the server."""
    return langchain_openai.ChatOpenAI(model="m", base_url=server.url, api_key="-", **more)


def config(thread_id: str = "t1", **more: Any) -> Any:
    """Return a run's config."""
    return {"configurable": {"thread_id": thread_id, **more}}


def thread_id_of(thread_id: str = "t1", graph: str = "") -> str:
    """Return the session id of a thread."""
    return thread_session(thread_id, graph=graph).id


def loop_graph(
    node: Callable[..., Any], *, checkpointer: Any = None, tools: Any = (lookup,), **more: Any
) -> Any:
    """Return the graph that everybody writes: a model node and a tool node, in a loop."""
    return (
        StateGraph(MessagesState)
        .add_node("model", node, **more)
        .add_node("tools", ToolNode(list(tools)))
        .add_edge(START, "model")
        .add_conditional_edges("model", tools_condition)
        .add_edge("tools", "model")
        .compile(checkpointer=InMemorySaver() if checkpointer is None else checkpointer)
    )


def at(server: FakeServer) -> list[tuple[Any, Any, Any]]:
    """Return turn, call and cause of every request."""
    return [said(request) for request in server.requests]


def causes(server: FakeServer) -> list[Any]:
    """Return the cause of every request."""
    return [cause for _, _, cause in at(server)]


def child_ids(ids: Sequence[str | None], parent: str) -> set[str]:
    """Return the ids among ``ids`` that are below ``parent``."""
    return {name for name in ids if name is not None and name.startswith(f"{parent}/")}
