"""What breaks the reuse of KV, said once and naming the message.

Pure but for the set of what has been said. A finding holds positions and kinds, never
text of a message.
"""

from __future__ import annotations

import enum
import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from turncache.calls import Reading
from turncache.memo import Tools
from turncache.messages import FINGERPRINT_BYTES, MODEL, TOOL

LOG: Final = logging.getLogger("turncache")

_TIME = re.compile(
    r"\b\d{1,2}:\d{2}(?::\d{2})?\b|\b\d{4}-\d{2}-\d{2}\b|\b\d{1,2}[./]\d{1,2}[./]\d{2,4}\b|\b1[5-9]\d{8}(?:\d{3})?\b"
)
# So many messages in a row make a part of a history recognisable at another place.
_NUM_RECOGNISED: Final = 2


class Break(enum.StrEnum):
    """Kinds of change that make the server compute a prompt again."""

    TIME_IN_SYSTEM = "time_in_system"
    SYSTEM_CHANGED = "system_changed"
    TOOLS_REORDERED = "tools_reordered"
    TOOLS_CHANGED = "tools_changed"
    MESSAGE_REWRITTEN = "message_rewritten"
    MESSAGES_DROPPED = "messages_dropped"
    ARGUMENTS_RESERIALISED = "arguments_reserialised"


_ADVICE: Final = {
    Break.TIME_IN_SYSTEM: "changed since the call before and holds a date or time: everything "
    "after it is computed again on every call. Move the time to the end of the history",
    Break.SYSTEM_CHANGED: "changed since the call before: everything after it is computed "
    "again. Keep it fixed, and append what changes to the end of the history",
    Break.TOOLS_REORDERED: "the same tools came in another order: templates put them before "
    "the messages, so the whole prompt is computed again. Sort them once",
    Break.TOOLS_CHANGED: "the tools changed since the call before: templates put them before "
    "the messages, so the whole prompt is computed again. Keep them fixed, down to the order "
    "of keys, and use tool_choice to forbid a call",
    Break.MESSAGE_REWRITTEN: "is not what it was in the call before: everything from it on is "
    "computed again. Append instead of rewriting",
    Break.MESSAGES_DROPPED: "and later ones were dropped from the middle of the history: "
    "everything from there on is computed again. Drop rarely and much, rather than a little "
    "on every call",
    Break.ARGUMENTS_RESERIALISED: "holds tool call arguments that are not the text that the "
    "model wrote (parsed and written again?): everything from it on is computed again. Keep "
    "the answer's string",
}


@dataclass(frozen=True, slots=True)
class Finding:
    """One change that broke reuse.

    Attributes:
        kind: what changed.
        message: index of the first message that changed, None when it was not a message.
    """

    kind: Break
    message: int | None = None

    def __str__(self) -> str:
        """Say what changed and what to do instead."""
        where = "" if self.message is None else f"message {self.message} "
        if self.kind in (Break.TIME_IN_SYSTEM, Break.SYSTEM_CHANGED):
            where = "the instructions " if self.message is None else f"{where}(system) "
        return f"{where}{_ADVICE[self.kind]}."


class Shape(NamedTuple):
    """What is kept of a call to compare the next one with."""

    system: bytes
    history: bytes
    tools: Tools


class Match(enum.Enum):
    """How a request relates to the shape of an earlier call."""

    SAME_LINE = "same line"
    FORK = "fork"
    OTHER = "other"


def shape_of(reading: Reading) -> Shape:
    """Return what is kept of a request."""
    return Shape(reading.system, reading.history, reading.tools)


def match(shape: Shape, reading: Reading) -> Match:
    """Say whether ``reading`` follows the call that ``shape`` is kept of."""
    old, new = shape.history, reading.history
    if shape.system != reading.system and len(old) <= FINGERPRINT_BYTES:
        # One question, two system prompts: two agents.
        return Match.OTHER
    if new.startswith(old) or _last_in_place(old, new) or _found_earlier(old, new):
        return Match.SAME_LINE
    return Match.FORK if num_common(old, new) else Match.OTHER


def findings(shape: Shape, reading: Reading) -> Iterator[Finding]:
    """Yield what broke reuse between an earlier call of a line and the next one."""
    yield from _system_findings(shape, reading)
    old, new = shape.tools, reading.tools
    if old.digest != new.digest:
        reordered = old.names != new.names and sorted(old.names) == sorted(new.names)
        yield Finding(Break.TOOLS_REORDERED if reordered else Break.TOOLS_CHANGED)
    before, after = shape.history, reading.history
    if not after.startswith(before) and not before.startswith(after):
        first = num_common(before, after)
        offset = reading.start
        if _last_in_place(before, after):
            if reading.kinds[offset + first] != MODEL or _same_results(shape, reading, first):
                yield Finding(Break.MESSAGE_REWRITTEN, offset + first)
        elif _found_earlier(before, after):
            yield Finding(Break.MESSAGES_DROPPED, offset + first)


def num_common(old: bytes, new: bytes) -> int:
    """Return how many leading fingerprints are equal."""
    low, high = 0, min(len(old), len(new)) // FINGERPRINT_BYTES
    while low < high:
        middle = (low + high + 1) // 2
        end = middle * FINGERPRINT_BYTES
        if old[:end] == new[:end]:
            low = middle
        else:
            high = middle - 1
    return low


class Adviser:
    """Says each kind of finding once in a process, on the ``turncache`` logger."""

    def __init__(self, logger: logging.Logger = LOG) -> None:
        """Start with nothing said."""
        self._logger = logger
        self._said: set[Break] = set()

    def say(self, session_id: str, finding: Finding) -> None:
        """Log the finding unless its kind has been said."""
        if finding.kind not in self._said:
            self._said.add(finding.kind)
            self._logger.warning("session %s: %s", session_id, finding)

    def forget(self) -> None:
        """Be ready to say everything again."""
        self._said.clear()


#: Speaks for this process.
ADVISER: Final = Adviser()


def _system_findings(shape: Shape, reading: Reading) -> Iterator[Finding]:
    old, new = shape.system, reading.system
    if old == new:
        return
    num_instructions = len(new) // FINGERPRINT_BYTES - reading.start
    at = num_common(old, new) - num_instructions
    text = reading.instructions or ""
    if at >= 0:
        text = _text(reading.messages[at]) if at < len(reading.messages) else ""
    timed = _TIME.search(text) is not None
    kind = Break.TIME_IN_SYSTEM if timed else Break.SYSTEM_CHANGED
    yield Finding(kind, at if at >= 0 else None)


def _text(message: Any) -> str:
    content = message.get("content")
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    return " ".join(str(part.get("text", "")) for part in parts if isinstance(part, dict))


def _last_in_place(old: bytes, new: bytes) -> bool:
    size = FINGERPRINT_BYTES
    return len(old) > size and new[len(old) - size : len(old)] == old[-size:]


def _same_results(shape: Shape, reading: Reading, first: int) -> bool:
    """Whether a tool result after message ``first`` of the history is the old one.

    An answer that differs may be another sample for the same question. The ids in tool
    results are the model's own: where they agree, it is one answer that was rewritten.
    """
    size = FINGERPRINT_BYTES
    return any(
        reading.kinds[reading.start + at] == TOOL
        and shape.history[at * size : (at + 1) * size]
        == reading.history[at * size : (at + 1) * size]
        for at in range(first + 1, len(shape.history) // size)
    )


def _found_earlier(old: bytes, new: bytes) -> bool:
    """Whether the end of the old history is in the new one, nearer to its start."""
    size = FINGERPRINT_BYTES
    tail = old[-_NUM_RECOGNISED * size :]
    if len(old) <= _NUM_RECOGNISED * size:
        return False
    at = new.find(tail)
    while at >= 0 and at % size:
        at = new.find(tail, at + 1)
    return 0 <= at < len(old) - len(tail)
