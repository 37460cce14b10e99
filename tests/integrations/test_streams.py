"""Streaming: a graph with us gives the events of the graph without us, and usage when asked."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.config import get_stream_writer

from tests.integrations.conftest import Run
from tests.integrations.support import (
    HELLO,
    config,
    loop_graph,
    our_model,
    stock_model,
)
from turncache.langgraph import TurncacheMiddleware, session_node
from turncache.testing import FakeServer

MODES = ["values", "updates", "messages", "custom", "debug", "tasks", "checkpoints"]

Make = Callable[[FakeServer], Any]


@tool
def lookup(q: str = "") -> str:
    """Look something up, and say how it goes."""
    get_stream_writer()(f"looking for {q}")
    return f"42 {q}"


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

    return loop_graph(wrap(call_model), tools=[lookup])


PAIRS: dict[str, tuple[Make, Make]] = {
    "middleware": (plain_agent, agent_with_middleware),
    "model": (plain_agent, agent_with_model),
    "hand-written": (plain_graph, graph_with_us),
}

_RANDOM = re.compile(
    r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}"
    r"|\d{4}-\d\d-\d\dT[0-9:.+]+|answer-\d+|call_\d+_|lc_run-+|0x[0-9a-f]+"
    r"|\"timestamp\": \d+|http://127[^\"/]+"
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
    assert both[0]


@pytest.mark.parametrize("version", ["v1", "v2"])
@pytest.mark.parametrize("pair", PAIRS)
def test_all_stream_modes_at_once_are_unchanged(
    server: FakeServer, run: Run, pair: str, version: str
) -> None:
    """Awaited, with subgraphs, in both forms of a stream's parts."""

    async def parts(graph: Any) -> list[Any]:
        stream = graph.astream(HELLO, config(), stream_mode=MODES, subgraphs=True, version=version)
        return [part async for part in stream]

    both = []
    for make in PAIRS[pair]:
        server.clear()
        both.append(shown(run(parts(make(server)))))
    assert both[0] == both[1]
    assert all(any(f'"{mode}"' in part for part in both[0]) for mode in MODES)


#: LangGraph says of its newest protocol that it may change.
@pytest.mark.filterwarnings("ignore:The v3 streaming protocol")
@pytest.mark.parametrize("version", ["v2", "v3"])
@pytest.mark.parametrize("pair", PAIRS)
def test_the_event_stream_is_unchanged(
    server: FakeServer, run: Run, pair: str, version: str
) -> None:
    """``astream_events`` yields the same events, names, tags, metadata and data."""

    async def events(graph: Any) -> list[Any]:
        stream = graph.astream_events(HELLO, config(), version=version)
        return [event async for event in (await stream if version == "v3" else stream)]

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
