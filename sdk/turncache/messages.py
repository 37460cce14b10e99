"""What a request's messages are: a letter for each, fingerprints, copies.

Fingerprints are hashes of this process (:func:`hash`): they are compared here and never
sent, stored or logged.
"""

from __future__ import annotations

import marshal
import sys
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import itemgetter
from typing import Any, Final

# One letter per message: what it is to the model.
SYSTEM, USER, MODEL, TOOL, OTHER = "s", "u", "m", "t", "o"
_ROLES: Final = {
    "user": USER,
    "assistant": MODEL,
    "tool": TOOL,
    "function": TOOL,
    "system": SYSTEM,
    "developer": SYSTEM,
}
_LEAVES: Final = frozenset({str, type(None), bool, int, float})
_CALL: Final = itemgetter("id", "type", "function")
_FUNCTION: Final = itemgetter("name", "arguments")
_SIZE_OF_TEXT: Final[Callable[[str], int]] = str.__sizeof__
_MODEL_ITEMS: Final = frozenset({"reasoning", "mcp_approval_request", "mcp_list_tools"})
_TOOL_ITEMS: Final = frozenset({"mcp_approval_response"})

# Version 2 writes values only: no references between equal objects, no interning flags.
# Equal bodies give equal bytes at a fraction of json's cost, and nothing is ever loaded.
_MARSHAL: Final = 2
FINGERPRINT_BYTES: Final = 8


def scan(messages: Sequence[Any]) -> tuple[str, bytes, list[Any], int]:
    """Read messages: the one pass over them, kept in one loop.

    Returns:
        Kinds, fingerprints, copies of the leading messages that are plain JSON data, and the
        size of what the copies hold.
    """
    kinds = ""
    prints: list[int] = []
    copies: list[Any] = []
    num_bytes, is_plain = 0, True
    for message in messages:
        found = None
        if type(message) is dict and type(role := message.get("role")) is str:
            kinds += _ROLES.get(role, OTHER)
            # A string keeps its hash: the common shapes cost no pass over the text.
            leaves = message.values()
            if _LEAVES.issuperset(map(type, leaves)):
                prints.append(hash(frozenset(message.items())))
                if is_plain:
                    copies.append(message.copy())
                    num_bytes += _size_of(leaves)
                continue
            if "tool_calls" in message:
                found = _calls_in(message)
        else:
            kinds += _kind_of_item(message)
        if found is None:
            found = _any_message(message, is_plain)
        fingerprint, copied, num_new = found
        prints.append(fingerprint)
        if is_plain and (is_plain := copied is not None):
            copies.append(copied)
            num_bytes += num_new
    return kinds, array("q", prints).tobytes(), copies, num_bytes


def mark(message: Any) -> str | None:
    """Return a text that tells this message from most others at the same place."""
    if type(message) is not dict:
        return None
    content = message.get("content")
    if type(content) is str:
        return content
    calls = message.get("tool_calls") if content is None else None
    if type(calls) is list and calls and type(calls[0]) is dict:
        call_id = calls[0].get("id")
        return call_id if type(call_id) is str else None
    return None


def bytes_of(value: Any) -> bytes:
    """Return bytes that equal values share; of what is no JSON data, of its text."""
    try:
        return marshal.dumps(value, _MARSHAL)
    except ValueError:
        # Not plain JSON data (a model object, a date): its text stands for it.
        return repr(value).encode("utf-8", "surrogatepass")


def _any_message(message: Any, is_plain: bool) -> tuple[int, Any, int]:
    """Return fingerprint, copy and size of a message of any shape.

    The copy is None unless it is wanted and the message is plain JSON data.
    """
    fingerprint = _fingerprint(message)
    if not is_plain:
        return fingerprint, None, 0
    try:
        return fingerprint, _copied(message), len(bytes_of(message))
    except TypeError:
        return fingerprint, None, 0


def _kind_of_item(message: Any) -> str:
    if not isinstance(message, Mapping):
        return OTHER
    item = message.get("type")
    if not isinstance(item, str):
        return OTHER
    if item.endswith("_output") or item in _TOOL_ITEMS:
        return TOOL
    if item.endswith("_call") or item in _MODEL_ITEMS:
        return MODEL
    return OTHER


def _calls_in(message: dict[str, Any]) -> tuple[int, dict[str, Any], int] | None:
    """Return fingerprint, copy and size of an answer with tool calls in the usual shape.

    None in any other shape.
    """
    calls = message["tool_calls"]
    if type(calls) is not list:
        return None
    rest = message.copy()
    rest["tool_calls"] = None
    leaves: list[Any] = []
    copies = []
    try:
        for call in calls:
            call_id, kind, function = _CALL(call)
            name, arguments = _FUNCTION(function)
            # Either has these members at least: five together are no others.
            if len(call) + len(function) != 5:
                return None
            leaves += call_id, kind, name, arguments
            function = {"name": name, "arguments": arguments}
            copies.append({"id": call_id, "type": kind, "function": function})
    except (KeyError, TypeError):
        return None
    said = tuple(leaves)
    leaves += rest.values()
    if not _LEAVES.issuperset(map(type, leaves)):
        return None
    fingerprint = hash((frozenset(rest.items()), said))
    rest["tool_calls"] = copies
    return fingerprint, rest, _size_of(leaves)


def _size_of(leaves: Iterable[Any]) -> int:
    """Return the size of what leaves hold: their texts, nearly always."""
    try:
        return sum(map(_SIZE_OF_TEXT, filter(None, leaves)))
    except TypeError:
        return sum(map(sys.getsizeof, leaves))


def _fingerprint(message: Any) -> int:
    try:
        return hash(_key(message))
    except TypeError:
        # Not plain JSON data (a model object): its text stands for it.
        return hash(bytes_of(message))


def _key(value: Any) -> Any:
    """Return what stands for JSON data; templates read by key, so that order does not count.

    Its hash is made of the hashes that strings keep: no text is read twice.
    """
    if type(value) is str or value is None:
        return value
    if type(value) is dict:
        if _LEAVES.issuperset(map(type, value.values())):
            return frozenset(value.items())
        return frozenset([(name, _key(item)) for name, item in value.items()])
    if type(value) is list:
        return tuple([_key(item) for item in value])
    return value


def _copied(value: Any) -> Any:
    """Return a copy of plain JSON data; texts and numbers are shared.

    Raises:
        TypeError: on anything else, which may change without being another object.
    """
    kind = type(value)
    if kind is dict:
        if _LEAVES.issuperset(map(type, value.values())):
            return value.copy()
        return {name: _copied(item) for name, item in value.items()}
    if kind is list:
        return [_copied(item) for item in value]
    if kind in _LEAVES:
        return value
    raise TypeError(f"{kind.__name__}: expected JSON data")
