"""How a call ended: boundary, tool calls and usage, from answers and from their streams.

Pure: values in, values out. An answer may be anything a server sends; what is missing
or odd reads as unknown.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Any, Final, NamedTuple

from turncache.protocol import Boundary

MAX_ARGUMENT_CHARS: Final = 65_536
#: Output items whose results the caller brings; other ``…_call`` items run on the server.
_CALLERS_ITEMS: Final = frozenset(
    {
        "function_call",
        "custom_tool_call",
        "computer_call",
        "local_shell_call",
        "shell_call",
        "apply_patch_call",
        "mcp_approval_request",
    }
)
_CUT_SHORT: Final = frozenset({"length", "content_filter"})
# What is read of a chat completion: one question per object instead of one per member.
_COMPLETION: Final = attrgetter("id", "usage", "choices")
_CHOICE: Final = attrgetter("finish_reason", "message.tool_calls")
_USAGE: Final = attrgetter("prompt_tokens", "prompt_tokens_details")
_FUNCTION_CALL: Final = attrgetter("id", "function.name", "function.arguments")


class ToolCall(NamedTuple):
    """One tool call of an answer; ``arguments`` as the model wrote them, or None."""

    id: str
    name: str
    arguments: str | None


class Ending(NamedTuple):
    """How a call ended.

    Attributes:
        boundary: what kind of wait begins, None when the answer is not complete.
        tools: complete tool calls whose results the caller brings.
        prompt: tokens of the prompt by the answer's usage, or None.
        cached: tokens of it that the server had cached, or None.
        answer_id: the answer's id, by which a later request may continue it.
        failed: what the server says went wrong, as a word, or None.
    """

    boundary: Boundary | None = None
    tools: tuple[ToolCall, ...] = ()
    prompt: int | None = None
    cached: int | None = None
    answer_id: str | None = None
    failed: str | None = None


#: The ending of a call that shows nothing of it.
NOTHING: Final = Ending()


def read_answer(answer: Any) -> Ending:
    """Read a chat completion, a response, or a completion; objects and mappings alike."""
    try:
        # The usual shape: one choice.
        answer_id, usage, (choice,) = _COMPLETION(answer)
        reason, calls = _CHOICE(choice)
        prompt, details = (None, None) if usage is None else _USAGE(usage)
        cached = None if details is None else details.cached_tokens
    except (AttributeError, TypeError, ValueError):
        return _read_any(answer)
    boundary = Boundary.USER if reason else None
    tools: tuple[ToolCall, ...] = ()
    if calls:
        boundary, tools = _read_calls(calls, (reason,))
    return Ending(
        boundary,
        tools,
        prompt if type(prompt) is int else None,
        cached if type(cached) is int else None,
        answer_id if type(answer_id) is str else None,
    )


def _read_any(answer: Any) -> Ending:
    # Both take (value, name, default): one question per object instead of one per member.
    of = dict.get if isinstance(answer, dict) else getattr
    usage, answer_id = of(answer, "usage", None), of(answer, "id", None)
    prompt, cached = (None, None) if usage is None else _usage(usage)
    choices = of(answer, "choices", None)
    failed = None
    if isinstance(choices, (list, tuple)):
        boundary, tools = _read_choices(choices)
    else:
        boundary, tools, failed = _read_output(answer)
    if not isinstance(answer_id, str):
        answer_id = None
    return Ending(boundary, tools, prompt, cached, answer_id, failed)


class ChunkReader:
    """Reads a stream's chunks one by one and says how the call ended.

    ``feed`` is called for every chunk and does little for those that only bring text.
    """

    __slots__ = ("_answer_id", "_calls", "_finish", "_response", "_usage")

    def __init__(self) -> None:
        """Start before the first chunk."""
        self._finish: dict[int, str] = {}
        self._calls: dict[tuple[int, int], list[str]] = {}
        self._usage: Any = None
        self._answer_id: Any = None
        self._response: Any = None

    def feed(self, chunk: Any) -> bool:
        """Take one chunk; True when it carries something that the model generated."""
        choices = getattr(chunk, "choices", None)
        if choices is None:
            return self._feed_event(chunk)
        fresh = False
        for choice in choices:
            if choice.finish_reason:
                self._finish[choice.index] = choice.finish_reason
            delta = getattr(choice, "delta", None)
            if delta is None:
                fresh = fresh or bool(getattr(choice, "text", None))
            elif delta.content:
                fresh = True
            elif delta.tool_calls:
                fresh = True
                self._feed_calls(choice.index, delta.tool_calls)
            elif not fresh:
                fresh = _generated(delta)
        if chunk.usage is not None:
            self._usage = chunk.usage
        if self._answer_id is None:
            self._answer_id = chunk.id
        return fresh

    def ending(self) -> Ending:
        """Return how the call ended, as far as the chunks say."""
        if self._response is not None:
            return read_answer(self._response)
        prompt, cached = (None, None) if self._usage is None else _usage(self._usage)
        tools = tuple(
            _short(ToolCall(call_id, name, "".join(text)))
            for call_id, name, *text in self._calls.values()
            if call_id and name
        )
        boundary = _boundary(self._finish.values(), tools)
        return Ending(
            boundary=boundary,
            tools=tools if boundary is Boundary.TOOL else (),
            prompt=prompt,
            cached=cached,
            answer_id=self._answer_id if isinstance(self._answer_id, str) else None,
        )

    def _feed_event(self, event: Any) -> bool:
        kind = getattr(event, "type", None)
        if not isinstance(kind, str):
            return False
        if kind in ("response.completed", "response.incomplete", "response.failed"):
            self._response = event.response
        return kind.endswith(".delta")

    def _feed_calls(self, choice: int, deltas: Iterable[Any]) -> None:
        for delta in deltas:
            inner = delta.function or getattr(delta, "custom", None)
            parts = self._calls.setdefault((choice, delta.index), ["", ""])
            if delta.id:
                parts[0] = delta.id
            if inner is not None:
                if inner.name:
                    parts[1] = inner.name
                text = getattr(inner, "arguments", None) or getattr(inner, "input", None)
                if text:
                    parts.append(text)


def _get(value: Any, name: str) -> Any:
    # A missing attribute of a model object costs a microsecond: ask for likely ones first.
    return value.get(name) if isinstance(value, dict) else getattr(value, name, None)


def _generated(delta: Any) -> bool:
    """Whether a chat delta without content or tool calls carries a refusal or reasoning."""
    return bool(
        getattr(delta, "refusal", None)
        or getattr(delta, "reasoning_content", None)
        or getattr(delta, "reasoning", None)
        or getattr(delta, "function_call", None)
    )


def _boundary(finish: Iterable[Any], tools: tuple[ToolCall, ...]) -> Boundary | None:
    reasons = [reason for reason in finish if reason]
    if not reasons:
        return None
    if tools and not _CUT_SHORT.intersection(reasons):
        return Boundary.TOOL
    return Boundary.USER


def _read_choices(choices: Sequence[Any]) -> tuple[Boundary | None, tuple[ToolCall, ...]]:
    calls: list[Any] = []
    reasons = []
    for choice in choices:
        of = dict.get if isinstance(choice, dict) else getattr
        reasons.append(of(choice, "finish_reason", None))
        calls.extend(_get(of(choice, "message", None), "tool_calls") or ())
    return _read_calls(calls, reasons)


def _read_calls(
    calls: Iterable[Any], reasons: Iterable[Any]
) -> tuple[Boundary | None, tuple[ToolCall, ...]]:
    found: list[ToolCall] = []
    for item in calls:
        try:
            call_id, name, arguments = _FUNCTION_CALL(item)
        except AttributeError:
            # A custom tool, or a mapping.
            call_id, inner = _get(item, "id"), _get(item, "function") or _get(item, "custom")
            name, arguments = _name_and_arguments(inner)
        call = _tool_call(call_id, name, arguments)
        if call is not None:
            found.append(call)
    boundary = _boundary(reasons, tuple(found))
    return boundary, tuple(found) if boundary is Boundary.TOOL else ()


def _read_output(answer: Any) -> tuple[Boundary | None, tuple[ToolCall, ...], str | None]:
    status = _get(answer, "status")
    output = _get(answer, "output")
    if status in ("failed", "cancelled"):
        return None, (), str(status)
    if status in ("in_progress", "queued") or not isinstance(output, (list, tuple)):
        return None, (), None
    found: list[ToolCall] = []
    for item in output:
        kind = _get(item, "type")
        if kind in _CALLERS_ITEMS:
            call_id = _get(item, "call_id") or _get(item, "id")
            name, arguments = _name_and_arguments(item)
            call = _tool_call(call_id, name or str(kind), arguments)
            if call is not None:
                found.append(call)
    if found and status != "incomplete":
        return Boundary.TOOL, tuple(found), None
    return Boundary.USER, (), None


def _name_and_arguments(call: Any) -> tuple[Any, Any]:
    arguments = _get(call, "arguments")
    return _get(call, "name"), _get(call, "input") if arguments is None else arguments


def _tool_call(call_id: Any, name: Any, arguments: Any) -> ToolCall | None:
    if isinstance(call_id, str) and call_id and isinstance(name, str) and name:
        text = arguments if isinstance(arguments, str) else None
        return _short(ToolCall(call_id, name, text))
    return None


def _short(call: ToolCall) -> ToolCall:
    """Drop arguments that are too long to keep until the results come."""
    if call.arguments is not None and len(call.arguments) > MAX_ARGUMENT_CHARS:
        return ToolCall(call.id, call.name, None)
    return call


def _usage(usage: Any) -> tuple[int | None, int | None]:
    of = dict.get if isinstance(usage, dict) else getattr
    prompt = of(usage, "prompt_tokens", None)
    if prompt is None:
        prompt, details = of(usage, "input_tokens", None), of(usage, "input_tokens_details", None)
    else:
        details = of(usage, "prompt_tokens_details", None)
    cached = None if details is None else _get(details, "cached_tokens")
    return _count(prompt), _count(cached)


def _count(value: Any) -> int | None:
    return value if type(value) is int else None
