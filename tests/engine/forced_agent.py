"""A ``create_agent`` graph whose first calls must call tools, while others flood the caches."""

from __future__ import annotations

import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Literal

from langchain.agents import create_agent
from langchain.agents.middleware import wrap_model_call
from langchain_core.messages import AIMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.memory import InMemorySaver

from tests.engine.driving import TEXT
from turncache.langgraph import TurncacheMiddleware
from turncache_server.launch.stack import Stack
from turncache_tools.demo.counters import PromptTokens, read_prompt_tokens

#: Tools that the model has to call, in order; the call after them is free.
FORCED: Final = ("search", "run_tests", "search", "run_tests")
#: vLLM 0.32's hermes parser constrains the arguments of a forced call to the tool's schema
#: only without its structural tags (or with ``strict`` tools), and a random model fills a
#: grammar that allows white space with white space.
ENVIRONMENT: Final = {"VLLM_ENFORCE_STRICT_TOOL_CALLING": "0"}
ENGINE_ARGS: Final = (
    *("--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
    "--structured-outputs-config",
    '{"backend": "xgrammar", "disable_any_whitespace": true}',
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """What the model said in one run.

    Attributes:
        calls: per model call its text, and the tools that it called with their arguments.
        prompt_tokens: per model call, from its usage.
    """

    calls: tuple[tuple[str, tuple[tuple[str, str], ...]], ...]
    prompt_tokens: tuple[int, ...]


def run_agent(stack: Stack, thread: str, *, ours: bool, in_wait: Callable[[], None]) -> Said:
    """Run the agent once.

    Args:
        stack: the router that it calls.
        thread: its thread.
        ours: with our middleware, or the stock model alone.
        in_wait: called while each tool runs.
    """

    @tool
    def search(topic: Literal["scheduler", "cache", "router"]) -> str:
        """Find the lines about a topic."""
        in_wait()
        return f"about the {topic}:\n{TEXT[8000:8600]}"

    @tool
    def run_tests(tier: Literal["fast", "engine"]) -> str:
        """Run a tier of the tests."""
        in_wait()
        return f"{tier}: 12 passed, 1 failed\n{TEXT[9000:9600]}"

    @wrap_model_call
    def force(request: Any, handler: Any) -> Any:
        num_results = sum(isinstance(message, ToolMessage) for message in request.messages)
        if num_results < len(FORCED):
            choice = {"type": "function", "function": {"name": FORCED[num_results]}}
            request = request.override(tool_choice=choice)
        return handler(request)

    model = ChatOpenAI(
        model=stack.model,
        base_url=f"{stack.base_url}/v1",
        api_key="-",
        max_completion_tokens=48,
        temperature=0,
    )
    agent = create_agent(
        model,
        [search, run_tests],
        system_prompt=f"You mend code.\n{TEXT[2000:4400]}",
        middleware=[force, TurncacheMiddleware()] if ours else [force],
        checkpointer=InMemorySaver(),
    )
    state = agent.invoke(
        {"messages": [{"role": "user", "content": "The tests fail. Mend it."}]},
        {"configurable": {"thread_id": thread}, "recursion_limit": 40},
    )
    answers = [message for message in state["messages"] if isinstance(message, AIMessage)]
    return Said(
        calls=tuple(
            (
                str(each.content),
                tuple((call["name"], str(call["args"])) for call in each.tool_calls),
            )
            for each in answers
        ),
        prompt_tokens=tuple(
            0 if each.usage_metadata is None else each.usage_metadata["input_tokens"]
            for each in answers
        ),
    )


def prefill_tokens(stack: Stack) -> PromptTokens:
    """Read vLLM's own counters of the engine that prefills."""
    engine = next(engine for engine in stack.engines if engine.name.startswith("prefill"))
    with urllib.request.urlopen(f"{engine.url}/metrics", timeout=20) as reply:
        return read_prompt_tokens(reply.read().decode())
