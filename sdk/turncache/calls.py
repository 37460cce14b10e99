"""What a request says about itself: turn, call, cause, and fingerprints of its messages.

Pure but for one memo, which changes how long an answer takes and never the answer.
Everything is a function of the request's body, so that a retry, a replay and another
process come to the same turn, call and cause.

A history is cut into *inputs*, the runs of messages between two outputs of the model.
An input with tool results continues its turn; one with a user's message starts the next.
Fingerprints are hashes of this process (:func:`hash`): they are compared here and never
sent, stored or logged.
"""

from __future__ import annotations

import marshal
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from turncache.protocol import Cause

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
_MODEL_ITEMS: Final = frozenset({"reasoning", "mcp_approval_request", "mcp_list_tools"})
_TOOL_ITEMS: Final = frozenset({"mcp_approval_response"})

# Version 2 writes values only: no references between equal objects, no interning flags.
# Equal bodies give equal bytes at a fraction of json's cost, and nothing is ever loaded.
_MARSHAL: Final = 2
FINGERPRINT_BYTES: Final = 8
_HEAD: Final = 3
#: Shorter histories are read again sooner than they are compared.
_WORTH_IT: Final = 5


class Tools(NamedTuple):
    """The tools of a request: names in order, and a fingerprint of the definitions."""

    names: tuple[str, ...] = ()
    digest: int = 0


NO_TOOLS: Final = Tools()


@dataclass(slots=True, eq=False)
class Reading:
    """What one request says.

    Attributes:
        model: name of the model.
        messages: the messages or input items, as sent.
        kinds: one letter per message.
        start: index of the first message after the leading system messages.
        system: fingerprints of the leading system messages, 8 bytes each; instructions
            count as the first.
        history: fingerprints of the messages from ``start`` on.
        tools: the tools offered to the model.
        turn: number of the turn, from 1, None when the body does not show it.
        call: number of the call in its turn, from 1, None likewise.
        cause: why the call is made, None likewise.
        results: ids of the tool calls whose results this request brings.
        previous: answer or conversation that the server keeps and this request continues.
        instructions: the instructions of a responses request.
    """

    model: str
    messages: Sequence[Any]
    kinds: str
    start: int
    system: bytes
    history: bytes
    tools: Tools
    turn: int | None
    call: int | None
    cause: Cause | None
    results: tuple[str, ...]
    previous: str | None
    instructions: str | None = None

    def points(self) -> Iterator[int]:
        """Yield the lengths of history at which a call was or is made, longest first.

        A call is made before each run of outputs of the model, and at the end.
        """
        kinds = self.kinds[self.start :]
        at = len(kinds)
        yield at
        while (at := kinds.rfind(MODEL, 0, at)) > 0:
            if kinds[at - 1] != MODEL:
                yield at


@dataclass(slots=True, eq=False)
class _History:
    """What is known of one history; ``messages`` are copies that nobody else can change."""

    messages: list[Any]
    kinds: str
    prints: bytes
    num_chars: int


class Memo:
    """Fingerprints of the latest histories, so that an old prefix is compared, not hashed.

    Keeps copies of the messages of the latest requests: at most ``max_histories`` of at
    most ``max_chars`` together. The containers are copied, because a caller may change a
    message in place: an object that is the same may hold something else. Texts cannot
    change and are shared, so that comparing a growing history, whose texts are mostly the
    same objects, costs a fraction of hashing it. Messages are compared as Python compares
    values: the order of keys within one does not count.
    """

    def __init__(self, *, max_histories: int = 32, max_chars: int = 8_000_000) -> None:
        """Start empty."""
        self._max_histories = max_histories
        self._max_chars = max_chars
        # By marks of the first messages: histories that began alike take turns.
        self._histories: OrderedDict[tuple[Any, ...], _History] = OrderedDict()
        self._num_chars = 0

    def read(self, messages: Sequence[Any]) -> tuple[str, bytes]:
        """Return kinds and fingerprints of ``messages``."""
        if len(messages) < _WORTH_IT or not self._max_histories:
            return _scan(messages)
        head = tuple([_mark(message) for message in messages[:_HEAD]])
        known = self._histories.get(head)
        num_known = 0 if known is None else len(known.messages)
        num_new = len(messages) - num_known
        if num_new < 0 and known is not None and messages == known.messages[:num_new]:
            # An earlier call of it, made again.
            self._histories.move_to_end(head)
            return known.kinds[:num_new], known.prints[: num_new * FINGERPRINT_BYTES]
        if known is None or messages[:num_known] != known.messages:
            kinds, prints = _scan(messages)
            self._keep(head, _History([], kinds, prints, 0), messages)
            return kinds, prints
        self._histories.move_to_end(head)
        if not num_new:
            return known.kinds, known.prints
        new = messages[num_known:]
        new_kinds, new_prints = _scan(new)
        kinds, prints = known.kinds + new_kinds, known.prints + new_prints
        known.kinds, known.prints = kinds, prints
        self._add(known, new)
        return kinds, prints

    def _keep(self, head: tuple[Any, ...], history: _History, messages: Sequence[Any]) -> None:
        gone = self._histories.pop(head, None)
        if gone is not None:
            self._num_chars -= gone.num_chars
        self._histories[head] = history
        self._add(history, messages)

    def _add(self, history: _History, messages: Sequence[Any]) -> None:
        """Add copies of ``messages`` to a history that has their kinds and fingerprints."""
        num_chars = 0
        try:
            for message in messages:
                history.messages.append(_copied(message))
                num_chars += _num_chars(message)
        except TypeError:
            # Not plain JSON data (a model object): known is what comes before it.
            num_known = len(history.messages)
            history.kinds = history.kinds[:num_known]
            history.prints = history.prints[: num_known * FINGERPRINT_BYTES]
        history.num_chars += num_chars
        self._num_chars += num_chars
        while self._histories and (
            len(self._histories) > self._max_histories or self._num_chars > self._max_chars
        ):
            _, gone = self._histories.popitem(last=False)
            self._num_chars -= gone.num_chars


def read_call(body: Mapping[str, Any], memo: Memo) -> Reading:
    """Read a request's body: chat completions, responses or completions."""
    if "prompt" in body:
        # Legacy completions show text or tokens, and no messages to tell a turn by.
        model = str(body.get("model") or "")
        return Reading(model, (), "", 0, b"", b"", NO_TOOLS, None, None, None, (), None)
    messages, instructions = _messages(body)
    kinds, prints = memo.read(messages)
    start = 0
    while kinds[start : start + 1] == SYSTEM:
        start += 1
    system, history = prints[: start * FINGERPRINT_BYTES], prints[start * FINGERPRINT_BYTES :]
    if instructions is not None:
        system = _pack([hash(("instructions", instructions))]) + system
    previous = _previous(body)
    turn, call, cause = place_in_turn(kinds)
    return Reading(
        model=str(body.get("model") or ""),
        messages=messages,
        kinds=kinds,
        start=start,
        system=system,
        history=history,
        tools=read_tools(body.get("tools")),
        # The server keeps the rest of the history: what is here shows the cause only.
        turn=None if previous else turn,
        call=None if previous else call,
        cause=cause,
        results=_results(messages, kinds) if cause is Cause.TOOL else (),
        previous=previous,
        instructions=instructions,
    )


def read_tools(tools: Any) -> Tools:
    """Return names and digest of a request's tools; the order of keys counts."""
    if not isinstance(tools, (list, tuple)) or not tools:
        return NO_TOOLS
    return Tools(tuple([_tool_name(tool) for tool in tools]), hash(_bytes_of(tools)))


def place_in_turn(kinds: str) -> tuple[int, int, Cause]:
    """Return turn, call and cause of a history given as one letter per message."""
    turn, call = 0, 1
    inputs = kinds.split(MODEL)
    for part in inputs:
        if TOOL in part:
            call += 1
        elif USER in part:
            turn, call = turn + 1, 1
    # A history that ends with the model's own words asks it to go on with them: the last
    # input is empty then, and nothing came back from a tool.
    return max(turn, 1), call, Cause.TOOL if TOOL in inputs[-1] else Cause.USER


def echoed_calls(reading: Reading) -> Iterator[tuple[int, str, str]]:
    """Yield (message index, tool call id, arguments) of the outputs before the last input."""
    end = len(reading.kinds)
    while end and reading.kinds[end - 1] != MODEL:
        end -= 1
    at = end
    while at and reading.kinds[at - 1] == MODEL:
        at -= 1
        message = reading.messages[at]
        items = message.get("tool_calls") if "role" in message else [message]
        for item in items or ():
            call = _call_of(item)
            if call is not None:
                yield (at, *call)


def _call_of(item: Any) -> tuple[str, str] | None:
    if not isinstance(item, Mapping):
        return None
    inner = item.get("function") or item.get("custom") or item
    call_id = item.get("call_id") or item.get("id")
    arguments = inner.get("arguments", inner.get("input")) if isinstance(inner, Mapping) else None
    if isinstance(call_id, str) and isinstance(arguments, str):
        return call_id, arguments
    return None


def _messages(body: Mapping[str, Any]) -> tuple[Sequence[Any], str | None]:
    messages = body.get("messages")
    instructions = body.get("instructions")
    if messages is None:
        messages = body.get("input")
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    if not isinstance(messages, list):
        messages = list(messages) if isinstance(messages, tuple) else []
    return messages, instructions if isinstance(instructions, str) else None


def _previous(body: Mapping[str, Any]) -> str | None:
    previous = body.get("previous_response_id") or body.get("conversation")
    if isinstance(previous, dict):
        previous = previous.get("id")
    return previous if isinstance(previous, str) and previous else None


def _scan(messages: Sequence[Any]) -> tuple[str, bytes]:
    """Return kinds and fingerprints: the one pass over messages, kept in one loop."""
    kinds: list[str] = []
    prints: list[int] = []
    for message in messages:
        if type(message) is not dict:
            kinds.append(_kind_of_item(message))
            prints.append(_fingerprint(message))
            continue
        role, content = message.get("role"), message.get("content")
        if type(role) is not str:
            kinds.append(_kind_of_item(message))
            prints.append(_fingerprint(message))
            continue
        kinds.append(_ROLES.get(role, OTHER))
        # A string keeps its hash: the common shapes cost no pass over the text.
        if type(content) is str and len(message) == 2:
            prints.append(hash((role, content)))
        elif type(content) is str and len(message) == 3 and "tool_call_id" in message:
            prints.append(hash((role, content, _key(message["tool_call_id"]))))
        elif "tool_calls" in message:
            prints.append(_fingerprint_of_calls(message, role, content))
        else:
            prints.append(_fingerprint(message))
    return "".join(kinds), _pack(prints)


def _mark(message: Any) -> str | None:
    """Return a text that tells this message from most others at the same place."""
    if type(message) is not dict:
        return None
    content = message.get("content")
    if content is None:
        calls = message.get("tool_calls")
        if isinstance(calls, list) and calls and isinstance(calls[0], dict):
            content = calls[0].get("id")
    return content if type(content) is str else None


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


def _results(messages: Sequence[Any], kinds: str) -> tuple[str, ...]:
    found = []
    for at in range(len(kinds) - 1, -1, -1):
        if kinds[at] == MODEL:
            break
        if kinds[at] == TOOL:
            message = messages[at]
            call_id = message.get("tool_call_id") or message.get("call_id")
            if isinstance(call_id, str):
                found.append(call_id)
    return tuple(reversed(found))


def _pack(prints: list[int]) -> bytes:
    return array("q", prints).tobytes()


def _fingerprint_of_calls(message: dict[str, Any], role: str, content: Any) -> int:
    """Return the fingerprint of an answer with tool calls, quickly when it has the usual shape."""
    try:
        parts = [role, content, len(message)]
        if len(message) == 2 + ("content" in message):
            for call in message["tool_calls"]:
                function = call["function"]
                if len(call) != 3 or len(function) != 2:
                    return _fingerprint(message)
                parts += (call["id"], call["type"], function["name"], function["arguments"])
            return hash(tuple(parts))
    except (KeyError, TypeError):
        pass
    return _fingerprint(message)


def _fingerprint(message: Any) -> int:
    try:
        return hash(_key(message))
    except TypeError:
        # Not plain JSON data (a model object): its text stands for it.
        return hash(_bytes_of(message))


def _key(value: Any) -> Any:
    """Return what stands for JSON data; templates read by key, so that order does not count.

    Its hash is made of the hashes that strings keep: no text is read twice.
    """
    if type(value) is str or value is None:
        return value
    if type(value) is dict:
        return frozenset([(name, _key(item)) for name, item in value.items()])
    if type(value) is list:
        return tuple([_key(item) for item in value])
    return value


def _bytes_of(value: Any) -> bytes:
    try:
        return marshal.dumps(value, _MARSHAL)
    except ValueError:
        # Not plain JSON data (a model object, a date): its text stands for it.
        return repr(value).encode("utf-8", "surrogatepass")


def _num_chars(message: Any) -> int:
    content = message.get("content") if isinstance(message, Mapping) else message
    if content is None:
        return 0
    return len(content) if isinstance(content, str) else len(_bytes_of(content))


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


def _tool_name(tool: Any) -> str:
    if not isinstance(tool, Mapping):
        return ""
    inner = tool.get("function", tool)
    name = inner.get("name") if isinstance(inner, Mapping) else None
    return str(name or tool.get("type") or "")
