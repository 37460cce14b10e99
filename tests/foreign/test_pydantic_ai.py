"""Our client handed to pydantic-ai: runs and streams."""

from __future__ import annotations

import asyncio
from typing import Any

from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

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


def agent(client: Any, kind: Any = OpenAIChatModel) -> Agent[Any, str]:
    """Return an agent with one tool."""
    made: Agent[Any, str] = Agent(kind("m", provider=OpenAIProvider(openai_client=client)))

    @made.tool_plain
    def search() -> str:
        """Search for something."""
        return "nothing"

    return made


def test_runs_and_streams_are_in_their_session(server: FakeServer) -> None:
    """run() and run_stream() say session and place of every call of the loop."""

    async def main() -> None:
        async with turncache.AsyncOpenAI(base_url=server.url, api_key="-") as client:
            async with turncache.session("whole"):
                assert (await agent(client).run("hello")).output == "fine"
            async with turncache.session("streamed"), agent(client).run_stream("hello") as run:
                assert await run.get_output() == "fine"
            async with turncache.session("responses"):
                await agent(client, OpenAIResponsesModel).run("hello")

    asyncio.run(main())
    for at, name in enumerate(("whole", "streamed", "responses")):
        requests = server.requests[2 * at : 2 * at + 2]
        check_in_session(requests, name, 2)
        assert [said(request) for request in requests] == TOOL_ROUND
        assert [call.boundary for call in turncache.session(name).calls] == ["tool", "user"]


def test_a_provider_gets_nothing_of_ours() -> None:
    """A hosted provider's requests carry no header or member of ours."""
    recorder = provider()

    async def main() -> None:
        async with hosted(recorder, turncache.AsyncOpenAI) as client, turncache.session("ticket"):
            await agent(client).run("hello")

    asyncio.run(main())
    assert len(recorder.requests) == 2
    check_nothing_of_ours(recorder)
