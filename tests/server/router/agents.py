"""Agents that send requests in the shapes of coding agents, and keep the history as they do."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx2

SYSTEM = "You are a coding agent. Work in small steps. " * 6
SCHEMA = {"type": "object", "properties": {"query": {"type": "string"}}}


@dataclass
class MessagesAgent:
    """Claude Code: ``/v1/messages``, streamed, the system prompt in cached blocks."""

    session: str
    agent: str | None = None
    messages: list[dict[str, Any]] = field(default_factory=list)
    path: str = "/v1/messages"

    def request(self) -> tuple[dict[str, Any], dict[str, str]]:
        """Return body and headers of the next call."""
        headers = {
            "anthropic-version": "2023-06-01",
            "x-api-key": "-",
            "x-app": "cli",
            "x-claude-code-session-id": self.session,
        }
        if self.agent is not None:
            headers["x-claude-code-agent-id"] = self.agent
        cached = {"cache_control": {"type": "ephemeral"}}
        body = {
            "model": "fake",
            "max_tokens": 32_000,
            "stream": True,
            "metadata": {"user_id": f"user_0_account__session_{self.session}"},
            "system": [{"type": "text", "text": SYSTEM, **cached}],
            "messages": self.messages,
            "tools": [{"name": "Grep", "description": "search", "input_schema": SCHEMA}],
        }
        return body, headers

    def ask(self, text: str) -> None:
        """Begin a turn."""
        self.messages.append({"role": "user", "content": [{"type": "text", "text": text}]})

    def take(self, answer: httpx2.Response) -> bool:
        """Take a streamed answer and run its tools; False when the turn is over."""
        blocks: dict[int, dict[str, Any]] = {}
        texts: dict[int, str] = {}
        for data in _events(answer):
            match data["type"]:
                case "content_block_start":
                    blocks[data["index"]] = data["content_block"]
                case "content_block_delta":
                    delta = data["delta"]
                    piece = delta.get("text") or delta.get("partial_json") or ""
                    texts[data["index"]] = texts.get(data["index"], "") + piece
        for index, block in blocks.items():
            if block["type"] == "text":
                block["text"] = texts.get(index, "").strip()
            else:
                block["input"] = json.loads(texts[index])
        content = list(blocks.values())
        self.messages.append({"role": "assistant", "content": content})
        results = [
            {"type": "tool_result", "tool_use_id": block["id"], "content": RESULT}
            for block in content
            if block["type"] == "tool_use"
        ]
        if results:
            self.messages.append({"role": "user", "content": results})
        return bool(results)


@dataclass
class ResponsesAgent:
    """Codex: ``/v1/responses``, streamed, the whole history as items, nothing stored."""

    session: str
    agent: str | None = None
    items: list[dict[str, Any]] = field(default_factory=list)
    path: str = "/v1/responses"

    def request(self) -> tuple[dict[str, Any], dict[str, str]]:
        """Return body and headers of the next call."""
        thread = self.agent or self.session
        tool = {"type": "function", "name": "shell", "strict": False, "parameters": SCHEMA}
        body = {
            "model": "fake",
            "instructions": SYSTEM,
            "input": self.items,
            "tools": [tool],
            "tool_choice": "auto",
            "parallel_tool_calls": False,
            "store": False,
            "stream": True,
            "include": [],
            "prompt_cache_key": thread,
        }
        headers = {
            "session-id": self.session,
            "thread-id": thread,
            "x-codex-window-id": f"{thread}:0",
            "originator": "codex_cli_rs",
        }
        if self.agent is not None:
            headers["x-codex-parent-thread-id"] = self.session
            headers["x-openai-subagent"] = "collab_spawn"
        return body, headers

    def ask(self, text: str) -> None:
        """Begin a turn."""
        part = {"type": "input_text", "text": text}
        self.items.append({"type": "message", "role": "user", "content": [part]})

    def take(self, answer: httpx2.Response) -> bool:
        """Take a streamed answer and run its tools; False when the turn is over."""
        done = [
            data["item"] for data in _events(answer) if data["type"] == "response.output_item.done"
        ]
        self.items += done
        calls = [item for item in done if item["type"] == "function_call"]
        self.items += [
            {"type": "function_call_output", "call_id": call["call_id"], "output": RESULT}
            for call in calls
        ]
        return bool(calls)


@dataclass
class ChatAgent:
    """OpenCode (its own session header) or Cline (no id at all): chat completions, streamed."""

    headers: dict[str, str]
    messages: list[dict[str, Any]] = field(
        default_factory=lambda: [{"role": "system", "content": SYSTEM}]
    )
    path: str = "/v1/chat/completions"

    def request(self) -> tuple[dict[str, Any], dict[str, str]]:
        """Return body and headers of the next call."""
        function = {"name": "grep", "parameters": SCHEMA}
        body = {
            "model": "fake",
            "messages": self.messages,
            "tools": [{"type": "function", "function": function}],
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        return body, self.headers

    def ask(self, text: str) -> None:
        """Begin a turn."""
        self.messages.append({"role": "user", "content": text})

    def take(self, answer: httpx2.Response) -> bool:
        """Take a streamed answer and run its tools; False when the turn is over."""
        text = ""
        calls: dict[int, dict[str, Any]] = {}
        for data in _events(answer):
            for choice in data["choices"]:
                text += choice["delta"].get("content") or ""
                for piece in choice["delta"].get("tool_calls") or ():
                    call = calls.setdefault(piece["index"], piece)
                    if call is not piece:
                        call["function"]["arguments"] += piece["function"]["arguments"]
        message: dict[str, Any] = {"role": "assistant", "content": text.strip() or None}
        if calls:
            message["tool_calls"] = list(calls.values())
        self.messages.append(message)
        self.messages += [
            {"role": "tool", "tool_call_id": call["id"], "content": RESULT}
            for call in calls.values()
        ]
        return bool(calls)


#: What a tool finds: some blocks of text.
RESULT = "found: " + "def f(x): return x + 1\n" * 6

CodingAgent = MessagesAgent | ResponsesAgent | ChatAgent
AGENTS: dict[str, Callable[[str], CodingAgent]] = {
    "claude_code": MessagesAgent,
    "codex": ResponsesAgent,
    "opencode": lambda session: ChatAgent({"x-opencode-session": session}),
}


async def turn(agent: CodingAgent, http: httpx2.AsyncClient, text: str) -> list[httpx2.Response]:
    """Run one turn: the user's message, tools and their results, until the model answers."""
    agent.ask(text)
    answers = []
    going_on = True
    while going_on:
        body, headers = agent.request()
        answer = await http.post(agent.path, json=body, headers=headers)
        assert answer.status_code == 200, answer.text
        answers.append(answer)
        going_on = agent.take(answer)
    return answers


def _events(answer: httpx2.Response) -> list[dict[str, Any]]:
    lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]
