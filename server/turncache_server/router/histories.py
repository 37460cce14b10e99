"""The messages of each API in one form, so that a conversation can be followed in any. Pure.

What a template reads of a message counts (role, text, tool calls, results); identifiers,
reasoning and marks such as ``cache_control`` do not: clients drop, move or rename them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from turncache_server.router.body import Body
from turncache_server.router.following import History, Message, Said, chain

# Not sets: a client may send any JSON as a type, and not all of it can be hashed.
_TEXTS: Final = ("text", "input_text", "output_text")
_REASONING: Final = ("reasoning", "reasoning_text", "redacted_thinking", "thinking")
_CALLS: Final = ("function_call", "custom_tool_call")
#: Claude Code counts its requests in a system block, which vLLM drops before the template
#: (``_extract_system_text``).
_BILLING: Final = "x-anthropic-billing-header"


def chat_history(scope: str, body: Body) -> History | None:
    """Read the messages of ``/v1/chat/completions``.

    Args:
        scope: whatever separates conversations beside their content: tenant and model.
        body: checked by the API.
    """
    return chain(scope, map(_of_chat, body.get("messages")))


def messages_history(scope: str, body: Body) -> History | None:
    """Read system prompt and messages of ``/v1/messages``; arguments as for chat."""
    return chain(scope, _of_messages(body.get("system"), body.get("messages")))


def response_history(scope: str, body: Body) -> History | None:
    """Read instructions and input of ``/v1/responses``; arguments as for chat.

    None for a request that continues an answer which an engine keeps: most of its history
    is not in it.
    """
    if body.get("previous_response_id"):
        return None
    given = body.get("input")
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    return chain(scope, _of_items(body.get("instructions"), items))


def _of_chat(message: Mapping[str, Any]) -> Message:
    role, (text, media) = message.get("role"), _content(message.get("content"))
    if role == "assistant":
        calls = message.get("tool_calls")
        reasoning = bool(message.get("reasoning") or message.get("reasoning_content"))
        return Said(text=text, calls=tuple(_functions(calls)), media=media, reasoning=reasoning)
    return role, text, media, message.get("tool_call_id")


def _functions(calls: Any) -> Iterator[tuple[str, Any]]:
    for call in calls if isinstance(calls, list) else ():
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict):
            yield str(function.get("name")), function.get("arguments")


def _of_messages(system: Any, messages: list[dict[str, Any]]) -> Iterator[Message]:
    blocks = [{"type": "text", "text": system}] if isinstance(system, str) else system or ()
    text, media = _content([block for block in blocks if not is_billing(block)])
    yield "system", text, media
    for message in messages:
        role, content = message.get("role"), message.get("content")
        parts = content if isinstance(content, list) else ()
        text, media = _content(content, besides=("tool_use", "tool_result"))
        if role == "assistant":
            calls = [
                (str(part.get("name")), part.get("input"))
                for part in _of_type(parts, ("tool_use",))
            ]
            reasoning = bool(_of_type(parts, _REASONING))
            yield Said(text=text, calls=tuple(calls), media=media, reasoning=reasoning)
        else:
            results = [_content(part.get("content")) for part in _of_type(parts, ("tool_result",))]
            yield role, text, media, results


def is_billing(block: Any) -> bool:
    """Say whether a block of a system prompt is Claude Code's line for its provider.

    It is another one in every request, and vLLM drops it before the template.
    """
    return isinstance(block, dict) and str(block.get("text")).startswith(_BILLING)


def _of_items(instructions: Any, items: list[dict[str, Any]]) -> Iterator[Message]:
    """Put the items of an answer together: a response is a message and its calls, apart."""
    yield "system", instructions
    answer: list[dict[str, Any]] = []
    for item in items:
        kind = item.get("type")
        if item.get("role") == "assistant" or kind in _CALLS or kind == "reasoning":
            answer.append(item)
            continue
        if answer:
            yield said_in_items(answer)
            answer = []
        text, media = _content(item.get("content"))
        yield item.get("role"), text, media, _content(item.get("output"))
    if answer:
        yield said_in_items(answer)


def said_in_items(items: Iterable[Mapping[str, Any]]) -> Said:
    """Return what the items of a response say."""
    said = list(items)
    kept = [item for item in said if item.get("type") != "reasoning"]
    text = "".join(_content(item.get("content"))[0] for item in kept)
    calls = tuple(_calls_of_items(kept))
    return Said(text=text, calls=calls, reasoning=len(kept) < len(said))


def _calls_of_items(items: Iterable[Mapping[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Return name and arguments of the items that are tool calls."""
    for item in items:
        if item.get("type") in _CALLS:
            arguments = item.get("arguments")
            yield str(item.get("name")), item.get("input") if arguments is None else arguments


def _content(content: Any, *, besides: tuple[str, ...] = ()) -> tuple[str, tuple[Any, ...]]:
    """Return the text of a content, and its parts that are neither text nor reasoning.

    Args:
        content: a text, or parts.
        besides: types of parts that are read elsewhere.
    """
    if isinstance(content, str):
        return content, ()
    texts: list[str] = []
    media: list[Any] = []
    for part in content if isinstance(content, list) else ():
        kind = part.get("type") if isinstance(part, dict) else None
        if kind in _TEXTS:
            texts.append(str(part.get("text", "")))
        elif kind not in _REASONING and kind not in besides:
            media.append(part)
    return "".join(texts), tuple(media)


def _of_type(parts: Iterable[Any], kinds: tuple[str, ...]) -> list[dict[str, Any]]:
    return [part for part in parts if isinstance(part, dict) and part.get("type") in kinds]
