"""What the client's tests share: requests as answered by a function, and small histories."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import openai

from turncache.protocol import parse_dictionary
from turncache.testing import Request

#: The HTTP library that this openai is built on: httpx2 since 3.0.
HTTPX: Any = importlib.import_module(
    "httpx2" if int(openai.__version__.split(".", 1)[0]) >= 3 else "httpx"
)

TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"{name} something",
            "parameters": {"type": "object", "properties": {"q": {"type": "string"}}},
        },
    }
    for name in ("search", "run_tests")
]
RESPONSE_TOOLS: list[Any] = [
    {"type": "function", "name": "search", "parameters": {}, "strict": False}
]
HELLO: list[Any] = [{"role": "user", "content": "hello"}]

COMPLETION = {
    "id": "chatcmpl-1",
    "object": "chat.completion",
    "created": 1,
    "model": "m",
    "choices": [
        {
            "index": 0,
            "finish_reason": "stop",
            "message": {"role": "assistant", "content": "fine"},
        }
    ],
}


class Unreadable(dict[str, Any]):
    """A message that upstream can send and our bookkeeping cannot read."""

    def get(self, *_: Any) -> Any:
        raise TypeError("no")


class Recorder:
    """A transport that keeps requests and answers them with a function."""

    def __init__(self, answer: Callable[[Any], Any] | None = None) -> None:
        self.requests: list[Any] = []
        self._answer = answer

    def handle(self, request: Any) -> Any:
        self.requests.append(request)
        if self._answer is not None:
            return self._answer(request)
        return HTTPX.Response(200, json=COMPLETION)

    def client(self, kind: type[Any], **arguments: Any) -> Any:
        """Return a client of ``kind`` that sends to this recorder."""
        transport = HTTPX.MockTransport(self.handle)
        made = (
            openai.DefaultAsyncHttpxClient
            if issubclass(kind, openai.AsyncOpenAI)
            else openai.DefaultHttpxClient
        )
        arguments.setdefault("api_key", "-")
        return kind(http_client=made(transport=transport), **arguments)


def printed_by(code: str, *arguments: str) -> str:
    """Return what ``code`` prints in a process of its own, which has our paths and no settings."""
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env={"PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
        timeout=50,
    ).stdout


def session_ids(requests: Sequence[Request]) -> list[str | None]:
    """Return the session id of each request."""
    return [request.headers.get("x-session-id") for request in requests]


def said(request: Request) -> tuple[Any, Any, Any]:
    """Return turn, call and cause of a request's ``Turncache`` header."""
    members = parse_dictionary("Turncache", request.headers["turncache"])
    return members.get("turn"), members.get("call"), members.get("cause")


def assistant(answer: str | None = "fine", *calls: tuple[str, str]) -> Any:
    """Return an assistant message; ``calls`` are (id, tool name)."""
    message: dict[str, Any] = {"role": "assistant", "content": answer}
    if calls:
        message["tool_calls"] = [
            {"id": call_id, "type": "function", "function": {"name": name, "arguments": "{}"}}
            for call_id, name in calls
        ]
    return message


def user(text: str = "hello") -> Any:
    """Return a user's message."""
    return {"role": "user", "content": text}


def system(text: str = "be brief") -> Any:
    """Return a system message."""
    return {"role": "system", "content": text}


def result(call_id: str = "c1", text: str = "42") -> Any:
    """Return the result of a tool call."""
    return {"role": "tool", "tool_call_id": call_id, "content": text}
