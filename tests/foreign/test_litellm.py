"""Our client handed to LiteLLM, and headers where it makes a request of its own."""

from __future__ import annotations

import asyncio
from typing import Any

import litellm

import turncache
from tests.foreign.support import check_in_session, check_nothing_of_ours, hosted, provider
from tests.sdk.support import HELLO, assistant, said, user
from turncache.testing import FakeServer


def test_completions_carry_the_session(server: FakeServer) -> None:
    """Whole, streamed and async: LiteLLM takes our client as the stock one."""
    client = turncache.OpenAI(base_url=server.url, api_key="-")
    with turncache.session("ticket") as session:
        whole = litellm.completion(model="openai/m", messages=HELLO, client=client)
        streamed = litellm.completion(model="openai/m", messages=HELLO, client=client, stream=True)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in streamed)
    assert whole.choices[0].message.content == text == "fine"

    async def main() -> None:
        async with (
            turncache.AsyncOpenAI(base_url=server.url, api_key="-") as own,
            turncache.session("ticket"),
        ):
            await litellm.acompletion(model="openai/m", messages=HELLO, client=own)

    asyncio.run(main())
    check_in_session(server.requests, "ticket", 3)
    assert [call.error for call in session.calls] == [None] * 3


def test_where_litellm_ignores_clients_headers_do(server: FakeServer) -> None:
    """hosted_vllm makes its own request: session.headers() says the same there."""
    messages = [*HELLO, assistant(), user("more")]
    with turncache.session("ticket") as session:
        litellm.completion(
            model="hosted_vllm/m",
            api_base=server.url,
            api_key="-",
            messages=messages,
            extra_headers=session.headers(messages=messages),
        )
    check_in_session(server.requests, "ticket", 1)
    assert said(server.requests[0]) == (2, 1, "user")


def test_a_provider_gets_nothing_of_ours() -> None:
    """A hosted provider's requests carry no header or member of ours."""
    recorder = provider()
    client: Any = hosted(recorder)
    with turncache.session("ticket"):
        litellm.completion(model="openai/m", messages=HELLO, client=client)
        list(litellm.completion(model="openai/m", messages=HELLO, client=client, stream=True))
    assert len(recorder.requests) == 2
    check_nothing_of_ours(recorder)
