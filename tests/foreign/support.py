"""What the tests of every framework share: a provider that must get nothing of ours."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import turncache
from tests.sdk.support import HTTPX, Recorder
from turncache._fake_forms import Chat, Form, Reply, Responses
from turncache.testing import Request

PROVIDER = "https://api.openai.com/v1"
OURS = ("turncache", "x-session", "x-parent-session")
TOOL_ROUND = [(1, 1, "user"), (1, 2, "tool")]


def provider() -> Recorder:
    """Return a hosted provider: it calls the first tool that is offered, then answers."""

    def answer(request: Any) -> Any:
        body = json.loads(request.content)
        items = body.get("messages", body.get("input"))
        kind: type[Form] = Responses if "input" in body else Chat
        brings = str(items[-1].get("type") or items[-1].get("role")).startswith(("tool", "fun"))
        names = [tool.get("function", tool)["name"] for tool in body.get("tools") or ()]
        reply = Reply(tools=[(names[0], "{}")]) if names and not brings else Reply()
        form = kind(len(items), body, reply)
        if body.get("stream"):
            headers = {"content-type": "text/event-stream"}
            return HTTPX.Response(200, content=b"".join(form.events()), headers=headers)
        return HTTPX.Response(200, json=form.whole())

    return Recorder(answer)


def hosted(recorder: Recorder, kind: type[Any] = turncache.OpenAI) -> Any:
    """Return a client of ours that sends to a hosted provider."""
    return recorder.client(kind, base_url=PROVIDER)


def check_nothing_of_ours(recorder: Recorder) -> None:
    """Check that a provider got requests, and no header or body member of ours."""
    assert recorder.requests
    for request in recorder.requests:
        assert request.url.host == "api.openai.com"
        assert not [name for name in request.headers if name.lower().startswith(OURS)]
        body = json.loads(request.content)
        assert not {"session_id", "vllm_xargs", "conversation_id"} & body.keys()


def check_in_session(requests: Sequence[Request], session_id: str, number: int) -> None:
    """Check that ``number`` requests came, all of one session, tagged once each."""
    calls = [request for request in requests if request.method == "POST"]
    assert [request.headers.get("x-session-id") for request in calls] == [session_id] * number
    assert all(request.headers["turncache"].startswith("v=1, ") for request in calls)
