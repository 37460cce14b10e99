"""What a request says about itself: turn, call, cause, and fingerprints of its messages.

Pure but for the memo that is handed in. Everything is a function of the request's body, so
that a retry, a replay and another process come to the same turn, call and cause.

A history is cut into *inputs*, the runs of messages between two outputs of the model.
An input with tool results continues its turn; one with a user's message starts the next.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from turncache.memo import NO_TOOLS, Memo, Tools, place_of
from turncache.messages import FINGERPRINT_BYTES, MODEL, SYSTEM, TOOL
from turncache.protocol import Cause

#: Members of a body that make it more than messages of a chat or items of a response.
_RARE: Final = frozenset({"prompt", "instructions", "previous_response_id", "conversation"})


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


def place_in_turn(kinds: str) -> tuple[int, int, Cause]:
    """Return turn, call and cause of a history given as one letter per message."""
    # A history that ends with the model's own words asks it to go on with them: the last
    # input is empty then, and nothing came back from a tool.
    cause = Cause.TOOL if kinds.find(TOOL, kinds.rfind(MODEL) + 1) >= 0 else Cause.USER
    return *place_of(kinds), cause


def echoed_calls(reading: Reading) -> Iterator[tuple[int, str, str]]:
    """Yield (message index, tool call id, arguments) of the outputs before the last input."""
    end = reading.kinds.rfind(MODEL) + 1
    start = len(reading.kinds[:end].rstrip(MODEL))
    for at in range(end - 1, start - 1, -1):
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
