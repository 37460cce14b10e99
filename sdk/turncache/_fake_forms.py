"""Replies of the fake server in the forms of the APIs that it speaks."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from turncache.protocol import Outcome

TEXT: Final = "fine"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """One answer.

    Attributes:
        text: content of the message, None for none.
        tools: (name, arguments) of the tool calls; arguments as a JSON string or a mapping.
        reasoning: reasoning that comes before the content, streamed first.
        finish_reason: overrides ``stop`` and ``tool_calls``; ``length`` cuts the answer.
        headers: further answer headers; None as a value removes one that is sent anyway.
        cut_after: break the connection after so many chunks of a stream.
    """

    text: str | None = TEXT
    tools: Sequence[tuple[str, str | Mapping[str, Any]]] = ()
    reasoning: str | None = None
    finish_reason: str | None = None
    headers: Mapping[str, str | None] = field(default_factory=dict)
    cut_after: int | None = None


class Form:
    """One reply in the form of one API."""

    def __init__(self, number: int, body: Mapping[str, Any], reply: Reply) -> None:
        self.number = number
        self.body = body
        self.reply = reply
        self.outcome = Outcome(prompt=0, local=0, returned=0, computed=0)
        self.calls = [
            (
                f"call_{number}_{at}",
                name,
                arguments if isinstance(arguments, str) else json.dumps(arguments),
            )
            for at, (name, arguments) in enumerate(reply.tools)
        ]

    @property
    def answer_id(self) -> str:
        return f"answer-{self.number}"

    def whole(self) -> dict[str, Any]:
        raise NotImplementedError

    def events(self) -> Iterator[bytes]:
        raise NotImplementedError


class Chat(Form):
    def whole(self) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": self._content()}
        if self.reply.reasoning is not None:
            message["reasoning_content"] = self.reply.reasoning
        if self.calls:
            message["tool_calls"] = [self._call(call) for call in self.calls]
        return {
            **self._head("chat.completion"),
            "choices": [{"index": 0, "message": message, "finish_reason": self._finish_reason()}],
            "usage": self._usage(),
        }

    def events(self) -> Iterator[bytes]:
        yield self._chunk({"role": "assistant", "content": ""})
        if self.reply.reasoning is not None:
            yield self._chunk({"reasoning_content": self.reply.reasoning})
        for word in (self._content() or "").split():
            yield self._chunk({"content": word})
        for at, call in enumerate(self.calls):
            yield self._chunk({"tool_calls": [{"index": at, **self._call(call)}]})
        yield self._chunk({}, self._finish_reason())
        if (self.body.get("stream_options") or {}).get("include_usage"):
            head = self._head("chat.completion.chunk")
            yield _event({**head, "choices": [], "usage": self._usage()})
        yield b"data: [DONE]\n\n"

    def _content(self) -> str | None:
        return None if self.calls and self.reply.text == TEXT else self.reply.text

    def _finish_reason(self) -> str:
        return self.reply.finish_reason or ("tool_calls" if self.calls else "stop")

    def _chunk(self, delta: Mapping[str, Any], finish: str | None = None) -> bytes:
        choice = {"index": 0, "delta": delta, "finish_reason": finish}
        return _event({**self._head("chat.completion.chunk"), "choices": [choice]})

    def _head(self, kind: str) -> dict[str, Any]:
        model = self.body.get("model")
        return {"id": self.answer_id, "object": kind, "created": 1, "model": model}

    @staticmethod
    def _call(call: tuple[str, str, str]) -> dict[str, Any]:
        call_id, name, arguments = call
        function = {"name": name, "arguments": arguments}
        return {"id": call_id, "type": "function", "function": function}

    def _usage(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.outcome.prompt,
            "completion_tokens": 1,
            "total_tokens": self.outcome.prompt + 1,
            "prompt_tokens_details": {"cached_tokens": self.outcome.reused},
        }


class Responses(Form):
    def whole(self) -> dict[str, Any]:
        return self._response(status="completed", output=self._output())

    def events(self) -> Iterator[bytes]:
        numbers = itertools.count()

        def event(kind: str, **members: Any) -> bytes:
            return _event({"type": kind, "sequence_number": next(numbers), **members}, kind)

        yield event("response.created", response=self._response(status="in_progress", output=[]))
        output = self._output()
        for at, item in enumerate(output):
            place = {"output_index": at, "item_id": item["id"]}
            yield event("response.output_item.added", output_index=at, item=item)
            if item["type"] == "function_call":
                yield event(
                    "response.function_call_arguments.delta", delta=item["arguments"], **place
                )
            else:
                yield event(
                    "response.output_text.delta",
                    delta=self.reply.text,
                    content_index=0,
                    logprobs=[],
                    **place,
                )
            yield event("response.output_item.done", output_index=at, item=item)
        status = "incomplete" if self.reply.finish_reason == "length" else "completed"
        whole = self._response(status=status, output=output)
        yield event(f"response.{status}", response=whole)

    def _output(self) -> list[dict[str, Any]]:
        if self.calls:
            return [
                {
                    "type": "function_call",
                    "id": f"item-{call_id}",
                    "call_id": call_id,
                    "name": name,
                    "arguments": arguments,
                    "status": "completed",
                }
                for call_id, name, arguments in self.calls
            ]
        text = {"type": "output_text", "text": self.reply.text or "", "annotations": []}
        return [
            {
                "type": "message",
                "id": f"message-{self.number}",
                "role": "assistant",
                "status": "completed",
                "content": [text],
            }
        ]

    def _response(self, *, status: str, output: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.answer_id,
            "object": "response",
            "created_at": 1,
            "model": self.body.get("model"),
            "status": status,
            "output": output,
            "parallel_tool_calls": True,
            "tool_choice": "auto",
            "tools": [],
            "usage": {
                "input_tokens": self.outcome.prompt,
                "input_tokens_details": {"cached_tokens": self.outcome.reused},
                "output_tokens": 1,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": self.outcome.prompt + 1,
            },
        }


class Completions(Chat):
    def whole(self) -> dict[str, Any]:
        choice = {"index": 0, "text": self.reply.text, "finish_reason": "stop"}
        return {**self._head("text_completion"), "choices": [choice], "usage": self._usage()}

    def _chunk(self, delta: Mapping[str, Any], finish: str | None = None) -> bytes:
        choice = {"index": 0, "text": delta.get("content", ""), "finish_reason": finish}
        return _event({**self._head("text_completion"), "choices": [choice]})


def _event(data: Mapping[str, Any], name: str | None = None) -> bytes:
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {json.dumps(data)}\n\n".encode()
