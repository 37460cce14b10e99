"""Streaming: a graph with us gives the events of the graph without us, and usage when asked."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest
from langchain.agents import create_agent
from langgraph.checkpoint.memory import InMemorySaver

from tests.integrations.conftest import Run
from tests.integrations.support import (
    HELLO,
    config,
    lookup,
    loop_graph,
    our_model,
    stock_model,
)
from turncache.langgraph import TurncacheMiddleware, session_node
from turncache.testing import FakeServer

MODES = ["values", "updates", "messages", "custom", "debug", "tasks", "checkpoints"]

Make = Callable[[FakeServer], Any]


def plain_agent(server: FakeServer) -> Any:
    """Return an agent without us."""
    return create_agent(stock_model(server), [lookup], checkpointer=InMemorySaver())


def agent_with_middleware(server: FakeServer) -> Any:
    """Return the agent with our middleware."""
    return create_agent(
        stock_model(server),
        [lookup],
        middleware=[TurncacheMiddleware()],
        checkpointer=InMemorySaver(),
    )


def agent_with_model(server: FakeServer) -> Any:
    """Return the agent with our model."""
    return create_agent(our_model(server), [lookup], checkpointer=InMemorySaver())


def plain_graph(server: FakeServer) -> Any:
    """Return a hand-written graph without us."""
    return _graph(stock_model(server), lambda node: node)


def graph_with_us(server: FakeServer) -> Any:
    """Return the graph with our model and a wrapped node."""
    return _graph(our_model(server), session_node)


def _graph(model: Any, wrap: Callable[[Any], Any]) -> Any:
    bound = model.bind_tools([lookup])

    def call_model(state: Any) -> Any:
        return {"messages": [bound.invoke(state["messages"])]}

    return loop_graph(wrap(call_model))


PAIRS: dict[str, tuple[Make, Make]] = {
    "middleware": (plain_agent, agent_with_middleware),
    "model": (plain_agent, agent_with_model),
    "hand-written": (plain_graph, graph_with_us),
}

_RANDOM = re.compile(
    r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}"
    r"|\d{4}-\d\d-\d\dT[0-9:.+]+|answer-\d+|call_\d+_|lc_run-+|0x[0-9a-f]+|http://127[^\"/]+"
)


def shown(events: list[Any]) -> list[str]:
    """Return events as text, with what is random in every run taken out."""
    return [_RANDOM.sub("*", json.dumps(event, default=repr, sort_keys=True)) for event in events]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("pair", PAIRS)
def test_every_stream_mode_is_unchanged(server: FakeServer, pair: str, mode: str) -> None:
    """With us, a mode yields the same events in the same order."""
    both = []
    for make in PAIRS[pair]:
        server.clear()
        graph = make(server)
        turns = [graph.stream(HELLO, config(), stream_mode=mode) for _ in (1, 2)]
        both.append(shown([event for turn in turns for event in turn]))
    assert both[0] == both[1]
    assert both[0] or mode == "custom"


@pytest.mark.parametrize("pair", PAIRS)
def test_the_event_stream_is_unchanged(server: FakeServer, run: Run, pair: str) -> None:
    """``astream_events`` yields the same events, names, tags, metadata and data."""

    async def events(graph: Any) -> list[Any]:
        return [event async for event in graph.astream_events(HELLO, config(), version="v2")]

    both = []
    for make in PAIRS[pair]:
        server.clear()
        both.append(shown(run(events(make(server)))))
    assert both[0] == both[1]
    assert len(both[0]) > 10


@pytest.mark.parametrize("asked", [True, False])
@pytest.mark.parametrize("make", [stock_model, our_model], ids=["stock", "ours"])
def test_usage_is_there_when_it_is_asked_for(server: FakeServer, make: Any, asked: bool) -> None:
    """A streamed answer has usage, with cached tokens, exactly when the user asked."""
    model = make(server, stream_usage=asked)

    def node(state: Any) -> Any:
        return {"messages": [model.invoke(state["messages"])]}

    graph = loop_graph(node)
    chunks = [c for c, _ in graph.stream(HELLO, config(), stream_mode="messages")]
    found = [chunk.usage_metadata for chunk in chunks if chunk.usage_metadata]
    assert bool(found) is asked
    if asked:
        assert found[-1]["input_tokens"] > 0
        assert "cache_read" in found[-1]["input_token_details"]
    assert "".join(str(chunk.content) for chunk in chunks) == "fine"
