"""No text of a prompt or an answer is stored with a session, reported or logged."""

from __future__ import annotations

import gc
import json
import logging
import types
import weakref
from typing import Any

import openai
import pytest

import turncache
from tests.sdk.support import result
from turncache.testing import Failure, FakeServer, Reply

SECRET = "geheimnis"
TOOL = {"type": "function", "function": {"name": "search", "parameters": {"type": "object"}}}


def conversation(client: turncache.OpenAI, server: FakeServer) -> None:
    """Make calls of every kind with a secret in every text; some break what can be reused."""
    server.script(
        Reply(text=f"{SECRET} text", tools=[("search", {"q": SECRET})], reasoning=SECRET),
        Reply(text=SECRET),
        Failure(status=400, message=f"bad {SECRET}"),
        Reply(tools=[("search", {"q": SECRET})]),
        Reply(text=f"{SECRET} again", cut_after=1),
    )
    ask = client.chat.completions.create
    messages: list[Any] = [
        {"role": "system", "content": f"12:00:01 {SECRET}"},
        {"role": "user", "content": f"{SECRET}?"},
    ]
    message = ask(model="m", messages=messages, tools=[TOOL]).choices[0].message
    history = [*messages, message.to_dict(), result(message.tool_calls[0].id, SECRET)]
    history[0] = {"role": "system", "content": f"12:00:02 {SECRET}"}
    history[2]["tool_calls"][0]["function"]["arguments"] = json.dumps({"q": SECRET, "n": 1})
    ask(model="m", messages=history, tools=[TOOL])
    with pytest.raises(openai.BadRequestError):
        ask(model="m", messages=history)
    client.responses.create(model="m", input=SECRET, instructions=SECRET, tools=[_flat(TOOL)])
    with pytest.raises(Exception, match=r".+"):
        list(ask(model="m", messages=history, stream=True))


def _flat(tool: Any) -> Any:
    return {"type": "function", "strict": False, **tool["function"]}


def texts_from(root: object) -> list[str]:
    """Return every text that is reachable from an object, modules and types left out."""
    seen: set[int] = set()
    found: list[str] = []
    waiting = [root]
    while waiting:
        one = waiting.pop()
        if id(one) in seen or isinstance(
            one, (type, types.ModuleType, types.FunctionType, types.CodeType)
        ):
            continue
        seen.add(id(one))
        if isinstance(one, (str, bytes)):
            found.append(one if isinstance(one, str) else one.decode("latin-1"))
        waiting.extend(gc.get_referents(one))
    return found


def test_a_session_holds_no_text(client: turncache.OpenAI, server: FakeServer) -> None:
    """Whatever is reachable from a session: numbers, names of tools and models, fingerprints."""
    with turncache.session("ticket") as session:
        conversation(client, server)
        texts = texts_from(session.ledger) + texts_from(session.calls)
    assert "search" in texts, "the walk finds what is there"
    assert not [text for text in texts if SECRET in text]


def test_reports_and_advice_show_no_text(client: turncache.OpenAI, server: FakeServer) -> None:
    """Table, HTML, JSON, advice and records."""
    with turncache.session("ticket") as session:
        conversation(client, server)
    assert session.advice
    shown = [str(session), session._repr_html_(), session.to_json(), repr(session)]
    shown += [repr(call) for call in session.calls] + list(session.advice)
    assert SECRET not in "".join(shown)


def test_logs_show_no_text_and_no_key(server: FakeServer, caplog: pytest.LogCaptureFixture) -> None:
    """At the most talkative level, with everything that is ever said."""
    caplog.set_level(logging.DEBUG, logger="turncache")
    with (
        turncache.OpenAI(base_url=server.url, api_key=SECRET, max_retries=0) as client,
        turncache.session("ticket") as session,
    ):
        conversation(client, server)
        session.wait(expected_s=-1)
    own = [record.getMessage() for record in caplog.records if record.name == "turncache"]
    assert len(own) > 5
    assert SECRET not in "\n".join(own)


def test_a_client_that_is_gone_leaves_no_text(server: FakeServer) -> None:
    """What a client keeps to compare histories with goes with the client."""
    text = f"{SECRET} {id(server)} " * 3

    class Text(dict[str, Any]):
        """A message that can be watched."""

    message = Text(role="user", content=text)
    watch = weakref.ref(message)
    with turncache.OpenAI(base_url=server.url, api_key="-") as client:
        client.post(
            "/chat/completions",
            body={"model": "m", "messages": [message] * 4},
            cast_to=object,
        )
    del client, message
    gc.collect()
    assert watch() is None
