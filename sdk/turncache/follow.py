"""Which conversation a request continues, by content alone.

Pure: fingerprints in, a placement out. Owns the lines that one client follows; a line is
one conversation with one model.

A line is known by the lengths of history at which calls were made. A request belongs to
the line whose known history is the longest prefix of its own:

* it continues that history, repeats an earlier call of it, or rewrote an old message and
  kept the latest: it is the same line;
* it left that history: it is a *fork*, a child of the line;
* it goes to another model: nothing can be reused, and it is a child as well;
* it has another system prompt and shares no answer of the model yet: two agents may be
  asked the same question, so it is a new line.

A shared system prompt makes no relation: system messages are compared apart.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

from turncache.calls import Reading
from turncache.messages import FINGERPRINT_BYTES, MODEL
from turncache.protocol import Cause

T = TypeVar("T")

MAX_LINES = 10_000
MAX_POINTS_PER_LINE = 64
MAX_ANSWERS = 4096
MAX_LINES_PER_POINT = 16
# A request rarely brings more than one answer that is new here: looking further back
# would only make long unknown histories slow.
_MAX_POINTS_TRIED = 32


@dataclass(slots=True, eq=False)
class _Line(Generic[T]):
    owner: T
    model: str
    system: bytes
    tip: bytes = b""
    points: list[int] = field(default_factory=list)


class Placement(NamedTuple, Generic[T]):
    """Where a request belongs.

    Attributes:
        owner: what stands for its conversation.
        key: names the line to :meth:`Follower.answered`.
        cause: the cause when content alone says more than the request, else None.
    """

    owner: T
    key: int
    cause: Cause | None = None


class Follower(Generic[T]):
    """The conversations of one client: at most ``max_lines``, the least recent goes first.

    Args:
        make: makes the owner of a new line; called with the parent's owner or None.
        max_lines: how many conversations are followed.
    """

    def __init__(self, make: Callable[[T | None], T], *, max_lines: int = MAX_LINES) -> None:
        """Start without conversations."""
        self._make = make
        self._max_lines = max_lines
        self._lines: OrderedDict[int, _Line[T]] = OrderedDict()
        self._next_key = 0
        # Hash of a known history -> (line, cause that the call at this point had).
        self._points: dict[int, list[tuple[int, Cause | None]]] = {}
        self._answers: OrderedDict[str, int] = OrderedDict()

    def owners(self) -> tuple[T, ...]:
        """Return the owners of all lines, the least recently used first."""
        return tuple(line.owner for line in self._lines.values())

    def place(self, reading: Reading) -> Placement[T]:
        """Return where ``reading`` belongs, and remember it there."""
        if reading.previous is not None:
            return self._place_by_answer(reading, reading.previous)
        key, cause = self._find(reading)
        line = self._lines[key]
        self._lines.move_to_end(key)
        line.system, line.tip = reading.system, reading.history
        self._remember(key, line, hash(line.tip), cause)
        return Placement(line.owner, key, cause)

    def answered(self, key: int, answer_id: str) -> None:
        """Remember which line an answer belongs to, by the answer's id."""
        self._answers[answer_id] = key
        while len(self._answers) > MAX_ANSWERS:
            self._answers.popitem(last=False)

    def _find(self, reading: Reading) -> tuple[int, Cause | None]:
        history, points = reading.history, self._points
        elsewhere: T | None = None
        length, point = len(history) // FINGERPRINT_BYTES, history
        for _ in range(_MAX_POINTS_TRIED):
            for key, cause in points.get(hash(point), ()):
                line = self._lines[key]
                if line.model != reading.model:
                    elsewhere = line.owner if elsewhere is None else elsewhere
                elif line.system == reading.system or _has_answer(reading, length):
                    if point is history:
                        return key, cause
                    if _goes_on(line.tip, history):
                        return key, None
                    return self._open(reading, line.owner), Cause.FORK
            length = reading.point_before(length)
            if not length:
                break
            point = history[: length * FINGERPRINT_BYTES]
        return self._open(reading, elsewhere), None

    def _place_by_answer(self, reading: Reading, answer_id: str) -> Placement[T]:
        key = self._answers.get(answer_id)
        if key is None or key not in self._lines:
            key = self._open(reading, None)
            self.answered(key, answer_id)
        self._lines.move_to_end(key)
        return Placement(self._lines[key].owner, key)

    def _open(self, reading: Reading, parent: T | None) -> int:
        while len(self._lines) >= self._max_lines:
            key, line = self._lines.popitem(last=False)
            self._forget(key, line.points)
        key = self._next_key = self._next_key + 1
        self._lines[key] = _Line(self._make(parent), reading.model, reading.system)
        return key

    def _remember(self, key: int, line: _Line[T], point: int, cause: Cause | None) -> None:
        known = self._points.get(point)
        if known is None:
            self._points[point] = [(key, cause)]
        else:
            for other, _ in known:
                if other == key:
                    return
            known.append((key, cause))
            if len(known) > MAX_LINES_PER_POINT:
                known.pop(0)
        line.points.append(point)
        if len(line.points) > MAX_POINTS_PER_LINE:
            self._forget(key, [line.points.pop(0)])

    def _forget(self, key: int, points: Iterable[int]) -> None:
        for point in points:
            left = [entry for entry in self._points.get(point, ()) if entry[0] != key]
            if left:
                self._points[point] = left
            else:
                self._points.pop(point, None)


def _has_answer(reading: Reading, length: int) -> bool:
    """Whether an answer of the model is among the first ``length`` messages of the history."""
    return reading.kinds.find(MODEL, reading.start, reading.start + length) >= 0


def _goes_on(tip: bytes, history: bytes) -> bool:
    """Whether ``history`` is on the line whose latest history is ``tip``."""
    if history.startswith(tip) or tip.startswith(history):
        return True
    # An old message was rewritten, and the latest one is still in its place.
    return len(history) >= len(tip) and history[len(tip) - 8 : len(tip)] == tip[-8:]
