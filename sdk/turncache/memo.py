"""Fingerprints of the latest histories, and what was counted in them. Owner of both.

It changes how long an answer takes and never the answer.
"""

from __future__ import annotations

import functools
import re
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import methodcaller
from typing import Any, Final, NamedTuple

from turncache.messages import FINGERPRINT_BYTES, MODEL, bytes_of, mark, scan

# In letters of kinds: an input that begins a turn, and the results in one that continues it.
_OPENING: Final = re.compile("(?<![^m])[^mt]*u[^mt]*(?![^m])")
_RESULTS: Final = re.compile("t[^m]*")
_END: Final[Callable[[re.Match[str]], int]] = methodcaller("end")
_HEAD: Final = 3
#: Shorter histories are read again sooner than they are compared.
_WORTH_IT: Final = 5
#: So many messages at the end of a known history are counted again before that is kept.
_LONG_TAIL: Final = 64
_MAX_TOOLS_KEPT: Final = 32


class Tools(NamedTuple):
    """The tools of a request: names in order, and a fingerprint of the definitions."""

    names: tuple[str, ...] = ()
    digest: int = 0


NO_TOOLS: Final = Tools()


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
            kinds, prints, _, _ = scan(messages)
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
        written = bytes_of(tools)
        known = self._tools.get(written)
        if known is None:
            known = self._tools[written] = Tools(_names_of(tools), hash(written))
            if len(self._tools) > _MAX_TOOLS_KEPT:
                del self._tools[next(iter(self._tools))]
        return known

    def _find(self, messages: Sequence[Any]) -> tuple[str, bytes, int, int]:
        """Read messages that do not go on with the latest history."""
        first, second, third = messages[:_HEAD]
        head = mark(first), mark(second), mark(third)
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
        kinds, prints, copies, num_bytes = scan(new)
        kinds, prints = history.kinds + kinds, history.prints + prints
        turn, call = history.place(kinds)
        history.messages += copies
        num_known = len(history.messages)
        history.kinds, history.prints = kinds, prints
        if num_known < len(kinds):
            # What cannot be copied, and what comes after it, is read again every time.
            history.kinds = kinds[:num_known]
            history.prints = prints[: num_known * FINGERPRINT_BYTES]
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


def read_tools(tools: Any) -> Tools:
    """Return names and digest of a request's tools; the order of keys counts."""
    if not isinstance(tools, (list, tuple)) or not tools:
        return NO_TOOLS
    return Tools(_names_of(tools), hash(bytes_of(tools)))


def place_of(kinds: str) -> tuple[int, int]:
    """Return turn and call of a history given as one letter per message."""
    return _NO_HISTORY.place(kinds)


def _count_inputs(kinds: str) -> tuple[int, int]:
    """Return how many inputs begin a turn, and how many bring results after the last of them."""
    openings = list(map(_END, _OPENING.finditer(kinds)))
    return len(openings), len(_RESULTS.findall(kinds, openings[-1] if openings else 0))


#: The same for the short histories, and ends of long ones, that come again and again.
_inputs_in: Final = functools.lru_cache(maxsize=4096)(_count_inputs)
_NO_HISTORY: Final = _History()


def _names_of(tools: Sequence[Any]) -> tuple[str, ...]:
    return tuple([_tool_name(tool) for tool in tools])


def _tool_name(tool: Any) -> str:
    if not isinstance(tool, Mapping):
        return ""
    inner = tool.get("function", tool)
    name = inner.get("name") if isinstance(inner, Mapping) else None
    return str(name or tool.get("type") or "")
