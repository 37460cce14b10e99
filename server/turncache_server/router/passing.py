"""What of an engine's stream passes to the client, and when. Pure.

Events pass whole, with the bytes that the engine sent, except for three things:

* transfer parameters name engines and blocks: they are cut out of the chunk that carries
  them;
* the event that ends an answer (``[DONE]``, ``message_stop``, ``response.completed``) would
  make one that did not end well look as if it had: it is held back, and
  :attr:`AnswerStream.ending` says why;
* an event that is not complete when the stream breaks: half a chunk cannot be parsed, and
  would swallow the terminal error event that follows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from turncache.protocol import STRIPPED_BODY_MEMBERS
from turncache_server.router.apis.api import Collector
from turncache_server.router.body import drop_members
from turncache_server.router.ending import PLAIN_FRAME, Ending, SseEvent, SseSplitter

#: Members of an event that hold a whole answer, in the APIs that have such events.
NESTED_ANSWERS: Final = ("response", "message")
_MARKS: Final = tuple(name.encode() for name in STRIPPED_BODY_MEMBERS)


class AnswerStream:
    """One stream on its way to the client.

    Args:
        collector: takes every event's data.
        completed: called once when the answer is known to have ended well, before the bytes
            that end it are returned.
    """

    def __init__(
        self, collector: Collector, completed: Callable[[Ending], None] = lambda _: None
    ) -> None:
        self._collector = collector
        self._completed = completed
        self._splitter = SseSplitter()
        self._held_back = False
        self._done = False
        self._ending: Ending | None = None  # of what has been collected

    @property
    def done(self) -> bool:
        """Whether the engine has ended a complete answer."""
        return self._done

    @property
    def pending_bytes(self) -> int:
        """Bytes of the event that has begun and not ended."""
        return self._splitter.pending_bytes

    @property
    def ending(self) -> Ending:
        """How the call ends with what has been seen."""
        if self._ending is None:
            self._ending = self._collector.ending()
        return self._ending

    @property
    def client_knows(self) -> bool:
        """Whether the engine has told the client of the failure in an event of its own."""
        return self._collector.engine_reported_error

    def feed(self, chunk: bytes) -> bytes:
        """Return what may be sent after ``chunk`` has arrived."""
        self._ending = None
        plain = None if self._held_back else self._splitter.plain(chunk)
        if plain is None or _has_mark(chunk):
            return self._pass_each(chunk)
        # Every event is read, even where a few bytes would say that it decides nothing:
        # decoding one takes no longer than looking for them.
        add, at = self._collector.add, 0
        for data in plain:
            end = at + len(data) + PLAIN_FRAME
            if add(data):
                passed = chunk[:at] + self._passed_last(chunk[at:end])
                return passed + self._pass_each(chunk[end:])
            at = end
        return chunk

    def _pass_each(self, chunk: bytes) -> bytes:
        return b"".join(self._passed(event) for event in self._splitter.feed(chunk))

    def close(self) -> bytes:
        """Return what may be sent once the engine has ended the stream in order.

        A last event without its blank line is sent when the call is complete with it.
        """
        rest = b"".join(self._passed(event) for event in self._splitter.close())
        ending = self.ending
        if ending.problem is not None:
            return b""
        if not self._done:
            self._completed(ending)
        return rest

    def _passed(self, event: SseEvent) -> bytes:
        if self._held_back:
            return b""
        if event.data is None:
            return event.raw
        self._ending = None
        is_last = self._collector.add(event.data)
        raw = event.raw
        if _has_mark(event.data):
            raw = _cleaned(event)
        return self._passed_last(raw) if is_last else raw

    def _passed_last(self, raw: bytes) -> bytes:
        ending = self.ending
        if ending.problem is None:
            if not self._done:
                self._done = True
                self._completed(ending)
            return raw
        # The engine's own error event has been passed on: the end that follows it is true.
        self._held_back = not self.client_knows
        return b"" if self._held_back else raw


def _has_mark(data: bytes) -> bool:
    for mark in _MARKS:  # noqa: SIM110 - a third of the time of any()
        if mark in data:
            return True
    return False


def _cleaned(event: SseEvent) -> bytes:
    """Return an event's bytes without transfer parameters."""
    data = event.data or b""
    kept = drop_members(data, STRIPPED_BODY_MEMBERS, within=NESTED_ANSWERS)
    if kept is data:
        return event.raw
    if data in event.raw:
        return event.raw.replace(data, kept, 1)
    # The data spans several lines, as no engine writes it.
    return b"data: " + kept + b"\n\n"
