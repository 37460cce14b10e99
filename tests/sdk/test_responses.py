"""The responses API: boundaries, waits and places, streamed or not."""

from __future__ import annotations

import json
from typing import Any

import pytest

import turncache
from tests.sdk.support import said
from turncache.sessions import TOOL_DURATIONS
from turncache.testing import FakeServer, Reply

TOOL: Any = {"type": "function", "name": "search", "parameters": {}, "strict": False}
STREAMED = pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])


def respond(client: turncache.OpenAI, streamed: bool, **more: Any) -> Any:
    """Make a response, and return it whole."""
    made = client.responses.create(model="m", tools=[TOOL], stream=streamed, **more)
    if not streamed:
        return made
    return [event for event in made if event.type.startswith("response.")][-1].response


@STREAMED
def test_a_tool_loop(client: turncache.OpenAI, server: FakeServer, streamed: bool) -> None:
    """A function call begins a tool wait, its output ends it and measures it."""
    items: Any = [{"role": "user", "content": "hello"}]
    with turncache.session("ticket") as session:
        answer = respond(client, streamed, input=items)
        items += [item.to_dict() for item in answer.output]
        call_id = answer.output[0].call_id
        items += [{"type": "function_call_output", "call_id": call_id, "output": "42"}]
        respond(client, streamed, input=items)
    assert [said(request) for request in server.requests] == [(1, 1, "user"), (1, 2, "tool")]
    assert [call.boundary for call in session.calls] == ["tool", "user"]
    assert set(TOOL_DURATIONS.rows(["search"])) == {"search", "*"}
    assert session.advice == ()
    assert [call.ttft_s is not None for call in session.calls] == [streamed, streamed]


@STREAMED
def test_an_answer_that_the_server_keeps(
    client: turncache.OpenAI, server: FakeServer, streamed: bool
) -> None:
    """With previous_response_id the output alone is sent: the wait is measured all the same."""
    with turncache.session("ticket"):
        answer = respond(client, streamed, input="hello")
        output = {
            "type": "function_call_output",
            "call_id": answer.output[0].call_id,
            "output": "42",
        }
        respond(client, streamed, input=[output], previous_response_id=answer.id)
    assert [said(request) for request in server.requests] == [(1, 1, "user"), (1, 2, "tool")]
    assert "search" in TOOL_DURATIONS.rows(["search"])


def test_an_answer_that_was_cut_off(client: turncache.OpenAI, server: FakeServer) -> None:
    """No tool wait begins with a call that may be half: an incomplete response is none."""
    server.script(Reply(tools=[("search", '{"q": ')], finish_reason="length"))
    with turncache.session("ticket") as session:
        respond(client, streamed=True, input="hello")
    assert session.calls[-1].boundary == "user"
    assert TOOL_DURATIONS.rows(["search"]) == {}


@STREAMED
def test_the_result_is_untouched(
    client: turncache.OpenAI, server: FakeServer, streamed: bool
) -> None:
    """The object is upstream's, has nothing more, and compares and dumps as ever."""
    with turncache.session("ticket"):
        answer = respond(client, streamed, input="hello")
    assert type(answer).__module__.startswith("openai.")
    assert answer.model_copy() == answer
    assert json.loads(answer.model_dump_json()) == answer.model_dump(mode="json")
    assert not [name for name in vars(answer) if "turncache" in name]
