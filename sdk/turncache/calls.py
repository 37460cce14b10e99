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
import re
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import methodcaller
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
# In letters of kinds: an input that begins a turn, and the results in one that continues it.
_OPENING: Final = re.compile("(?<![^m])[^mt]*u[^mt]*(?![^m])")
_RESULTS: Final = re.compile("t[^m]*")
_END: Final[Callable[[re.Match[str]], int]] = methodcaller("end")
_LEAVES: Final = frozenset({str, type(None), bool, int, float})
_TEXT: Final = frozenset({str})
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

    def point_before(self, length: int) -> int:
        """Return the next shorter length of history at which a call was made, 0 when none.

        A call is made before each run of outputs of the model, and at the end of the history.
        """
        kinds, start = self.kinds, self.start
        at = kinds.rfind(MODEL, start, start + length)
        while at > start:
            if kinds[at - 1] != MODEL:
                return at - start
            at -= 1
        return 0


@dataclass(slots=True, eq=False)
class _History:
    """What is known of one history; ``messages`` are copies that nobody else can change."""

    messages: list[Any] = field(default_factory=list)
    kinds: str = ""
    prints: bytes = b""
    num_chars: int = 0


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
        num_messages = len(messages)
        if num_messages < _WORTH_IT or not self._max_histories:
            kinds, prints, _, _ = _scan(messages)
            return kinds, prints
        first, second, third = messages[:_HEAD]
        head = _mark(first), _mark(second), _mark(third)
        known = self._histories.get(head)
        if known is None:
            return self._extend(head, _History(), messages)
        old = known.messages
        num_known = len(old)
        if num_messages < num_known:
            if messages != old[:num_messages]:
                return self._extend(head, _History(), messages)
            # An earlier call of it, made again.
            self._histories.move_to_end(head)
            return known.kinds[:num_messages], known.prints[: num_messages * FINGERPRINT_BYTES]
        if messages[:num_known] != old:
            return self._extend(head, _History(), messages)
        return self._extend(head, known, messages[num_known:])

    def _extend(
        self, head: tuple[Any, ...], history: _History, new: Sequence[Any]
    ) -> tuple[str, bytes]:
        """Add ``new`` to a history, kept as the latest; return what is known of all of it."""
        kinds, prints, copies, num_chars = _scan(new)
        kinds, prints = history.kinds + kinds, history.prints + prints
        messages = history.messages
        messages += copies
        num_known = len(messages)
        # What cannot be copied, and what comes after it, is read again every time.
        history.kinds = kinds if num_known == len(kinds) else kinds[:num_known]
        history.prints = prints[: num_known * FINGERPRINT_BYTES]
        histories = self._histories
        before = histories.get(head)
        if before is not history:
            self._num_chars -= 0 if before is None else before.num_chars
            histories[head] = history
        history.num_chars += num_chars
        self._num_chars += num_chars
        histories.move_to_end(head)
        while histories and (
            self._num_chars > self._max_chars or len(histories) > self._max_histories
        ):
            _, gone = histories.popitem(last=False)
            self._num_chars -= gone.num_chars
        return kinds, prints


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
    turn: int | None
    call: int | None
    turn, call, cause = place_in_turn(kinds)
    if previous is not None:
        # The server keeps the rest of the history: what is here shows the cause only.
        turn = call = None
    tools = body.get("tools")
    # By position, which costs a third of what it costs by name.
    return Reading(
        str(body.get("model") or ""),
        messages,
        kinds,
        start,
        system,
        history,
        NO_TOOLS if tools is None else read_tools(tools),
        turn,
        call,
        cause,
        _results(messages, kinds) if cause is Cause.TOOL else (),
        previous,
        instructions,
    )


def read_tools(tools: Any) -> Tools:
    """Return names and digest of a request's tools; the order of keys counts."""
    if not isinstance(tools, (list, tuple)) or not tools:
        return NO_TOOLS
    return Tools(tuple([_tool_name(tool) for tool in tools]), hash(_bytes_of(tools)))


def place_in_turn(kinds: str) -> tuple[int, int, Cause]:
    """Return turn, call and cause of a history given as one letter per message."""
    openings = list(map(_END, _OPENING.finditer(kinds)))
    call = 1 + len(_RESULTS.findall(kinds, openings[-1] if openings else 0))
    # A history that ends with the model's own words asks it to go on with them: the last
    # input is empty then, and nothing came back from a tool.
    cause = Cause.TOOL if kinds.find(TOOL, kinds.rfind(MODEL) + 1) >= 0 else Cause.USER
    return len(openings) or 1, call, cause


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


def _scan(messages: Sequence[Any]) -> tuple[str, bytes, list[Any], int]:
    """Read messages: the one pass over them, kept in one loop.

    Returns:
        Kinds, fingerprints, copies of the leading messages that are plain JSON data, and the
        number of characters in the copies.
    """
    kinds: list[str] = []
    prints: list[int] = []
    copies: list[Any] = []
    num_chars, is_plain = 0, True
    for message in messages:
        found: tuple[int, Any, int] | None = None
        if type(message) is dict and type(role := message.get("role")) is str:
            kinds.append(_ROLES.get(role, OTHER))
            content = message.get("content")
            # A string keeps its hash: the common shapes cost no pass over the text.
            if type(content) is str and len(message) == 2:
                found = hash((role, content)), message.copy(), len(content)
            elif "tool_calls" in message:
                found = _calls_in(message, role, content)
            elif (
                type(content) is str
                and len(message) == 3
                and type(call_id := message.get("tool_call_id")) is str
            ):
                found = hash((role, content, call_id)), message.copy(), len(content)
        else:
            kinds.append(_kind_of_item(message))
        if found is None:
            found = _any_message(message, is_plain)
        fingerprint, copied, num_new = found
        prints.append(fingerprint)
        if is_plain and (is_plain := copied is not None):
            copies.append(copied)
            num_chars += num_new
    return "".join(kinds), _pack(prints), copies, num_chars


def _any_message(message: Any, is_plain: bool) -> tuple[int, Any, int]:
    """Return fingerprint, copy and size of a message of any shape.

    The copy is None unless it is wanted and the message is plain JSON data.
    """
    fingerprint = _fingerprint(message)
    if not is_plain:
        return fingerprint, None, 0
    try:
        return fingerprint, _copied(message), _num_chars(message)
    except TypeError:
        return fingerprint, None, 0


def _mark(message: Any) -> str | None:
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
    """Return the ids of the tool calls whose results the last input brings."""
    found = []
    at = kinds.find(TOOL, kinds.rfind(MODEL) + 1)
    while at >= 0:
        message = messages[at]
        call_id = message.get("tool_call_id") or message.get("call_id")
        if type(call_id) is str:
            found.append(call_id)
        at = kinds.find(TOOL, at + 1)
    return tuple(found)


def _pack(prints: list[int]) -> bytes:
    return array("q", prints).tobytes()


def _calls_in(
    message: dict[str, Any], role: str, content: Any
) -> tuple[int, dict[str, Any], int] | None:
    """Return fingerprint, copy and size of an answer with tool calls in the usual shape.

    None in any other shape.
    """
    calls = message["tool_calls"]
    if (
        type(calls) is not list
        or len(message) != 2 + ("content" in message)
        or not (content is None or type(content) is str)
    ):
        return None
    parts, copies = [role, content, len(message)], []
    num_chars = 0 if content is None else len(content)
    try:
        for call in calls:
            function = call["function"]
            texts = call["id"], call["type"], function["name"], function["arguments"]
            if len(call) != 3 or len(function) != 2 or not _TEXT.issuperset(map(type, texts)):
                return None
            parts += texts
            copies.append({**call, "function": function.copy()})
            num_chars += len(texts[3])
    except (AttributeError, KeyError, TypeError):
        return None
    return hash(tuple(parts)), {**message, "tool_calls": copies}, num_chars


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
