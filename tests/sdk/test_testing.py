"""The fake server that we ship: what users' tests may rely on."""

from __future__ import annotations

import threading
import urllib.request
from typing import Any

import openai
import pytest

import turncache
from tests.sdk.support import HELLO, TOOLS, assistant, printed_by, result, user
from turncache.testing import Failure, FakeServer, Reply


def ask(client: turncache.OpenAI, *messages: Any, **more: Any) -> Any:
    """Make a chat completion."""
    return client.chat.completions.create(model="m", messages=messages or HELLO, **more)


def test_it_needs_the_standard_library_only() -> None:
    """Importing it brings neither openai nor an HTTP library."""
    code = (
        "import sys, turncache.testing\n"
        "print(sorted({'openai', 'httpx', 'httpx2', 'pydantic'} & set(sys.modules)))"
    )
    assert printed_by(code) == "[]\n"


def test_default_answers(client: turncache.OpenAI, server: FakeServer) -> None:
    """Tools offered and no result yet: a tool call; else a text."""
    first = ask(client, tools=TOOLS).choices[0]
    assert first.finish_reason == "tool_calls"
    assert first.message.tool_calls[0].function.name == "search"
    second = ask(client, user(), assistant(None, ("c1", "search")), result(), tools=TOOLS)
    assert second.choices[0].message.content == "fine"


def test_scripted_answers_and_failures(client: turncache.OpenAI, server: FakeServer) -> None:
    """Replies come in their order, and the default answers afterwards."""
    server.script(
        Reply(text="one", reasoning="hm"),
        Failure(status=429, message="slow down"),
        Reply(tools=[("a", {"q": 1}), ("b", "{}")]),
        Reply(text="cut", finish_reason="length", headers={"x-mine": "1"}),
    )
    message = ask(client).choices[0].message
    assert (message.content, message.reasoning_content) == ("one", "hm")
    calls = ask(client).choices[0].message.tool_calls
    assert [call.function.arguments for call in calls] == ['{"q": 1}', "{}"]
    raw = client.chat.completions.with_raw_response.create(model="m", messages=HELLO)
    assert raw.headers["x-mine"] == "1"
    assert raw.parse().choices[0].finish_reason == "length"
    assert ask(client).choices[0].message.content == "fine"
    assert len(server.requests) == 5


def test_failures_of_every_kind(client: turncache.OpenAI, server: FakeServer) -> None:
    """A status raises upstream's error for it; 0 breaks the connection."""
    once = client.with_options(max_retries=0)
    for status, error in (
        (503, openai.InternalServerError),
        (401, openai.AuthenticationError),
        (0, openai.APIConnectionError),
    ):
        server.script(Failure(status=status))
        with pytest.raises(error):
            ask(once)


def test_requests_are_recorded(client: turncache.OpenAI, server: FakeServer) -> None:
    """Method, path, lower-case headers and the parsed body of each request."""
    ask(client, extra_headers={"X-Mine": "1"}, extra_query={"q": "2"})
    [request] = server.requests
    assert (request.method, request.path) == ("POST", "/v1/chat/completions?q=2")
    assert request.headers["x-mine"] == "1"
    assert request.body == {"model": "m", "messages": HELLO}


def test_outcomes_are_those_of_a_prefix_cache(client: turncache.OpenAI, server: FakeServer) -> None:
    """What an earlier prompt shares is local, the rest computed; a changed one starts anew."""
    first = turncache.outcome(ask(client, user("a b c")))
    second = turncache.outcome(ask(client, user("a b c"), assistant(), user("d e")))
    other = turncache.outcome(ask(client, user("x a b c")))
    assert first is not None
    assert second is not None
    assert other is not None
    assert (first.local, first.reason) == (0, "new_session")
    assert (second.local, second.reason) == (first.prompt, "ok")
    assert other.local < first.prompt
    for outcome in (first, second, other):
        assert outcome.local + outcome.computed == outcome.prompt


def test_requests_in_parallel() -> None:
    """Many threads are served at once, each with its own answer."""
    with FakeServer() as server:
        found: list[int] = []

        def get() -> None:
            with urllib.request.urlopen(f"{server.url}/models", timeout=10) as answer:
                found.append(answer.status)

        threads = [threading.Thread(target=get) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert found == [200] * 8
    assert len(server.requests) == 8


def test_forgetting(client: turncache.OpenAI, server: FakeServer) -> None:
    """forget_everything() leaves no session behind."""
    before = turncache.session("ticket")
    turncache.testing.forget_everything()
    assert turncache.session("ticket") is not before
