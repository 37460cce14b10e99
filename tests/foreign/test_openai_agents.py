"""Our client handed to openai-agents: both APIs, runs and streamed runs."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from agents import (
    Agent,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)

import turncache
from tests.foreign.support import (
    TOOL_ROUND,
    check_in_session,
    check_nothing_of_ours,
    hosted,
    provider,
)
from tests.sdk.support import said
from turncache.testing import FakeServer

MODELS = pytest.mark.parametrize("model", [OpenAIChatCompletionsModel, OpenAIResponsesModel])

set_tracing_disabled(disabled=True)


@function_tool
def search(q: str = "") -> str:
    """Search for something."""
    return "nothing"


def agent(model: Any, client: Any) -> Agent[Any]:
    """Return an agent with one tool."""
    return Agent(name="a", model=model(model="m", openai_client=client), tools=[search])


@MODELS
@pytest.mark.parametrize("streamed", [False, True], ids=["run", "run_streamed"])
def test_a_run_is_in_its_session(model: Any, streamed: bool, server: FakeServer) -> None:
    """Every call of the loop says its session and place, and the wait is seen as a tool's."""

    async def main() -> Any:
        async with (
            turncache.AsyncOpenAI(base_url=server.url, api_key="-") as client,
            turncache.session("ticket"),
        ):
            if not streamed:
                return (await Runner.run(agent(model, client), "hello")).final_output
            run = Runner.run_streamed(agent(model, client), "hello")
            async for _ in run.stream_events():
                pass
            return run.final_output

    assert asyncio.run(main()) == "fine"
    check_in_session(server.requests, "ticket", 2)
    assert [said(request) for request in server.requests] == TOOL_ROUND
    calls = turncache.session("ticket").calls
    assert [call.boundary for call in calls] == ["tool", "user"]
    assert turncache.session("ticket").advice == ()


@MODELS
def test_a_provider_gets_nothing_of_ours(model: Any) -> None:
    """A hosted provider's requests carry no header or member of ours."""
    recorder = provider()

    async def main() -> None:
        async with hosted(recorder, turncache.AsyncOpenAI) as client, turncache.session("ticket"):
            await Runner.run(agent(model, client), "hello")

    asyncio.run(main())
    assert len(recorder.requests) == 2
    check_nothing_of_ours(recorder)
