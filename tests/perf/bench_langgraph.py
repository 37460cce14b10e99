"""What the LangGraph integration adds to a model call: ``python -m tests.perf.bench_langgraph``.

The stock ``ChatOpenAI`` and ours send to one mock transport, in turns, inside a running node
of a graph. Times are CPU time of the thread, the median of many differences of two calls
that follow each other. Prints a table and writes ``build/perf/langgraph.json``.
"""

from __future__ import annotations

import argparse
import importlib
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import langchain_openai
import openai
from langchain.agents.middleware import ModelRequest
from langchain_core.messages import AIMessage, HumanMessage
from langgraph.graph import START, MessagesState, StateGraph

from turncache.langgraph import ChatOpenAI, TurncacheMiddleware, graph_session, session_node

ROOT: Final = Path(__file__).resolve().parents[2]
HTTPX: Any = importlib.import_module(
    "httpx2" if int(openai.__version__.split(".", 1)[0]) >= 3 else "httpx"
)
ANSWER: Final = {
    "id": "chatcmpl-1",
    "object": "chat.completion",
    "created": 1,
    "model": "m",
    "choices": [
        {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "fine"}}
    ],
}


def added_us(own: Callable[[], object], stock: Callable[[], object], rounds: int) -> float:
    """Return the median of what ``own`` takes longer than ``stock``, in microseconds."""
    differences = []
    for _ in range(rounds):
        times = []
        for call in (stock, own):
            began = time.thread_time_ns()
            call()
            times.append(time.thread_time_ns() - began)
        differences.append((times[1] - times[0]) / 1000)
    return statistics.median(differences)


def measure(rounds: int) -> dict[str, float]:
    """Measure inside a node of a graph with a thread."""
    transport = HTTPX.MockTransport(lambda _: HTTPX.Response(200, json=ANSWER))
    arguments: dict[str, Any] = {
        "model": "m",
        "base_url": "http://127.0.0.1:9/v1",
        "api_key": "-",
        "http_client": openai.DefaultHttpxClient(transport=transport),
    }
    stock, ours = langchain_openai.ChatOpenAI(**arguments), ChatOpenAI(**arguments)
    middleware = TurncacheMiddleware()
    messages: list[Any] = [
        kind("x" * 1500) for _ in range(5) for kind in (HumanMessage, AIMessage)
    ] + [HumanMessage("and?")]
    request = ModelRequest(model=stock, messages=messages)
    found: dict[str, float] = {}

    def through_middleware() -> object:
        return middleware.wrap_model_call(request, lambda r: r.model.invoke(r.messages))

    def nothing() -> None:
        return None

    def node(state: Any) -> Any:
        ask = {"stock": lambda: stock.invoke(messages), "ours": lambda: ours.invoke(messages)}
        for _ in range(20):
            ask["stock"]()
            ask["ours"]()
            through_middleware()
        found["ChatOpenAI, us per call"] = added_us(ask["ours"], ask["stock"], rounds)
        found["TurncacheMiddleware, us per call"] = added_us(
            through_middleware, ask["stock"], rounds
        )
        found["session_node, us per node"] = added_us(
            session_node(lambda: None, scope="task"), nothing, rounds
        )
        found["graph_session, us"] = added_us(graph_session, nothing, rounds)
        began = time.thread_time_ns()
        for _ in range(rounds):
            ask["stock"]()
        found["stock call, us"] = (time.thread_time_ns() - began) / 1000 / rounds
        return {}

    graph = StateGraph(MessagesState).add_node("node", node).add_edge(START, "node").compile()
    graph.invoke({"messages": []}, {"configurable": {"thread_id": "t"}})
    return found


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=500)
    found = measure(parser.parse_args().rounds)
    for name, value in found.items():
        print(f"{name:36} {value:8.1f}")
    folder = ROOT / "build" / "perf"
    folder.mkdir(parents=True, exist_ok=True)
    about = {"python": sys.version.split()[0], "machine": platform.machine()}
    (folder / "langgraph.json").write_text(json.dumps({**about, **found}, indent=2) + "\n")


if __name__ == "__main__":
    main()
