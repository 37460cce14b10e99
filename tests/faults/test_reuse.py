"""Prefix reuse that breaks in agent loops: named, never made worse, never hidden."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest

import turncache
from tests.fakes.vllm_server import look
from tests.sdk.support import HTTPX, Recorder, assistant, result, session_ids, system, user
from turncache.testing import FakeServer, Reply

SEARCH = {
    "type": "function",
    "function": {
        "name": "search",
        "parameters": {
            "type": "object",
            "properties": {"q": {"type": "string"}},
            "required": ["q"],
        },
    },
}
READ = {"type": "function", "function": {"name": "read", "parameters": {"type": "object"}}}


def ask(client: turncache.OpenAI, messages: list[Any], *tools: Any, **more: Any) -> Any:
    """Make a chat completion."""
    if tools:
        more["tools"] = list(tools)
    return client.chat.completions.create(model="m", messages=messages, **more)


def test_reasoning_dropped_when_a_turn_becomes_history() -> None:
    """A template that strips reasoning of finished turns is found, with the first token."""
    finding = look(template="strips")["chat template"]
    assert finding.verdict == "note"
    assert "from token " in finding.detail
    assert "each user message makes the turn before it new" in finding.detail


def test_reasoning_never_rendered_again() -> None:
    """A template that never renders reasoning is told apart from one that keeps it."""
    assert "never rendered" in look(template="drops")["chat template"].detail
    assert look(template="keeps")["chat template"].verdict == "ok"


def test_marker_on_the_last_user_message() -> None:
    """A mark that moves with the last message is found by tokens, not by messages."""
    finding = look(template="marks")["chat template"]
    assert finding.verdict == "note"
    assert "from token 0 of" in finding.detail


def test_key_order_changes_in_a_round_trip(client: turncache.OpenAI, server: FakeServer) -> None:
    """A history that a database has sorted is the same conversation and no break; arguments
    that were parsed and written again are one. Nothing is repaired on the way.
    """
    server.script(Reply(tools=[("search", '{"q": "x", "n": 1}')]), Reply())
    with turncache.session("ticket") as session:
        answer = ask(client, [user()], SEARCH)
        message = answer.choices[0].message.to_dict()
        history = [user(), message, result(message["tool_calls"][0]["id"])]
        stored = json.loads(json.dumps(history, sort_keys=True))
        ask(client, stored, SEARCH)
        assert session.advice == ()
        assert json.dumps(server.requests[-1].body["messages"]) == json.dumps(stored)

        server.script(Reply(tools=[("search", '{"q": "x", "n": 1}')]), Reply())
        question = [*history, assistant("fine"), user("again")]
        message = ask(client, question, SEARCH).choices[0].message.to_dict()
        function = message["tool_calls"][0]["function"]
        function["arguments"] = json.dumps(json.loads(function["arguments"]), sort_keys=True)
        ask(client, [*question, message, result(message["tool_calls"][0]["id"])], SEARCH)
    [advice] = session.advice
    assert advice.startswith(f"message {len(question)} holds tool call arguments")


def test_tools_in_another_order(
    client: turncache.OpenAI, server: FakeServer, caplog: pytest.LogCaptureFixture
) -> None:
    """It is said once, and never sorted silently: some templates mean the order."""
    with turncache.session("ticket") as session:
        ask(client, [user()], SEARCH, READ)
        ask(client, [user(), assistant(), user("more")], READ, SEARCH)
    assert "another order" in session.advice[0]
    warned = [record.getMessage() for record in caplog.records if record.levelno > logging.INFO]
    assert len(warned) == 1
    assert "another order" in warned[0]
    names = [[t["function"]["name"] for t in r.body["tools"]] for r in server.requests]
    assert names == [["search", "read"], ["read", "search"]]


def test_key_order_inside_a_tool_schema(client: turncache.OpenAI, server: FakeServer) -> None:
    """Templates print a schema as it comes: another order of its keys is named as a change."""
    parameters = SEARCH["function"]["parameters"]  # type: ignore[index]
    flipped = {
        "type": "function",
        "function": {"name": "search", "parameters": dict(reversed(list(parameters.items())))},
    }
    with turncache.session("ticket") as session:
        ask(client, [user()], SEARCH)
        ask(client, [user(), assistant(), user("more")], flipped)
    assert "down to the order of keys" in session.advice[0]
    sent = server.requests[-1].body["tools"][0]["function"]["parameters"]
    assert list(sent) == list(reversed(list(parameters)))


@pytest.mark.parametrize("followed", [False, True], ids=["session", "followed"])
@pytest.mark.parametrize(
    "clock", ["12:00:0{}", "2026-11-30T10:00:0{}.123Z", "179600000{}", "30.11.202{}"]
)
def test_clock_in_the_system_prompt(
    client: turncache.OpenAI, server: FakeServer, clock: str, followed: bool
) -> None:
    """Every call diverges at message 0: the diagnosis says so, and the conversation stays one."""
    messages: list[Any] = [user()]
    with turncache.session("ticket") as named:
        own = client if followed else client.with_session(named)
    for number in range(3):
        answer = ask(own, [system(f"It is {clock.format(number)}."), *messages])
        messages += [assistant(f"a{number}"), user(f"u{number}")]
    session = turncache.session_of(answer)
    assert session is not None
    assert session.automatic == followed
    assert len(set(session_ids(server.requests)[-2:])) == 1
    [advice] = session.advice
    assert advice.startswith("message 0 (system) changed")
    assert "date or time" in advice


@pytest.mark.parametrize("content", [None, "", ...], ids=["null", "empty", "absent"])
def test_null_empty_and_absent_content(
    client: turncache.OpenAI, server: FakeServer, content: Any
) -> None:
    """They render differently: each reaches the server as it was, and a change is named."""
    call = assistant(None, ("c1", "search"))
    if content is ...:
        del call["content"]
    else:
        call["content"] = content
    history = [user(), call, result("c1")]
    with turncache.session("ticket") as session:
        ask(client, history)
        other = {**call, "content": "" if content is None else None}
        ask(client, [user(), other, result("c1"), assistant(), user()])
    assert server.requests[0].body["messages"] == history
    assert ("content" in server.requests[0].body["messages"][1]) == (content is not ...)
    assert session.advice[0].startswith("message 1 is not what it was")


def test_begin_token_doubled_between_endpoints(
    client: turncache.OpenAI, server: FakeServer
) -> None:
    """A text prompt is never taken for a chat, and nothing about special tokens is added."""
    with turncache.session("ticket") as session:
        ask(client, [user("hello")])
        client.completions.create(model="m", prompt="hello")
        client.completions.create(model="m", prompt=[1, 2, 3])
        ask(client, [user("hello"), assistant(), user("more")])
    assert session.advice == ()
    assert [request.body.keys() for request in server.requests] == [
        {"model", "messages"},
        {"model", "prompt"},
        {"model", "prompt"},
        {"model", "messages"},
    ]
    text, tokens = session.calls[1:3]
    assert (text.turn, tokens.turn) == (None, None)


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", None])
def test_reasoning_added_or_removed_by_a_client(
    client: turncache.OpenAI, server: FakeServer, name: str | None
) -> None:
    """Some servers need it, others refuse it: what the caller has is what is sent."""
    server.script(Reply(reasoning="hm"), Reply())
    answer = ask(client, [user()])
    assert answer.choices[0].message.reasoning_content == "hm"
    kept = assistant("fine") | ({name: "hm"} if name else {})
    ask(client, [user(), kept, user("more")])
    assert server.requests[-1].body["messages"][1] == kept


def test_no_hit_called_a_win() -> None:
    """Ten calls that add less than a block show zero, and what nobody said is a dash."""
    usage: dict[str, Any] = {"prompt_tokens": 12, "completion_tokens": 1, "total_tokens": 13}

    def answer(_: Any) -> Any:
        choice = {"index": 0, "finish_reason": "stop", "message": assistant("x")}
        head = {"id": "a", "object": "chat.completion", "created": 1, "model": "m"}
        return HTTPX.Response(200, json={**head, "choices": [choice], "usage": usage})

    recorder = Recorder(answer)
    with recorder.client(turncache.OpenAI, base_url="http://127.0.0.1:9/v1") as client:
        for name, details in (("silent", None), ("zero", {"cached_tokens": 0})):
            usage["prompt_tokens_details"] = details
            messages = [user()]
            with turncache.session(name):
                for _ in range(10):
                    ask(client, messages)
                    messages += [assistant("x"), user("y")]
    silent, zero = str(turncache.session("silent")), str(turncache.session("zero"))
    assert "no prompt tokens reported" in silent.splitlines()[0]
    assert "reused" not in silent
    assert "0 of 120 prompt tokens reused (0.0%)" in zero
    assert {call.local for call in turncache.session("silent").calls} == {None}
