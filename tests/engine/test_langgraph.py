"""LangGraph on the real pair: the examples run, and their KV survives their waits."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.types import Command, interrupt

from tests.engine.conftest import started
from tests.engine.driving import Driver, words
from tests.engine.forced_agent import ENGINE_ARGS, ENVIRONMENT, FORCED, run_agent
from turncache.langgraph import ChatOpenAI, session_node, thread_session
from turncache.notices import NOTIFIER
from turncache_server.launch.stack import Stack

BLOCK_TOKENS = 32
EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "langgraph"


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Prefill and decode that parse tool calls."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        yield from started(
            tmp_path_factory,
            prefill=1,
            decode=1,
            num_blocks={"prefill": 96, "decode": 256},
            settings={"retain_budget": 0.9, "tenant_budget": 0.9},
            engine_args=ENGINE_ARGS,
        )


@pytest.fixture(scope="module")
def driver(stack: Stack) -> Iterator[Driver]:
    """The other traffic, and the switch."""
    made = Driver(stack)
    yield made
    made.close()


@pytest.mark.parametrize("name", ["research_agent", "coding_loop", "approval"])
def test_an_example_runs_on_real_engines(stack: Stack, name: str) -> None:
    """An example ends with 0 and prints the tables of its sessions; nothing was lost."""
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


def test_an_interrupt_of_hours_makes_room_at_once(stack: Stack, driver: Driver) -> None:
    """Two runs wait for a person while others flood: of the one for minutes all is there, of
    the one for hours nothing, and both say the same when they are resumed.
    """
    model = ChatOpenAI(
        model=stack.model,
        base_url=f"{stack.base_url}/v1",
        api_key="-",  # type: ignore[arg-type]
        max_completion_tokens=8,
        temperature=0,
    )
    graphs: dict[str, Any] = {}
    for thread, person_s in (("minutes", 100), ("hours", 7200)):

        @session_node(person_s=person_s)
        def ask(state: MessagesState) -> Any:
            answer = model.invoke(state["messages"])
            interrupt(answer.text)
            return {"messages": [answer]}

        built = StateGraph(MessagesState).add_node("ask", ask).add_edge(START, "ask")
        graphs[thread] = built.compile(checkpointer=InMemorySaver())
    asked = {}
    for thread, graph in graphs.items():
        question = {"messages": [("user", words(2400))]}
        asked[thread] = graph.invoke(question, {"configurable": {"thread_id": thread}})
        assert NOTIFIER.flush(5)
    for _ in range(3):
        driver.flood()
    found = {}
    for thread, graph in graphs.items():
        said = graph.invoke(Command(resume="yes"), {"configurable": {"thread_id": thread}})
        assert said["messages"][-1].text == asked[thread]["__interrupt__"][0].value
        first, again = thread_session(thread).calls
        assert again.local is not None
        assert again.returned is not None
        assert again.prompt == first.prompt
        found[thread] = again.local + again.returned
        if thread == "minutes":
            assert again.lost == 0
            assert found[thread] > again.prompt - 2 * BLOCK_TOKENS
    assert found["hours"] <= BLOCK_TOKENS


def test_forced_tool_calls_lose_nothing(stack: Stack, driver: Driver) -> None:
    """Of an agent's calls after tools, all that is not new is there, and its text is stock's."""
    said = run_agent(stack, "forced", ours=True, in_wait=driver.flood)
    assert [calls[0][0] for _, calls in said.calls[:-1]] == list(FORCED)
    calls = thread_session("forced").calls
    assert len(calls) == len(FORCED) + 1
    for was, now in itertools.pairwise(calls):
        assert was.prompt is not None
        assert now.local is not None
        assert now.returned is not None
        assert now.lost == 0
        # The block in which the earlier prompt ends may go on otherwise.
        assert now.local + now.returned > was.prompt - BLOCK_TOKENS
        assert now.returned > 0
    driver.set_mode("off")
    driver.wait_for_pulls(wanted=False)
    try:
        assert run_agent(stack, "forced-stock", ours=False, in_wait=driver.flood) == said
    finally:
        driver.set_mode("on")
        driver.wait_for_pulls(wanted=True)
