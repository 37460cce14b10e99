"""One call from the client's side: what is sent with it, and what is learned from its answer.

An attempt is made per logical call; the upstream client's own retries happen inside it, so
that every try carries the same tags. Nothing here raises into the caller's code: what
cannot be read is left out.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Final, ParamSpec, TypeVar

from turncache import hosts, spans, untagged
from turncache._lock import LOCK
from turncache.answers import ChunkReader, Ending, read_answer
from turncache.follow import Follower
from turncache.protocol import CALL_HEADER, OUTCOME_HEADER, Boundary
from turncache.records import Call
from turncache.report import RESULTS
from turncache.results import WeakTable
from turncache.sessions import Session

P = ParamSpec("P")
R = TypeVar("R")

LOG: Final = logging.getLogger("turncache")

_CALL_BYTES: Final = CALL_HEADER.lower().encode()
_OUTCOME_BYTES: Final = OUTCOME_HEADER.lower().encode()
_CALL_LENGTH: Final = len(_CALL_BYTES)
_OUTCOME_LENGTH: Final = len(_OUTCOME_BYTES)

ABANDONED: Final = "abandoned"
INCOMPLETE: Final = "incomplete"


class Attempt:
    """One call that is being made.

    Attributes:
        call: what becomes its record.
        session: session that it belongs to, or None.
        options: what upstream's ``request()`` gets instead of the caller's options; let
            go of when the answer has come, because they lead back here.
        asks_raw: whether the answer comes back raw because we asked for it.
        span: tracing span around the call, or None.
    """

    __slots__ = (
        "_clock",
        "_host",
        "_line",
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
        *,
        call: Call,
        session: Session | None,
        host: tuple[str, int | None],
        clock: Callable[[], float],
        line: tuple[Follower[Session], int] | None = None,
        server_keeps: bool = False,
    ) -> None:
        """Start a call that is about to be sent to ``host``.

        Args:
            call: what becomes its record.
            session: session that it belongs to, or None.
            host: name and port of the server.
            clock: monotonic seconds.
            line: the follower and line that placed an automatic session.
            server_keeps: whether a later request may continue the answer by its id.
        """
        self.call = call
        self.session = session
        self.options: Any = None
        self.asks_raw = False
        self.span = spans.current_span()
        self._host = host
        self._clock = clock
        self._line = line
        self._server_keeps = server_keeps
        self._reader: ChunkReader | None = None

    def answered(self, answer: Any, *, stream: bool) -> None:
        """Take what upstream returned: a raw response, a stream, or something else."""
        response = getattr(answer, "http_response", None) or getattr(answer, "response", answer)
        quietly("read", self._read_headers, getattr(response, "headers", None))
        self.options = None
        if not self.asks_raw:
            self.keep(answer)
        if stream:
            STREAMS.put(response, self)
        elif self.call.ended_s is None:
            self.call.ended_s = self._clock()

    def parsed(self, result: Any) -> None:
        """Take the parsed answer, which the caller may have asked for later."""
        if self.call.boundary is None:
            self._end(quietly("read", read_answer, result))

    def keep(self, result: Any) -> None:
        """Take what the caller gets: it leads to this call from then on."""
        RESULTS.put(result, (self.call, self.session))

    def failed(self, error: BaseException) -> None:
        """Take the error that ended the call."""
        self.options = None
        response = getattr(error, "response", None)
        quietly("read", self._read_headers, getattr(response, "headers", None))
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
        self._end(None if self._reader is None else quietly("read", self._reader.ending))
        if self.call.boundary is None and self.call.error is None:
            self.call.error = INCOMPLETE

    def stream_left(self) -> None:
        """Take that nobody reads the stream any more; harmless after its end."""
        if self.call.ended_s is None:
            self.call.fail(self._clock(), ABANDONED)

    def _end(self, ending: Ending | None) -> None:
        call, session = self.call, self.session
        call.end(self._clock(), ending or Ending())
        if self.span is not None:
            quietly("trace", spans.tell_end, self.span, call)
        if ending is None or session is None or call.ended_s is None:
            return
        with LOCK:
            if ending.boundary is Boundary.TOOL:
                session.ledger.wait_for(ending.tools, call.ended_s)
            if ending.answer_id is None or not self._server_keeps:
                return
            if call.turn is not None and call.call is not None:
                session.ledger.answered(ending.answer_id, call.turn, call.call)
            if self._line is not None:
                follower, key = self._line
                follower.answered(key, ending.answer_id)

    def _read_headers(self, headers: Any) -> None:
        known, outcome = _ours(headers)
        if not known:
            return
        hosts.has_answered(*self._host)
        self.call.outcome_text = outcome
        if self.span is not None:
            spans.tell_outcome(self.span, self.call)


def _ours(headers: Any) -> tuple[bool, str | None]:
    """Return whether answer headers have ``Turncache``, and ``Turncache-Outcome`` if they do.

    A look-up in upstream's headers decodes all of them each time: one pass over the raw
    ones costs a fifth.
    """
    raw = getattr(headers, "raw", None)
    if raw is None:
        found = headers is not None and headers.get(CALL_HEADER) is not None
        return found, headers.get(OUTCOME_HEADER) if found else None
    found, outcome = False, None
    for name, value in raw:
        length = len(name)
        if length == _CALL_LENGTH and name.lower() == _CALL_BYTES:
            found = True
        elif length == _OUTCOME_LENGTH and name.lower() == _OUTCOME_BYTES:
            outcome = value.decode("latin-1")
    return found, outcome


#: Attempts whose stream is not at its end, by the stream's HTTP response.
STREAMS: Final[WeakTable[Attempt]] = WeakTable()


def quietly(what: str, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R | None:
    """Return what ``function`` returns, or None when a value it reads is not as expected.

    Requests and answers hold whatever callers and servers put there. Reading them is a
    side line: it must not take a good answer away from the caller. The first time that
    something goes wrong is a warning, because from then on KV may be lost.
    """
    try:
        return function(*args, **kwargs)
    except Exception as error:  # noqa: BLE001 - see the docstring
        # The error's text may quote a message: its type has to do.
        problem = (what, type(error).__name__)
        level = logging.DEBUG if problem in _problems else logging.WARNING
        _problems.add(problem)
        if what == "prepare":
            untagged.count(untagged.Untagged.UNREADABLE)
        LOG.log(level, "could not %s a call (%s): it goes on as the stock client's", *problem)
        return None


def forget_problems() -> None:
    """Be ready to warn of everything again."""
    _problems.clear()


_problems: Final[set[tuple[str, str]]] = set()
