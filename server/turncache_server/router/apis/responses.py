"""``/v1/responses``, as vLLM serves it (``vllm/entrypoints/openai/responses``). Pure."""

from __future__ import annotations

import itertools
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
from turncache_server.router.histories import response_history, said_in_items

_TYPES: Final[dict[str, tuple[type, ...]]] = {
    "background": (bool,),
    "conversation_id": (str,),
    "input": (str, list),
    "instructions": (str,),
    "max_output_tokens": (int,),
    "model": (str,),
    "previous_response_id": (str,),
    "prompt_cache_key": (str,),
    "session_id": (str,),
    "store": (bool,),
    "stream": (bool,),
    "tool_choice": (str, dict),
    "tools": (list,),
    "truncation": (str,),
    "vllm_xargs": (dict,),
}
#: What the model has said in an earlier call.
_ANSWERS: Final = ("reasoning", "function_call", "custom_tool_call")


def read_response(body: Body) -> CallRequest:
    """Check a body and read what the router needs.

    Raises:
        ApiError: 400, naming the member that has a wrong type or an impossible value.
    """
    check_types(body, _TYPES)
    check_least(body, {"max_output_tokens": 1})
    if body.get("background"):
        raise invalid(
            "background: a background response is fetched from the engine that made it, which "
            "this router does not serve. Leave it out.",
            param="background",
        )
    given = body.get("input")
    if given is None:
        raise invalid("input: expected a text or an array of items.", param="input")
    items = [] if isinstance(given, str) else check_objects(body, "input")
    previous = body.get("previous_response_id") or None
    return CallRequest(
        model=body.get("model") or None,
        stream=bool(body.get("stream")),
        num_answers=_num_answers(items) if previous is None else None,
        brings_results=bool(items) and str(items[-1].get("type")).endswith("_output"),
        max_tokens=body.get("max_output_tokens"),
        one_engine=_one_engine(body, items),
        continues=previous,
    )


def _num_answers(items: list[dict[str, Any]]) -> int:
    """Count answers: a response is a message and its calls, one item after the other."""
    said = [False, *map(_is_answer, items)]
    return sum(now and not before for before, now in itertools.pairwise(said))


def _is_answer(item: dict[str, Any]) -> bool:
    return item.get("role") == "assistant" or item.get("type") in _ANSWERS


def _one_engine(body: Body, items: list[dict[str, Any]]) -> str | None:
    """Name the member that prefill and decode cannot serve together, if there is one.

    * ``previous_response_id``: the history lies in one engine's memory.
    * ``truncation``: what is cut depends on ``max_output_tokens``, which the prefill leg
      changes: two different prompts.
    """
    if body.get("previous_response_id"):
        return "previous_response_id"
    if body.get("truncation") not in (None, "disabled"):
        return "truncation"
    outputs = [
        {"content": item["output"]} for item in items if isinstance(item.get("output"), list)
    ]
    return "input" if has_media([*items, *outputs]) else None


def _prefill_put(_: Body) -> dict[str, str]:
    # An answer that nobody reads is nothing to keep, or to be continued.
    return {"stream": "false", "store": "false", "max_output_tokens": "1"}


class _Usage(msgspec.Struct, frozen=True):
    input_tokens: int = 0
    output_tokens: int = 0


class _Item(msgspec.Struct, frozen=True):
    type: str = ""
    name: str | None = None
    arguments: str | None = None
    input: Any = None
    content: Any = None


class _Details(msgspec.Struct, frozen=True):
    reason: str | None = None


class _Response(msgspec.Struct, frozen=True):
    id: str | None = None
    status: str | None = None
    output: list[_Item] = []
    usage: _Usage | None = None
    incomplete_details: _Details | None = None


class _Event(_Response, frozen=True):
    """An event of a stream, or a whole answer (``object`` is ``response``)."""

    type: str = ""
    object: str = ""
    response: _Response | None = None


_events: Final = msgspec.json.Decoder(_Event)
#: vLLM ends every stream with the first, whatever the status; OpenAI has one for each.
_ENDS: Final = frozenset({"response.completed", "response.incomplete"})
_FAILURES: Final = frozenset({"error", "response.failed"})


class ResponsesEnding:
    """Collects how a response ends: its last event, or its body, says everything.

    Args:
        final: the client said that nothing follows this call.
    """

    def __init__(self, *, final: bool = False) -> None:
        self._final = final
        self._answer: _Response | None = None
        self._error = False

    @property
    def engine_reported_error(self) -> bool:
        """The engine itself has told the client that the call failed."""
        return self._error

    def add(self, data: bytes) -> bool:
        """Take one event's data, or a whole answer; True with the last event."""
        try:
            event = _events.decode(data)
        except msgspec.DecodeError:
            return False
        self._error = self._error or event.type in _FAILURES
        if event.object == "response":
            self._answer = event
        elif event.type in _ENDS:
            self._answer = event.response
        return event.type in _ENDS

    def ending(self) -> Ending:
        """Judge what has been seen so far as the whole answer."""
        problem, answer = self._problem(), self._answer or _Response()
        details = answer.incomplete_details
        names = () if problem else complete_names(_tools(answer))
        used = answer.usage
        return Ending(
            problem=problem,
            finish_reason=(details.reason if details else None) or answer.status,
            boundary=None if problem else boundary_after(names, final=self._final),
            tool_names=names,
            usage=None if used is None else Usage(used.input_tokens, used.output_tokens),
            answer_id=answer.id,
        )

    def said(self) -> Said:
        """Return what the model has said, tool calls as it wrote them."""
        output = () if self._answer is None else self._answer.output
        return said_in_items(map(msgspec.structs.asdict, output))

    def _problem(self) -> str | None:
        if self._error:
            return "the engine reported an error"
        if self._answer is None:
            return "the answer ended before it was completed"
        if self._answer.status not in ("completed", "incomplete"):
            return f"the engine gave up on the answer (status {self._answer.status})"
        return None


def _tools(answer: _Response) -> list[ToolState]:
    tools = []
    for item in answer.output:
        if item.type in ("function_call", "custom_tool_call"):
            tool = ToolState()
            tool.add(item.name, item.arguments)
            tools.append(tool)
    return tools


class _ResponsesErrors:
    """OpenAI's body, and in a stream the event ``error``."""

    def body(self, error: ApiError) -> bytes:
        return error.to_json()

    def event(self, error: ApiError) -> bytes:
        event = {
            "type": "error",
            "code": error.code,
            "message": error.message,
            "param": error.param,
        }
        return b"event: error\ndata: " + json.dumps(event).encode() + b"\n\n"


RESPONSES: Final = Api(
    name="responses",
    path="/v1/responses",
    read=read_response,
    collector=lambda _, final: ResponsesEnding(final=final),
    prefill_put=_prefill_put,
    prefill_drop=frozenset(
        {
            "ignore_eos",
            "include",
            "include_stop_str_in_output",
            "stop",
            "stop_token_ids",
            "stream_options",
            "top_logprobs",
        }
    ),
    history=response_history,
    opens_with_token=False,
    errors=_ResponsesErrors(),
)
