"""A LangGraph agent on the real pair: its KV survives its tools while prefill is flooded."""

from __future__ import annotations

import itertools
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import AgentMiddleware
from langchain_core.messages import AIMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.memory import InMemorySaver

from tests.engine.conftest import started
from tests.engine.driving import Driver, assert_adds_up, words
from turncache import Outcome
from turncache.langgraph import TurncacheMiddleware, thread_session
from turncache.records import CallRecord

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "langgraph"
BLOCK = 32
#: The tool that each call is made to call; the last one answers in words.
FORCED = ("search", "read", "search", "read", None)
#: The same in every run, and long enough to fill blocks.
RESULTS = {"search": words(300), "read": words(400)}

#: The random model would fill JSON with blanks for ever.
STRUCTURED_OUTPUTS = '{"backend": "xgrammar", "disable_any_whitespace": true}'


@pytest.fixture(scope="module")
def drive(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Driver]:
    """A driver of a pair that parses tool calls."""
    for stack in started(
        tmp_path_factory,
        prefill=1,
        decode=1,
        num_blocks={"prefill": 96, "decode": 256},
        settings={"retain_budget": 0.9, "tenant_budget": 0.9},
        engine_args=(
            *("--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
            *("--structured-outputs-config", STRUCTURED_OUTPUTS),
        ),
    ):
        driver = Driver(stack)
        yield driver
        driver.close()


class Forcing(AgentMiddleware[Any, Any, Any]):
    """Makes the model call the tool whose turn it is (vLLM: structured output)."""

    def wrap_model_call(self, request: Any, handler: Callable[[Any], Any]) -> Any:
        num_results = sum(isinstance(message, ToolMessage) for message in request.messages)
        forced = FORCED[num_results]
        settings = {"max_completion_tokens": 16 if forced is None else 96}
        return handler(request.override(tool_choice=forced, model_settings=settings))


def run_agent(drive: Driver, *, thread: str, question: str, ours: bool) -> list[AIMessage]:
    """Run an agent with two tools, in which prefill is flooded; return its model's answers."""

    @tool
    def search(where: Literal["code", "docs"]) -> str:
        """Search a place."""
        drive.flood()
        return f"{where}: {RESULTS['search']}"

    @tool
    def read(part: Literal["head", "tail"]) -> str:
        """Read a part."""
        drive.flood()
        return f"{part}: {RESULTS['read']}"

    model = ChatOpenAI(
        model=drive.stack.model,
        base_url=f"{drive.stack.base_url}/v1",
        api_key="-",  # type: ignore[arg-type]
        temperature=0,
        timeout=120,
        include_response_headers=True,
        extra_body={"cache_salt": uuid.uuid4().hex},
    )
    agent = create_agent(
        model,
        [search, read],
        system_prompt="You are an agent.",
        middleware=[Forcing(), *([TurncacheMiddleware(end=True)] if ours else [])],
        checkpointer=InMemorySaver(),
    )
    messages: Any = {"messages": [{"role": "user", "content": question}]}
    state = agent.invoke(messages, {"configurable": {"thread_id": thread}})
    return [message for message in state["messages"] if isinstance(message, AIMessage)]


def said(answers: list[AIMessage]) -> list[Any]:
    """Return texts and tool calls, without ids."""
    return [
        (answer.text, [(call["name"], call["args"]) for call in answer.tool_calls])
        for answer in answers
    ]


def outcomes(answers: list[AIMessage]) -> list[Outcome]:
    """Return what the answers' headers say."""
    headers = [answer.response_metadata["headers"] for answer in answers]
    return [assert_adds_up(Outcome.from_header(each["turncache-outcome"])) for each in headers]


def share_kept(found: list[Outcome]) -> float:
    """Return the share of prompt tokens on tool returns that were not computed again."""
    return sum(each.reused for each in found[1:]) / sum(each.prompt for each in found[1:])


def test_an_agents_kv_survives_its_tools(drive: Driver) -> None:
    """From the second call on nothing is lost and only new tokens are computed; same answers."""
    question = words(2500)
    thread = uuid.uuid4().hex
    plain = run_agent(drive, thread=thread, question=question, ours=False)
    ours = run_agent(drive, thread=thread, question=question, ours=True)
    unread = [(answer.text, answer.invalid_tool_calls) for answer in ours]
    assert [len(answer.tool_calls) for answer in ours] == [1, 1, 1, 1, 0], unread
    assert [call["name"] for answer in ours for call in answer.tool_calls] == list(FORCED[:-1])
    assert said(ours) == said(plain)

    found = outcomes(ours)
    for number, (before, outcome) in enumerate(itertools.pairwise(found), 2):
        assert outcome.lost == 0, f"call {number}: {outcome}"
        assert outcome.computed <= outcome.prompt - before.prompt + BLOCK, f"{number}: {outcome}"
    assert sum(outcome.returned for outcome in found) > 1000, "prefill was flooded"
    kept, kept_plain = share_kept(found), share_kept(outcomes(plain))
    print(f"not computed again on tool returns: {kept:.1%}, without us {kept_plain:.1%}")
    assert kept > kept_plain

    calls: tuple[CallRecord, ...] = thread_session(thread).calls
    assert [call.boundary for call in calls] == ["tool"] * 4 + ["user"]
    assert [call.cause for call in calls] == ["user"] + ["tool"] * 4
    assert thread_session(thread).advice == ()


@pytest.mark.parametrize("name", ["research_agent", "coding_loop", "approval"])
def test_an_example_runs_on_real_engines(drive: Driver, name: str) -> None:
    """An example ends with 0 and prints the tables of its sessions, with what was kept."""
    stack = drive.stack
    done = subprocess.run(
        [
            *(sys.executable, EXAMPLES / f"{name}.py", "--tool-seconds", "0"),
            *("--base-url", f"{stack.base_url}/v1", "--model", stack.model),
            *("--thread", f"example-{name}"),
        ],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert f"session example-{name} (h-" in done.stdout
    assert ", 0 lost" in done.stdout
