"""One call from the client's side: what is sent with it, and what is learned from its answer.

An attempt is made per logical call; the upstream client's own retries happen inside it, so
that every try carries the same tags. Nothing here raises into the caller's code: what
cannot be read is left out.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Final

from turncache import hosts, spans, untagged
from turncache._lock import LOCK
from turncache.answers import NOTHING, ChunkReader, Ending, read_answer
from turncache.follow import Follower
from turncache.protocol import CALL_HEADER, OUTCOME_HEADER, Boundary
from turncache.records import Call
from turncache.report import RESULTS
from turncache.results import WeakTable
from turncache.sessions import Session

LOG: Final = logging.getLogger("turncache")

ABANDONED: Final = "abandoned"
INCOMPLETE: Final = "incomplete"


class Attempt:
    """One call that is being made.

    Attributes:
        call: what becomes its record.
        session: session that it belongs to, or None.
        options: what upstream's ``request()`` gets instead of the caller's options; let
            go of when the answer has come, because they lead back here.
        asks_raw: whether the answer is to come back unparsed, for us to parse.
        span: tracing span around the call, or None.
    """

    __slots__ = (
        "_clock",
        "_host",
        "_line",
        "_may_teach",
        "_reader",
        "_server_keeps",
        "asks_raw",
        "call",
        "options",
        "session",
        "span",
    )

    def __init__(
        self,
        call: Call,
        session: Session | None,
        host: tuple[str, int | None],
        clock: Callable[[], float],
        line: tuple[Follower[Session], int] | None = None,
        *,
        server_keeps: bool = False,
        may_teach: bool = True,
    ) -> None:
        """Start a call that is about to be sent to ``host``.

        Args:
            call: what becomes its record.
            session: session that it belongs to, or None.
            host: name and port of the server.
            clock: monotonic seconds.
            line: the follower and line that placed an automatic session.
            server_keeps: whether a later request may continue the answer by its id.
            may_teach: whether the answer may show that its server listens, which it is not
                known to do.
        """
        self.call = call
        self.session = session
        self.options: Any = None
        self.asks_raw = False
        self.span = span = spans.current_span()
        if span is not None:
            spans.tell_start(span, call, session)
        self._host = host
        self._clock = clock
        self._line = line
        self._server_keeps = server_keeps
        self._may_teach = may_teach
        self._reader: ChunkReader | None = None

    def answered(self, answer: Any, *, stream: bool) -> None:
        """Take what upstream returned to a caller who asked for it: a stream, a raw response."""
        response = getattr(answer, "http_response", None) or getattr(answer, "response", answer)
        self._read_headers(response)
        self.options = None
        self.keep(answer)
        if stream:
            STREAMS.put(response, self)
        elif self.call.ended_s is None:
            self.call.ended_s = self._clock()

    def answered_raw(self, answer: Any) -> Callable[[], Any] | None:
        """Take the answer that we asked for; return how to parse it.

        None when another library that wraps ``request()`` has parsed it already.
        """
        self.options = None
        self._read_headers(getattr(answer, "http_response", None))
        self.call.ended_s = self._clock()
        return getattr(answer, "parse", None)

    def result(self, result: Any) -> Any:
        """Take what the caller gets, and return it."""
        self.parsed(result)
        RESULTS.put(result, (self.call, self.session))
        return result

    def parsed(self, result: Any) -> None:
        """Take the parsed answer, which the caller may have asked for later."""
        if self.call.boundary is not None:
            return
        try:
            ending = read_answer(result)
        except Exception as error:  # noqa: BLE001 - an answer holds whatever its server sends
            complain("read", error)
            ending = NOTHING
        self._end(ending)

    def keep(self, result: Any) -> None:
        """Take what the caller gets: it leads to this call from then on."""
        RESULTS.put(result, (self.call, self.session))

    def failed(self, error: BaseException) -> None:
        """Take the error that ended the call."""
        self.options = None
        self._read_headers(getattr(error, "response", None))
        self.call.fail(self._clock(), type(error).__name__)

    def chunk(self, chunk: Any) -> None:
        """Take one chunk of the stream."""
        reader = self._reader
        if reader is None:
            reader = self._reader = ChunkReader()
        try:
            if reader.feed(chunk) and self.call.first_s is None:
                self.call.first_s = self._clock()
        except (AttributeError, TypeError):
            # A chunk that has not the shape of its type: nothing is learned from it.
            return

    def stream_ended(self) -> None:
        """Take that the stream was read to its end."""
        ending = NOTHING
        if self._reader is not None:
            try:
                ending = self._reader.ending()
            except Exception as error:  # noqa: BLE001 - a stream holds whatever its server sends
                complain("read", error)
        self._end(ending)
        if self.call.boundary is None and self.call.error is None:
            self.call.error = INCOMPLETE

    def stream_left(self) -> None:
        """Take that nobody reads the stream any more; harmless after its end."""
        if self.call.ended_s is None:
            self.call.fail(self._clock(), ABANDONED)

    def _end(self, ending: Ending) -> None:
        call = self.call
        if call.ended_s is None:
            call.ended_s = self._clock()
        call.end(ending)
        if self.span is not None:
            try:
                spans.tell_end(self.span, call)
            except Exception as error:  # noqa: BLE001 - whatever a tracer does
                complain("trace", error)
        # Nearly every call that ends a turn has nothing to leave behind.
        begins_wait = ending.boundary is Boundary.TOOL
        if not begins_wait and not self._server_keeps:
            return
        session = self.session
        if session is None:
            return
        with LOCK.held:
            if begins_wait:
                session.ledger.wait_for(ending.tools, call.ended_s)
            if ending.answer_id is None or not self._server_keeps:
                return
            if call.turn is not None and call.call is not None:
                session.ledger.answered(ending.answer_id, call.turn, call.call)
            if self._line is not None:
                follower, key = self._line
                follower.answered(key, ending.answer_id)

    def _read_headers(self, response: Any) -> None:
        headers = getattr(response, "headers", None)
        if headers is None:
            return
        try:
            # A look-up passes over all headers: most answers are asked for one name.
            outcome = headers.get(OUTCOME_HEADER)
            if outcome is None and not (self._may_teach and CALL_HEADER in headers):
                return
            if self._may_teach:
                hosts.has_answered(*self._host)
            self.call.outcome_text = outcome
            if self.span is not None:
                spans.tell_outcome(self.span, self.call)
        except Exception as error:  # noqa: BLE001 - headers hold whatever a server sends
            complain("read", error)


#: Attempts whose stream is not at its end, by the stream's HTTP response.
STREAMS: Final[WeakTable[Attempt]] = WeakTable()


def complain(what: str, error: Exception) -> None:
    """Take that bookkeeping failed to ``what`` a call: the caller's answer goes on.

    Requests and answers hold whatever callers and servers put there. Reading them is a
    side line: it must not take a good answer away from the caller. The first time that
    something goes wrong is a warning, because from then on KV may be lost.
    """
    # The error's text may quote a message: its type has to do.
    problem = (what, type(error).__name__)
    level = logging.DEBUG if problem in _problems else logging.WARNING
    _problems.add(problem)
    if what == "prepare":
        untagged.count(untagged.Untagged.UNREADABLE)
    LOG.log(level, "could not %s a call (%s): it goes on as the stock client's", *problem)


def forget_problems() -> None:
    """Be ready to warn of everything again."""
    _problems.clear()


_problems: Final[set[tuple[str, str]]] = set()
