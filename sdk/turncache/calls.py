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

import functools
import marshal
import re
import sys
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter, methodcaller
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
_CALL: Final = itemgetter("id", "type", "function")
_FUNCTION: Final = itemgetter("name", "arguments")
_MODEL_ITEMS: Final = frozenset({"reasoning", "mcp_approval_request", "mcp_list_tools"})
_TOOL_ITEMS: Final = frozenset({"mcp_approval_response"})

# Version 2 writes values only: no references between equal objects, no interning flags.
# Equal bodies give equal bytes at a fraction of json's cost, and nothing is ever loaded.
_MARSHAL: Final = 2
FINGERPRINT_BYTES: Final = 8
_HEAD: Final = 3
#: Shorter histories are read again sooner than they are compared.
_WORTH_IT: Final = 5
#: So many messages at the end of a known history are counted again before that is kept.
_LONG_TAIL: Final = 64
#: Members of a body that make it more than messages of a chat or items of a response.
_RARE: Final = frozenset({"prompt", "instructions", "previous_response_id", "conversation"})
_MAX_TOOLS_KEPT: Final = 32


class Tools(NamedTuple):
    """The tools of a request: names in order, and a fingerprint of the definitions."""

    names: tuple[str, ...] = ()
    digest: int = 0


NO_TOOLS: Final = Tools()


class Reading(NamedTuple):
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
        previous: answer or conversation that the server keeps and this request continues.
        instructions: the instructions of a responses request.
    """

    model: str
    messages: Sequence[Any] = ()
    kinds: str = ""
    start: int = 0
    system: bytes = b""
    history: bytes = b""
    tools: Tools = NO_TOOLS
    turn: int | None = None
    call: int | None = None
    cause: Cause | None = None
    previous: str | None = None
    instructions: str | None = None

    @property
    def results(self) -> tuple[str, ...]:
        """Ids of the tool calls whose results this request brings."""
        kinds = self.kinds
        last = kinds.rfind(MODEL) + 1
        found = [
            message.get("tool_call_id") or message.get("call_id")
            for kind, message in zip(kinds[last:], self.messages[last:], strict=True)
            if kind == TOOL
        ]
        return tuple([call_id for call_id in found if type(call_id) is str])

    def point_before(self, length: int) -> int:
        """Return the next shorter length of history at which a call was made, 0 when none.

        A call is made before each run of outputs of the model, and at the end of the history.
        """
        kinds, start = self.kinds, self.start
        outputs = kinds.rfind(MODEL, start, start + length) + 1
        return len(kinds[start:outputs].rstrip(MODEL))


@dataclass(slots=True, eq=False)
class _History:
    """What is known of one history; ``messages`` are copies that nobody else can change.

    ``turns`` and ``results`` are counted up to ``settled``, which is where an input begins.
    """

    messages: list[Any] = field(default_factory=list)
    kinds: str = ""
    prints: bytes = b""
    num_bytes: int = 0
    settled: int = 0
    turns: int = 0
    results: int = 0

    def place(self, kinds: str) -> tuple[int, int]:
        """Return turn and call of a history that goes on from this one."""
        tail = kinds[self.settled :]
        turns, results = (_inputs_in if len(tail) <= _LONG_TAIL else _count_inputs)(tail)
        if turns:
            return self.turns + turns, 1 + results
        return self.turns or 1, 1 + self.results + results

    def settle(self) -> None:
        """Count up to the last input that is known."""
        settled = self.kinds.rfind(MODEL) + 1
        turns, results = _count_inputs(self.kinds[self.settled : settled])
        self.results = results if turns else self.results + results
        self.turns += turns
        self.settled = settled


class Memo:
    """Fingerprints of the latest histories, so that an old prefix is compared, not hashed.

    Keeps copies of the messages of the latest requests: at most ``max_histories`` of at
    most ``max_bytes`` together. The containers are copied, because a caller may change a
    message in place: an object that is the same may hold something else. Texts cannot
    change and are shared, so that comparing a growing history, whose texts are mostly the
    same objects, costs a fraction of hashing it. Messages are compared as Python compares
    values: the order of keys within one does not count.
    """

    def __init__(self, *, max_histories: int = 32, max_bytes: int = 8_000_000) -> None:
        """Start empty."""
        self._max_histories = max_histories
        self._max_bytes = max_bytes
        # By marks of the first messages: histories that began alike take turns.
        self._histories: OrderedDict[tuple[Any, ...], _History] = OrderedDict()
        # The one that was read last, which the next request goes on with most often.
        self._latest = _History()
        self._num_bytes = 0
        self._tools: dict[bytes, Tools] = {}

    def read(self, messages: Sequence[Any]) -> tuple[str, bytes, int, int]:
        """Return kinds and fingerprints of ``messages``, and the turn and call they are in."""
        num_messages = len(messages)
        if num_messages < _WORTH_IT or not self._max_histories:
            kinds, prints, _, _ = _scan(messages)
            return kinds, prints, *_NO_HISTORY.place(kinds)
        latest = self._latest
        num_known = len(latest.messages)
        if _HEAD <= num_known <= num_messages and messages[:num_known] == latest.messages:
            return self._extend(latest, messages[num_known:])
        return self._find(messages)

    def read_tools(self, tools: Any) -> Tools:
        """Return what :func:`read_tools` does; the same tools come with every request."""
        if type(tools) is not list or not tools:
            return read_tools(tools)
        written = _bytes_of(tools)
        known = self._tools.get(written)
        if known is None:
            known = self._tools[written] = Tools(_names_of(tools), hash(written))
            if len(self._tools) > _MAX_TOOLS_KEPT:
                del self._tools[next(iter(self._tools))]
        return known

    def _find(self, messages: Sequence[Any]) -> tuple[str, bytes, int, int]:
        """Read messages that do not go on with the latest history."""
        first, second, third = messages[:_HEAD]
        head = _mark(first), _mark(second), _mark(third)
        known = self._histories.get(head)
        if known is None:
            return self._extend(self._started(head), messages)
        old = known.messages
        num_known, num_messages = len(old), len(messages)
        if messages[:num_known] != old[:num_messages]:
            return self._extend(self._started(head), messages)
        self._histories.move_to_end(head)
        self._latest = known
        if num_messages >= num_known:
            return self._extend(known, messages[num_known:])
        # An earlier call of it, made again.
        kinds = known.kinds[:num_messages]
        return kinds, known.prints[: num_messages * FINGERPRINT_BYTES], *_NO_HISTORY.place(kinds)

    def _started(self, head: tuple[Any, ...]) -> _History:
        """Start a history in the place of the one that began alike, as the latest."""
        before = self._histories.pop(head, None)
        if before is not None:
            self._num_bytes -= before.num_bytes
        history = self._latest = self._histories[head] = _History()
        self._shrink()
        return history

    def _extend(self, history: _History, new: Sequence[Any]) -> tuple[str, bytes, int, int]:
        """Add ``new`` to the latest history; return what is known of all of it."""
        kinds, prints, copies, num_bytes = _scan(new)
        kinds, prints = history.kinds + kinds, history.prints + prints
        turn, call = history.place(kinds)
        history.messages += copies
        num_known = len(history.messages)
        # What cannot be copied, and what comes after it, is read again every time.
        history.kinds, history.prints = kinds[:num_known], prints[: num_known * FINGERPRINT_BYTES]
        if num_known - history.settled > _LONG_TAIL:
            history.settle()
        history.num_bytes += num_bytes
        self._num_bytes += num_bytes
        if self._num_bytes > self._max_bytes:
            self._shrink()
        return kinds, prints, turn, call

    def _shrink(self) -> None:
        """Let the oldest histories go until the rest is within bounds."""
        histories = self._histories
        while histories and (
            self._num_bytes > self._max_bytes or len(histories) > self._max_histories
        ):
            _, gone = histories.popitem(last=False)
            self._num_bytes -= gone.num_bytes
            if gone is self._latest:
                self._latest = _History()


def read_call(body: Mapping[str, Any], memo: Memo) -> Reading:
    """Read a request's body: chat completions, responses or completions."""
    messages = body.get("messages")
    previous = instructions = None
    if type(messages) is not list or not _RARE.isdisjoint(body):
        if "prompt" in body:
            # Legacy completions show text or tokens, and no messages to tell a turn by.
            return Reading(str(body.get("model") or ""))
        messages, instructions = _messages(body)
        previous = _previous(body)
    kinds, prints, turn, call = memo.read(messages)
    start = len(kinds) - len(kinds.lstrip(SYSTEM))
    system, history = prints[: start * FINGERPRINT_BYTES], prints[start * FINGERPRINT_BYTES :]
    if instructions is not None:
        system = array("q", [hash(("instructions", instructions))]).tobytes() + system
    tools = body.get("tools")
    # By position, which costs a third of what it costs by name.
    return Reading(
        str(body.get("model") or ""),
        messages,
        kinds,
        start,
        system,
        history,
        NO_TOOLS if tools is None else memo.read_tools(tools),
        # The server keeps the rest of the history: what is here shows the cause only.
        turn if previous is None else None,
        call if previous is None else None,
        Cause.TOOL if kinds.find(TOOL, kinds.rfind(MODEL) + 1) >= 0 else Cause.USER,
        previous,
        instructions,
    )


def read_tools(tools: Any) -> Tools:
    """Return names and digest of a request's tools; the order of keys counts."""
    if not isinstance(tools, (list, tuple)) or not tools:
        return NO_TOOLS
    return Tools(_names_of(tools), hash(_bytes_of(tools)))


def place_in_turn(kinds: str) -> tuple[int, int, Cause]:
    """Return turn, call and cause of a history given as one letter per message."""
    # A history that ends with the model's own words asks it to go on with them: the last
    # input is empty then, and nothing came back from a tool.
    cause = Cause.TOOL if kinds.find(TOOL, kinds.rfind(MODEL) + 1) >= 0 else Cause.USER
    return *_NO_HISTORY.place(kinds), cause


def _count_inputs(kinds: str) -> tuple[int, int]:
    """Return how many inputs begin a turn, and how many bring results after the last of them."""
    openings = list(map(_END, _OPENING.finditer(kinds)))
    return len(openings), len(_RESULTS.findall(kinds, openings[-1] if openings else 0))


#: The same for the short histories, and ends of long ones, that come again and again.
_inputs_in: Final = functools.lru_cache(maxsize=4096)(_count_inputs)
_NO_HISTORY: Final = _History()


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
            if _LEAVES.issuperset(map(type, message.values())):
                prints.append(hash(frozenset(message.items())))
                if is_plain:
                    copies.append(message.copy())
                    num_bytes += sum(map(sys.getsizeof, message.values()))
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


def _any_message(message: Any, is_plain: bool) -> tuple[int, Any, int]:
    """Return fingerprint, copy and size of a message of any shape.

    The copy is None unless it is wanted and the message is plain JSON data.
    """
    fingerprint = _fingerprint(message)
    if not is_plain:
        return fingerprint, None, 0
    try:
        return fingerprint, _copied(message), len(_bytes_of(message))
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


def _calls_in(message: dict[str, Any]) -> tuple[int, dict[str, Any], int] | None:
    """Return fingerprint, copy and size of an answer with tool calls in the usual shape.

    None in any other shape.
    """
    calls, rest = message["tool_calls"], {**message, "tool_calls": None}
    if type(calls) is not list:
        return None
    leaves, copies = [*rest.values()], []
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
    if not _LEAVES.issuperset(map(type, leaves)):
        return None
    fingerprint = hash((frozenset(rest.items()), tuple(leaves[len(rest) :])))
    rest["tool_calls"] = copies
    return fingerprint, rest, sum(map(sys.getsizeof, leaves))


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
        if _LEAVES.issuperset(map(type, value.values())):
            return frozenset(value.items())
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


def _names_of(tools: Sequence[Any]) -> tuple[str, ...]:
    return tuple([_tool_name(tool) for tool in tools])


def _tool_name(tool: Any) -> str:
    if not isinstance(tool, Mapping):
        return ""
    inner = tool.get("function", tool)
    name = inner.get("name") if isinstance(inner, Mapping) else None
    return str(name or tool.get("type") or "")
