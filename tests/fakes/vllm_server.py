"""A vLLM as a function: what its flags and its chat template make of a request."""

from __future__ import annotations

import json
from typing import Any, Final

from tests.sdk.support import HTTPX, Recorder
from turncache.client import OpenAI
from turncache_tools.doctor_server import look_at_server
from turncache_tools.finding import Finding

BASE_URL: Final = "http://127.0.0.1:9/v1"
CALL: Final = {
    "id": "c",
    "type": "function",
    "function": {"name": "get_time", "arguments": "{}"},
}


class Server:
    """Answers requests.

    Flags: ``models, caching, details, tools, calls`` (does the model call tools), ``says``
    (its text), ``template`` (``keeps, strips, drops`` reasoning, ``marks`` the last user
    message, ``none``: no tokenizer), ``headers`` of completions.
    """

    def __init__(self, **flags: Any) -> None:
        self.flags = flags
        self.seen: set[str] = set()

    def __call__(self, request: Any) -> Any:
        path = request.url.path
        if path == "/v1/models":
            return HTTPX.Response(200, json={"object": "list", "data": self.models()})
        body = json.loads(request.content)
        if path == "/tokenize":
            return self.tokenize(body)
        if body.get("tools") and not self.flags.get("tools", True):
            message = '"auto" tool choice requires --enable-auto-tool-choice'
            return HTTPX.Response(400, json={"error": {"message": message}})
        headers = self.flags.get("headers", {})
        return HTTPX.Response(200, json=self.completion(body), headers=headers)

    def models(self) -> list[Any]:
        names = self.flags.get("models", ["m"])
        return [{"id": n, "object": "model", "created": 1, "owned_by": "x"} for n in names]

    def completion(self, body: Any) -> Any:
        key = json.dumps(body["messages"])
        cached = 384 if key in self.seen and self.flags.get("caching", True) else 0
        self.seen.add(key)
        usage: Any = {"prompt_tokens": 400, "completion_tokens": 1, "total_tokens": 401}
        if self.flags.get("details", True):
            usage["prompt_tokens_details"] = {"cached_tokens": cached}
        message: Any = {"role": "assistant", "content": self.flags.get("says", "ok")}
        if body.get("tools") and self.flags.get("calls", True):
            message = {"role": "assistant", "content": None, "tool_calls": [CALL]}
        choice = {"index": 0, "finish_reason": "stop", "message": message}
        head = {"id": "a", "object": "chat.completion", "created": 1, "model": "m"}
        return {**head, "choices": [choice], "usage": usage}

    def tokenize(self, body: Any) -> Any:
        template = self.flags.get("template", "keeps")
        if template == "none":
            return HTTPX.Response(404, json={"error": {"message": "not found"}})
        tokens: list[int] = []
        messages = body["messages"]
        last_user = max(at for at, message in enumerate(messages) if message["role"] == "user")
        for at, message in enumerate(messages):
            thought = message.get("reasoning_content")
            keeps = template == "keeps" or (template == "strips" and at > last_user)
            mark = "*" if template == "marks" and at == last_user else ""
            text = mark + (thought if thought and keeps else "") + str(message.get("content"))
            tokens += text.encode()
        return HTTPX.Response(200, json={"tokens": tokens, "count": len(tokens)})


def look(**flags: Any) -> dict[str, Finding]:
    """Return what the doctor finds on a server with these flags, by subject."""
    with Recorder(Server(**flags)).client(OpenAI, base_url=BASE_URL, max_retries=0) as client:
        return {finding.subject: finding for finding in look_at_server(client)}
