"""A research agent whose tools take time. Our part of it is one line: the middleware."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Sequence
from pathlib import Path

from langchain.agents import create_agent
from langchain_core.messages import AIMessageChunk
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.memory import InMemorySaver
from options import parse, run, show

from turncache.langgraph import TurncacheMiddleware

SOURCES = {path.name: path for path in Path(json.__file__).parent.glob("*.py")}


def main(arguments: Sequence[str] | None = None) -> None:
    """Ask one question, print the answer as it comes, and show what happened to the KV."""
    options = parse(__doc__, "How does Python's json package find the end of a string?", arguments)

    @tool
    def search(pattern: str = "def ") -> str:
        """Find lines of the json package's source that contain a text."""
        time.sleep(options.tool_seconds)
        found = [
            f"{name}:{number}: {line}"
            for name, path in SOURCES.items()
            for number, line in enumerate(path.read_text().splitlines(), 1)
            if re.search(re.escape(pattern), line)
        ]
        return "\n".join(found[:10]) or "nothing found"

    @tool
    def read(name: str = "scanner.py", first: int = 1, last: int = 40) -> str:
        """Read lines of a file of the json package."""
        time.sleep(options.tool_seconds)
        path = SOURCES.get(name)
        if path is None:
            return f"no such file; there are {', '.join(SOURCES)}"
        return "\n".join(path.read_text().splitlines()[first - 1 : last])

    model = ChatOpenAI(
        model=options.model,
        base_url=options.base_url,
        api_key=options.api_key,
        max_completion_tokens=256,
    )
    agent = create_agent(
        model,
        [search, read],
        system_prompt="Answer from the source. Search first, then read.",
        middleware=[TurncacheMiddleware()],
        checkpointer=InMemorySaver(),
    )
    config = {"configurable": {"thread_id": options.thread}, "recursion_limit": 40}
    question = {"messages": [{"role": "user", "content": options.question}]}
    for chunk, _ in agent.stream(question, config, stream_mode="messages"):
        if isinstance(chunk, AIMessageChunk):
            print(chunk.text, end="", flush=True)
    print("\n")
    show(options.thread)


if __name__ == "__main__":
    run(main)
