"""A coding agent: it edits a file until its tests pass. Our part of it is one import."""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from langchain_core.messages import SystemMessage
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition
from options import parse, run, show

from turncache.langgraph import ChatOpenAI  # instead of: from langchain_openai import ChatOpenAI

BROKEN = "def median(values):\n    return sorted(values)[len(values) / 2]\n"
TESTS = """\
from repaired import median
assert median([3, 1, 2]) == 2
assert median([4, 1, 2, 3]) == 2.5
"""
PROMPT = "Make the tests pass. Read repaired.py, write it whole, run the tests, until they pass."


def main(arguments: Sequence[str] | None = None) -> None:
    """Repair one function, and show what happened to the KV."""
    options = parse(__doc__, "The tests of median() fail.", arguments)
    with tempfile.TemporaryDirectory() as folder:
        graph = build(Path(folder), options)
        config: Any = {"configurable": {"thread_id": options.thread}, "recursion_limit": 60}
        question: Any = {"messages": [{"role": "user", "content": options.question}]}
        for update in graph.stream(question, config, stream_mode="updates"):
            for node, change in update.items():
                print(f"{node}: {change['messages'][-1].text[-200:]}")
    show(options.thread)


def build(folder: Path, options: argparse.Namespace) -> Any:
    """Return the graph: a model node and a tool node, in a loop."""
    code = folder / "repaired.py"
    code.write_text(BROKEN)
    (folder / "tests.py").write_text(TESTS)

    @tool
    def run_tests() -> str:
        """Run the tests and return their output."""
        time.sleep(options.tool_seconds)
        done = subprocess.run(
            [sys.executable, "tests.py"],
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=20,
            check=False,
        )
        return "passed" if done.returncode == 0 else done.stderr[-2000:]

    @tool
    def read_code() -> str:
        """Return repaired.py."""
        return code.read_text()

    @tool
    def write_code(text: str = BROKEN) -> str:
        """Replace repaired.py with a text."""
        code.write_text(text)
        return "written"

    tools = [run_tests, read_code, write_code]
    model = ChatOpenAI(
        model=options.model,
        base_url=options.base_url,
        api_key=options.api_key,
        max_completion_tokens=512,
    ).bind_tools(tools)

    def call_model(state: MessagesState) -> Any:
        return {"messages": [model.invoke([SystemMessage(PROMPT), *state["messages"]])]}

    return (
        StateGraph(MessagesState)
        .add_node("model", call_model)
        .add_node("tools", ToolNode(tools))
        .add_edge(START, "model")
        .add_conditional_edges("model", tools_condition)
        .add_edge("tools", "model")
        .compile(checkpointer=InMemorySaver())
    )


if __name__ == "__main__":
    run(main)
