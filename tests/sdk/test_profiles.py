"""Who gets what: nothing of ours reaches a hosted provider, in any way to call."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest

import turncache
from tests.sdk.support import COMPLETION, HELLO, HTTPX, TOOLS, Recorder, assistant, user
from turncache.errors import ConfigError, UsageError
from turncache.protocol import EngineHints

LOCAL = "http://127.0.0.1:9/v1"
ELSEWHERE = "https://llm.example.com/v1"


def ask(client: Any, *messages: Any, **more: Any) -> Any:
    """Make a chat completion."""
    return client.chat.completions.create(model="m", messages=messages or HELLO, **more)


def ours(request: Any) -> set[str]:
    """Return the names of our headers and body members in a request."""
    names = {
        name
        for name in request.headers
        if name.startswith(("turncache", "x-session", "x-parent")) or "raw-response" in name
    }
    return names | ({"session_id", "vllm_xargs"} & set(json.loads(request.content)))


@pytest.mark.parametrize("profile", ["auto", "vllm"])
@pytest.mark.parametrize(
    "base_url",
    [
        "https://api.openai.com/v1",
        "https://eu.api.openai.com/v1",
        "https://api.anthropic.com/v1",
        "https://openrouter.ai/api/v1",
        "https://api.groq.com/openai/v1",
        "https://generativelanguage.googleapis.com/v1beta/openai",
    ],
)
def test_providers_get_what_the_stock_client_sends(profile: str, base_url: str) -> None:
    """In a session or not, a provider's request is the stock client's, byte for byte."""
    stock, own = Recorder(), Recorder(_with_our_header)
    with stock.client(openai.OpenAI, base_url=base_url) as client:
        ask(client, tools=TOOLS)
    with own.client(turncache.OpenAI, base_url=base_url) as made:
        client = made.with_profile(profile)
        ask(client, tools=TOOLS)
        with turncache.session("ticket", parent="root") as session:
            ask(client, tools=TOOLS)
            ask(client.with_session("other"), tools=TOOLS)
    for request in own.requests:
        assert ours(request) == set()
        assert request.headers == stock.requests[0].headers
        assert request.content == stock.requests[0].content
    assert len(session.calls) == 1


def _with_our_header(_: Any) -> Any:
    return HTTPX.Response(200, json=COMPLETION, headers={"Turncache": "v=1"})


def test_azure_gets_what_the_stock_client_sends() -> None:
    """Azure's own hosts are a provider's; streams and responses are no exception."""
    own = Recorder(
        lambda request: (
            HTTPX.Response(200, text="data: [DONE]\n\n")
            if b'"stream"' in request.content
            else HTTPX.Response(200, json=COMPLETION)
        )
    )
    with (
        own.client(
            turncache.AzureOpenAI,
            azure_endpoint="https://mine.openai.azure.com",
            api_version="2024-10-01",
        ) as client,
        turncache.session("ticket"),
    ):
        ask(client)
        list(ask(client, stream=True))
        client.responses.create(model="m", input="hello")

    async def main() -> None:
        async with (
            own.client(
                turncache.AsyncAzureOpenAI,
                azure_endpoint="https://mine.openai.azure.com",
                api_version="2024-10-01",
            ) as client,
            turncache.session("ticket"),
        ):
            await ask(client)

    asyncio.run(main())
    assert len(own.requests) == 4
    assert all(ours(request) == set() for request in own.requests)


def test_an_unknown_host_is_told_after_it_answered() -> None:
    """The first call says nothing; a Turncache header in its answer changes that."""
    own = Recorder(_with_our_header)
    with own.client(turncache.OpenAI, base_url=ELSEWHERE) as client:
        ask(client)
        ask(client, *HELLO, assistant(), user("more"))
    first, second = own.requests
    assert ours(first) == set()
    assert {"turncache", "x-session-id"} <= ours(second)


def test_an_unknown_host_that_never_answered_is_told_nothing() -> None:
    """A server without our header never gets one."""
    own = Recorder()
    with own.client(turncache.OpenAI, base_url=ELSEWHERE) as client, turncache.session("t"):
        for _ in range(3):
            ask(client)
    assert [ours(request) for request in own.requests] == [set()] * 3


def test_another_base_url_is_another_server() -> None:
    """A client whose base_url is set anew tells the new server what that one may hear."""
    own = Recorder()
    with own.client(turncache.OpenAI, base_url=LOCAL) as client, turncache.session("t"):
        for url in (LOCAL, "https://api.openai.com/v1", LOCAL):
            client.base_url = url
            ask(client)
    assert ["x-session-id" in ours(request) for request in own.requests] == [True, False, True]


def test_a_stream_teaches_too() -> None:
    """The header of a streamed answer counts as an answer."""
    answer = HTTPX.Response(200, text="data: [DONE]\n\n", headers={"Turncache": "v=1"})
    own = Recorder(lambda _: answer)
    with own.client(turncache.OpenAI, base_url=ELSEWHERE) as client:
        list(ask(client, stream=True))
        list(ask(client, stream=True))
    assert ["x-session-id" in ours(request) for request in own.requests] == [False, True]


def test_an_error_teaches_too() -> None:
    """The header of an error counts as an answer."""
    own = Recorder(lambda _: HTTPX.Response(400, json={}, headers={"Turncache": "v=1"}))
    with own.client(turncache.OpenAI, base_url=ELSEWHERE) as client:
        for _ in range(2):
            with pytest.raises(openai.BadRequestError):
                ask(client)
    assert ["x-session-id" in ours(request) for request in own.requests] == [False, True]


def test_a_named_host_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host in TURNCACHE_HOSTS or with_profile(hosts=...) is told, a provider too."""
    own = Recorder()
    with own.client(turncache.OpenAI, base_url="https://api.openai.com/v1") as client:
        ask(client.with_profile("auto", hosts=["api.openai.com"]))
        ask(client)
    monkeypatch.setenv("TURNCACHE_HOSTS", "x.example.com, *.EXAMPLE.com:443,llm.example.com")
    with own.client(turncache.OpenAI, base_url=ELSEWHERE) as client:
        ask(client)
    assert ["x-session-id" in ours(request) for request in own.requests] == [True, False, True]


def test_vllm_says_it_in_the_body() -> None:
    """Profile vllm puts session, parent, retention and marks where an engine reads them."""
    own = Recorder()
    with own.client(turncache.OpenAI, base_url=LOCAL) as made:
        client = made.with_profile("vllm")
        with turncache.session("ticket", parent="root", retain_s=30, priority=70):
            ask(client, extra_body={"vllm_xargs": {"mine": 1}, "top_k": 3})
            ask(client, extra_headers={"X-Session-Final": "true"})
    first, last = (json.loads(request.content) for request in own.requests)
    assert (first["session_id"], first["top_k"]) == ("ticket", 3)
    assert first["vllm_xargs"].pop("mine") == 1
    hints = EngineHints.from_xargs(first["vllm_xargs"], trusted=True)
    assert hints == EngineHints(session="ticket", parent="root", retain_s=30, priority=70)
    assert last["vllm_xargs"]["tc_final"] == 1
    assert "turncache" in ours(own.requests[0])


def test_a_session_id_in_the_body_wins() -> None:
    """What the caller put into the body is the session, in header and body."""
    own = Recorder()
    with own.client(turncache.OpenAI, base_url=LOCAL) as client, turncache.session("block"):
        ask(client.with_profile("vllm"), extra_body={"session_id": "own"})
        ask(client, extra_body={"session_id": "own"})
    for request in own.requests:
        assert json.loads(request.content)["session_id"] == "own"
        assert request.headers["x-session-id"] == "own"


def test_auto_adds_nothing_to_the_body() -> None:
    """Strict servers refuse unknown members: the default says everything in headers."""
    stock, own = Recorder(), Recorder()
    with stock.client(openai.OpenAI, base_url=LOCAL) as client:
        ask(client, tools=TOOLS)
    with own.client(turncache.OpenAI, base_url=LOCAL) as client, turncache.session("t"):
        ask(client, tools=TOOLS)
    assert own.requests[0].content == stock.requests[0].content


@pytest.mark.parametrize(
    ("name", "value"), [("TURNCACHE_DISABLED", "1"), ("TURNCACHE_PROFILE", "off")]
)
def test_off_is_off(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    """Disabled, or with profile off, the clients are the stock ones."""
    monkeypatch.setenv(name, value)
    own = Recorder(_with_our_header)
    with own.client(turncache.OpenAI, base_url=LOCAL) as client, turncache.session() as session:
        answer = ask(client)
    assert ours(own.requests[0]) == set()
    assert session.calls == ()
    assert turncache.session_of(answer) is None


def test_disabled_is_stronger_than_a_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    """TURNCACHE_DISABLED turns off clients whose code names another profile, too."""
    monkeypatch.setenv("TURNCACHE_DISABLED", "1")
    own = Recorder(_with_our_header)
    with own.client(turncache.OpenAI, base_url=LOCAL) as client, turncache.session() as session:
        ask(client.with_profile("vllm").with_session(session))
    assert ours(own.requests[0]) == set()
    assert session.calls == ()


def test_off_for_one_client() -> None:
    """with_profile("off") turns one client off, and its copies."""
    own = Recorder()
    with own.client(turncache.OpenAI, base_url=LOCAL) as client, turncache.session("ticket"):
        ask(client.with_profile("off").with_options(timeout=3))
        ask(client)
    assert [ours(request) != set() for request in own.requests] == [False, True]


def test_the_environments_session(monkeypatch: pytest.MonkeyPatch) -> None:
    """TURNCACHE_SESSION_ID is the session of a process whose calls have no other."""
    monkeypatch.setenv("TURNCACHE_SESSION_ID", "rollout-7")
    own = Recorder()
    with own.client(turncache.OpenAI, base_url=LOCAL) as client:
        ask(client)
        client.completions.create(model="m", prompt="hello")
        with turncache.session("own"):
            ask(client)
    ids = [request.headers["x-session-id"] for request in own.requests]
    assert ids == ["rollout-7", "rollout-7", "own"]


def test_wrong_settings_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A setting that cannot work is an error at the first call, not a silent default."""
    own = Recorder()
    with own.client(turncache.OpenAI, base_url=LOCAL) as client:
        with pytest.raises(ConfigError, match="'fast': expected one of auto, vllm, off"):
            client.with_profile("fast")
        with pytest.raises(UsageError, match="expected a list"):
            client.with_profile("auto", hosts="llm.example.com")
        with pytest.raises(ConfigError, match="expected a host name"):
            client.with_profile("auto", hosts=["http://llm"])
    monkeypatch.setenv("TURNCACHE_PROFILE", "fast")
    with (
        own.client(turncache.OpenAI, base_url=LOCAL) as client,
        pytest.raises(ConfigError, match="TURNCACHE_PROFILE"),
    ):
        ask(client)
