"""``/v1/messages``, Anthropic's API as vLLM serves it (``vllm/entrypoints/anthropic``). Pure."""

from __future__ import annotations

import json
from typing import Any, Final

import msgspec

from turncache_server.router.apis.api import (
    Api,
    CallRequest,
    check_least,
    check_objects,
    check_types,
    has_media,
)
from turncache_server.router.body import Body
from turncache_server.router.ending import (
    Ending,
    ToolState,
    Usage,
    boundary_after,
    complete_names,
)
from turncache_server.router.errors import ApiError, invalid
from turncache_server.router.following import Said
from turncache_server.router.histories import messages_history

_TYPES: Final[dict[str, tuple[type, ...]]] = {
    "max_tokens": (int,),
    "metadata": (dict,),
    "model": (str,),
    "stop_sequences": (list,),
    "stream": (bool,),
    "system": (str, list),
    "thinking": (dict,),
    "tool_choice": (dict,),
    "tools": (list,),
    "vllm_xargs": (dict,),
}
#: Anthropic's words for an error, by HTTP status.
_ERROR_TYPES: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def read_messages(body: Body) -> CallRequest:
    """Check a body and read what the router needs.

    Raises:
        ApiError: 400, naming the member that has a wrong type or an impossible value.
    """
    check_types(body, _TYPES)
    check_least(body, {"max_tokens": 1})
    if body.get("max_tokens") is None:
        raise invalid("max_tokens: missing; this API has no default.", param="max_tokens")
    messages = check_objects(body, "messages")
    _check_thinking(body)
    last = messages[-1].get("content")
    return CallRequest(
        model=body.get("model") or None,
        stream=bool(body.get("stream")),
        num_answers=sum(message.get("role") == "assistant" for message in messages),
        brings_results=isinstance(last, list)
        and any(isinstance(part, dict) and part.get("type") == "tool_result" for part in last),
        max_tokens=body.get("max_tokens"),
        one_engine="messages" if has_media(_all_parts(messages)) else None,
    )


def _check_thinking(body: Body) -> None:
    budget = (body.get("thinking") or {}).get("budget_tokens")
    if isinstance(budget, int) and budget >= body.get("max_tokens"):
        raise invalid("thinking.budget_tokens: must be less than max_tokens.", param="thinking")


def _all_parts(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages, and the tool results in them, whose content may hold images."""
    results = [
        part
        for message in messages
        if isinstance(parts := message.get("content"), list)
        for part in parts
        if isinstance(part, dict) and part.get("type") == "tool_result"
    ]
    return [*messages, *results]


def _prefill_put(body: Body) -> dict[str, str]:
    put = {"stream": "false", "max_tokens": "1"}
    if (body.get("thinking") or {}).get("budget_tokens") is not None:
        # vLLM wants the budget below max_tokens, unless the request says that it is a
        # prefill leg (AnthropicMessagesRequest.validate_thinking_budget). Dropping the
        # budget would render another prompt. The connector reads nothing of this.
        put["kv_transfer_params"] = '{"do_remote_decode":true}'
    return put


class _Usage(msgspec.Struct, frozen=True):
    input_tokens: int | None = None
    output_tokens: int | None = None
    cache_read_input_tokens: int | None = None
    cache_creation_input_tokens: int | None = None

    @property
    def prompt(self) -> int:
        """All tokens of the prompt: Anthropic counts cached ones apart."""
        parts = (self.input_tokens, self.cache_read_input_tokens, self.cache_creation_input_tokens)
        return sum(part or 0 for part in parts)


class _Block(msgspec.Struct, frozen=True):
    type: str = ""
    name: str | None = None
    input: Any = None
    text: str | None = None


class _Delta(msgspec.Struct, frozen=True):
    partial_json: str | None = None
    text: str | None = None
    stop_reason: str | None = None


class _Message(msgspec.Struct, frozen=True):
    usage: _Usage | None = None


class _Event(msgspec.Struct, frozen=True):
    """An event of a stream, or a whole answer (``type`` is ``message``)."""

    type: str = ""
    index: int | None = None
    message: _Message | None = None
    content_block: _Block | None = None
    delta: _Delta | None = None
    usage: _Usage | None = None
    content: list[_Block] = []
    stop_reason: str | None = None


_events: Final = msgspec.json.Decoder(_Event)


class MessagesEnding:
    """Collects how a message ends.

    Args:
        final: the client said that nothing follows this call.
    """

    def __init__(self, *, final: bool = False) -> None:
        self._final = final
        self._tools: dict[int, ToolState] = {}
        self._text: list[str] = []
        self._stop_reason: str | None = None
        self._prompt_tokens = 0
        self._answer_tokens = 0
        self._counted = False
        self._error = False

    @property
    def engine_reported_error(self) -> bool:
        """The engine itself has told the client that the call failed."""
        return self._error

    def add(self, data: bytes) -> bool:
        """Take one event's data, or a whole answer; True with ``message_stop``."""
        try:
            event = _events.decode(data)
        except msgspec.DecodeError:
            return False
        self._count(event.usage or (event.message.usage if event.message else None))
        match event.type:
            case "error":
                self._error = True
            case "message":
                for index, block in enumerate(event.content):
                    self._begin(index, block)
                self._stop_reason = event.stop_reason
            case "content_block_start" if event.content_block and event.index is not None:
                self._begin(event.index, event.content_block)
            case "content_block_delta" if event.delta and event.delta.text:
                self._text.append(event.delta.text)
            case "content_block_delta" if event.delta and event.index in self._tools:
                self._tools[event.index].add(None, event.delta.partial_json)
            case "message_delta" if event.delta:
                self._stop_reason = event.delta.stop_reason or self._stop_reason
        return event.type == "message_stop"

    def ending(self) -> Ending:
        """Judge what has been seen so far as the whole answer."""
        problem = None
        if self._error:
            problem = "the engine reported an error"
        elif self._stop_reason is None:
            problem = "the answer ended without a stop_reason"
        tools = (tool for _, tool in sorted(self._tools.items()))
        names = () if problem else complete_names(tools)
        return Ending(
            problem=problem,
            finish_reason=self._stop_reason,
            boundary=None if problem else boundary_after(names, final=self._final),
            tool_names=names,
            usage=Usage(self._prompt_tokens, self._answer_tokens) if self._counted else None,
        )

    def said(self) -> Said:
        """Return what the model has said so far, tool calls as it wrote them."""
        tools = (tool for _, tool in sorted(self._tools.items()))
        calls = tuple((tool.name, "".join(tool.arguments) or "{}") for tool in tools)
        return Said(text="".join(self._text), calls=calls)

    def _begin(self, index: int, block: _Block) -> None:
        if block.type == "text" and block.text:
            self._text.append(block.text)
        if block.type != "tool_use":
            return
        tool = self._tools[index] = ToolState()
        # A stream starts with an empty object; the arguments follow in pieces.
        tool.add(block.name, json.dumps(block.input) if block.input else None)

    def _count(self, usage: _Usage | None) -> None:
        if usage is not None:
            self._counted = True
            self._prompt_tokens = usage.prompt or self._prompt_tokens
            self._answer_tokens = usage.output_tokens or self._answer_tokens


class _AnthropicErrors:
    """Anthropic's shape: ``{"type": "error", "error": {"type", "message"}}``."""

    def body(self, error: ApiError) -> bytes:
        kind = "invalid_request_error" if error.status < 500 else "api_error"
        kind = _ERROR_TYPES.get(error.status, kind)
        inner = {"type": kind, "message": error.message}
        return json.dumps({"type": "error", "error": inner}).encode()

    def event(self, error: ApiError) -> bytes:
        return b"event: error\ndata: " + self.body(error) + b"\n\n"


ANTHROPIC_ERRORS: Final = _AnthropicErrors()

MESSAGES: Final = Api(
    name="messages",
    path="/v1/messages",
    read=read_messages,
    collector=lambda _, final: MessagesEnding(final=final),
    prefill_put=_prefill_put,
    prefill_drop=frozenset({"stop_sequences"}),
    history=messages_history,
    takes_session=False,
    errors=ANTHROPIC_ERRORS,
)
