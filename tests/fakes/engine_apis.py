"""The other APIs of the fake engine: their requests as chat, its answers in their shape.

vLLM serves ``/v1/messages`` and ``/v1/responses`` by translating to chat as well, so that a
history has one rendering, whichever API it came through.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.fakes.engine import Answer

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
PATHS = (CHAT, COMPLETIONS, RESPONSES, MESSAGES)

_STOP_REASONS = {"tool_calls": "tool_use", "stop": "end_turn", "length": "max_tokens"}


def as_chat(path: str, body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the chat completion that a request asks for."""
    if path == COMPLETIONS:
        num_choices = (body.get("n") or 1) * _num_prompts(body["prompt"])
        content = str(body["prompt"])
        return {**body, "messages": [{"role": "user", "content": content}], "n": num_choices}
    if path == MESSAGES:
        return {**body, "messages": _of_messages(body), "tools": _tools(body, "input_schema")}
    if path == RESPONSES:
        chat = {**body, "messages": _of_input(body), "tools": _tools(body, "parameters")}
        return {**chat, "max_tokens": body.get("max_output_tokens")}
    return dict(body)


def whole(path: str, answer: Answer, params: Any) -> dict[str, Any]:
    """Return an answer in one piece."""
    if path == COMPLETIONS:
        choices = [
            {"index": index, "text": answer.text, "finish_reason": answer.finish_reason}
            for index in range(answer.num_choices)
        ]
        out = {"object": "text_completion", "choices": choices, "usage": answer.usage}
    elif path == MESSAGES:
        out = {**_message(answer), "content": _blocks(answer)}
    else:
        out = _response(answer, "completed")
    return {**out, "kv_transfer_params": params}


def events(path: str, answer: Answer, params: Any) -> list[bytes]:
    """Return a stream's events."""
    if path == COMPLETIONS:
        words = [(word + " ", None) for word in answer.text.split()]
        chunks = [
            {"choices": [{"index": index, "text": text, "finish_reason": reason}]}
            for index in range(answer.num_choices)
            for text, reason in [*words, ("", answer.finish_reason)]
        ]
        return [*(b"data: " + _json(chunk) + b"\n\n" for chunk in chunks), b"data: [DONE]\n\n"]
    parts = _message_events(answer) if path == MESSAGES else _response_events(answer)
    if params is not None:
        at = 0 if path == MESSAGES else -1
        holder = parts[at]["message" if path == MESSAGES else "response"]
        holder["kv_transfer_params"] = params
    return [
        b"event: " + part["type"].encode() + b"\ndata: " + _json(part) + b"\n\n" for part in parts
    ]


def _json(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


def _num_prompts(prompt: Any) -> int:
    """Count the prompts of a completion: one text or one list of tokens, or a list of either.

    Raises:
        ValueError: it is neither, which vLLM refuses.
    """
    if isinstance(prompt, str):
        return 1
    for kind, num_prompts in ((int, 1), (str, len(prompt)), (list, len(prompt))):
        if prompt and all(type(item) is kind for item in prompt):
            return num_prompts
    raise ValueError(f"{prompt!r} is no prompt")


def _tools(body: Mapping[str, Any], schema: str) -> list[dict[str, Any]] | None:
    tools = [
        {"type": "function", "function": {"name": tool["name"], "parameters": tool.get(schema)}}
        for tool in body.get("tools") or ()
        if "name" in tool
    ]
    return tools or None


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    return "".join(part.get("text", "") for part in content or ())


def _call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}


def _of_messages(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    out: list[dict[str, Any]] = []
    if body.get("system"):
        out.append({"role": "system", "content": _text(body["system"])})
    for message in body["messages"]:
        content = message["content"]
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
        results = [block for block in blocks if block["type"] == "tool_result"]
        out += [{"role": "tool", "content": _text(block["content"])} for block in results]
        calls = [
            _call(block["id"], block["name"], json.dumps(block["input"]))
            for block in blocks
            if block["type"] == "tool_use"
        ]
        text = _text([block for block in blocks if block["type"] == "text"])
        if text or calls or not results:
            said: dict[str, Any] = {"role": message["role"], "content": text or None}
            out.append({**said, "tool_calls": calls} if calls else said)
    return out


def _of_input(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    given = body["input"]
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    out: list[dict[str, Any]] = []
    if body.get("instructions"):
        out.append({"role": "system", "content": body["instructions"]})
    for item in items:
        if item.get("type") == "function_call":
            call = _call(item["call_id"], item["name"], item["arguments"])
            out.append({"role": "assistant", "content": None, "tool_calls": [call]})
        elif item.get("type") == "function_call_output":
            out.append({"role": "tool", "content": item["output"]})
        else:
            out.append({"role": item["role"], "content": _text(item["content"]) or None})
    return out


def _blocks(answer: Answer) -> list[dict[str, Any]]:
    text = [{"type": "text", "text": answer.text}] if answer.text else []
    calls = [
        {
            "type": "tool_use",
            "id": call["id"],
            "name": call["function"]["name"],
            "input": json.loads(call["function"]["arguments"]),
        }
        for call in answer.tool_calls
    ]
    return [*text, *calls]


def _message(answer: Answer) -> dict[str, Any]:
    usage = {
        "input_tokens": answer.prompt_tokens - answer.cached_tokens,
        "cache_read_input_tokens": answer.cached_tokens,
        "output_tokens": answer.usage["completion_tokens"],
    }
    return {
        "id": "msg_fake",
        "type": "message",
        "role": "assistant",
        "model": answer.model,
        "stop_reason": _STOP_REASONS[answer.finish_reason],
        "stop_sequence": None,
        "usage": usage,
    }


def _message_events(answer: Answer) -> list[dict[str, Any]]:
    message = _message(answer)
    start = {**message, "content": [], "stop_reason": None}
    out: list[dict[str, Any]] = [{"type": "message_start", "message": start}]
    for index, block in enumerate(_blocks(answer)):
        out += _block_events(index, block)
    delta = {"stop_reason": message["stop_reason"]}
    out.append({"type": "message_delta", "delta": delta, "usage": message["usage"]})
    return [*out, {"type": "message_stop"}]


def _block_events(index: int, block: Mapping[str, Any]) -> list[dict[str, Any]]:
    if block["type"] == "text":
        start: dict[str, Any] = {"type": "text", "text": ""}
        deltas = [{"type": "text_delta", "text": word + " "} for word in block["text"].split()]
    else:
        start = {**block, "input": {}}
        text = json.dumps(block["input"])
        pieces = (text[:7], text[7:])
        deltas = [{"type": "input_json_delta", "partial_json": piece} for piece in pieces]
    return [
        {"type": "content_block_start", "index": index, "content_block": start},
        *({"type": "content_block_delta", "index": index, "delta": delta} for delta in deltas),
        {"type": "content_block_stop", "index": index},
    ]


def _items(answer: Answer) -> Sequence[dict[str, Any]]:
    part = {"type": "output_text", "text": answer.text}
    text = {"type": "message", "role": "assistant", "content": [part], "status": "completed"}
    calls = [
        {
            "type": "function_call",
            "call_id": call["id"],
            "name": call["function"]["name"],
            "arguments": call["function"]["arguments"],
            "status": "completed",
        }
        for call in answer.tool_calls
    ]
    return [*([text] if answer.text else []), *calls]


def _response(answer: Answer, status: str) -> dict[str, Any]:
    cut = answer.finish_reason == "length" and status == "completed"
    return {
        "id": f"resp_{answer.prompt_tokens}",
        "object": "response",
        "status": "incomplete" if cut else status,
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "model": answer.model,
        "output": [] if status == "in_progress" else _items(answer),
        "usage": {
            "input_tokens": answer.prompt_tokens,
            "output_tokens": answer.usage["completion_tokens"],
        },
        "kv_transfer_params": None,
    }


def _response_events(answer: Answer) -> list[dict[str, Any]]:
    out: list[dict[str, Any]] = [
        {"type": "response.created", "response": _response(answer, "in_progress")}
    ]
    out += [
        {"type": "response.output_text.delta", "delta": word + " "} for word in answer.text.split()
    ]
    out += [{"type": "response.output_item.done", "item": item} for item in _items(answer)]
    # vLLM has this one end for every status.
    return [*out, {"type": "response.completed", "response": _response(answer, "completed")}]
