"""Sessions: names for chains of calls.

Owns the registry of sessions by id. What is known of a session is in its ledger; which
session a piece of code runs in is in :mod:`turncache.scope`.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import logging
import math
import uuid
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from types import FrameType, TracebackType
from typing import Any, Final, ParamSpec, Self, TypeVar

from turncache import notices, report
from turncache import scope as scopes
from turncache._lock import LOCK
from turncache.calls import read_call
from turncache.durations import Durations
from turncache.errors import UsageError
from turncache.ledger import Ledger
from turncache.memo import Memo
from turncache.protocol import (
    CALL_HEADER,
    DEFAULT_PRIORITY,
    FINAL_HEADER,
    MAX_PRIORITY,
    MAX_SESSION_ID_CHARS,
    MIN_PRIORITY,
    PARENT_HEADER,
    SESSION_HEADER,
    TOOLS_HEADER,
    CallTags,
    Cause,
    Notice,
    check_session_id,
    format_call,
    format_tools,
)
from turncache.records import Call, CallRecord
from turncache.spelling import none_of

LOG: Final = logging.getLogger("turncache")

P = ParamSpec("P")
R = TypeVar("R")

MAX_SESSIONS: Final = 4096

#: Durations of the tools of this process: agents share their tools.
TOOL_DURATIONS: Final = Durations()


class Session:
    """A caller's name for a chain of calls.

    Make one with :func:`session`. As a context manager it is the session of every call
    made inside the block, in the tasks that are started there too. It may be entered
    several times, by several threads and tasks at once.

    A session with a name outlives its block; an anonymous one ends with it.

    Attributes:
        id: what is sent as ``X-Session-ID``.
        parent_id: session that this one was forked or spawned from, or None.
        anonymous: whether it ends with its block.
        automatic: whether the client made it, following a conversation.
        ended: whether it has ended: its calls are sent without a session from then on.
        label: readable name in tables of this process, never sent; None without one.
        retain_s: seconds to keep the KV after each call, None for the server's choice.
        priority: 0 to 100; orders sessions of a tenant.
        ledger: what is known of it here; the clients' own.
    """

    __slots__ = (
        "__weakref__",
        "_scopes",
        "_warned",
        "anonymous",
        "automatic",
        "ended",
        "id",
        "label",
        "ledger",
        "parent_id",
        "priority",
        "retain_s",
    )

    def __init__(
        self,
        session_id: str,
        *,
        parent_id: str | None = None,
        anonymous: bool = False,
        automatic: bool = False,
    ) -> None:
        """Use :func:`session` instead: it returns one object per id."""
        self.id = session_id
        self.parent_id = parent_id
        self.anonymous = anonymous
        self.automatic = automatic
        self.ended = False
        self.label: str | None = None
        self.retain_s: float | None = None
        self.priority = DEFAULT_PRIORITY
        self.ledger = Ledger(automatic=automatic)
        self._scopes: tuple[scopes.Scope, ...] = ()
        self._warned = False

    @property
    def calls(self) -> tuple[CallRecord, ...]:
        """Records of the calls that have ended, oldest first: the latest 512.

        An automatic session keeps the latest 32.
        """
        calls = tuple(self.ledger.calls)
        return tuple(record for call in calls if (record := call.record()) is not None)

    @property
    def advice(self) -> tuple[str, ...]:
        """What broke the reuse of this session's KV, each kind once."""
        return tuple(str(finding) for finding in self.ledger.findings)

    @property
    def children(self) -> tuple[Session, ...]:
        """Sessions of this process that have this one as their parent, the latest used last.

        As far as they are among the latest 4096 sessions.
        """
        with LOCK.held:
            return tuple(other for other in _recent.values() if other.parent_id == self.id)

    def to_json(self) -> str:
        """Return the session's report as JSON: its totals, calls and advice."""
        return report.to_json(self)

    def __str__(self) -> str:
        return report.table(self)

    def _repr_html_(self) -> str:
        return report.html(self)

    def __repr__(self) -> str:
        parent = f", parent_id={self.parent_id!r}" if self.parent_id else ""
        number = len(self.ledger.calls)
        return f"<Session {self.id!r}{parent}, {number} call{'' if number == 1 else 's'}>"

    def child(self, name: str) -> Session:
        """Return the session of a sub-agent: ``<id>/<name>``, the same object every time.

        Raises:
            ProtocolError: when ``name`` holds characters that no session id may have.
        """
        session_id = f"{self.id}/{name}"
        if len(session_id) > MAX_SESSION_ID_CHARS:
            session_id = f"{opaque_id(self.id)}/{opaque_id(name)}"
        return session(session_id, parent=self)

    def headers(
        self,
        *,
        messages: Sequence[Any] | None = None,
        input: str | Sequence[Any] | None = None,  # noqa: A002 - the request's own name
        tools: Sequence[Any] | None = None,
        cause: Cause | str | None = None,
        final: bool = False,
    ) -> dict[str, str]:
        """Return the request headers for a client that is not ours.

        Args:
            messages: messages of a chat completion, to tell turn, call and cause.
            input: input of a response, likewise.
            tools: tools offered to the model: their measured durations are added.
            cause: overrides what the messages say; ``compaction`` can only be said here.
            final: nothing follows this call.

        Raises:
            UsageError: when ``cause`` is no cause.
        """
        history = messages if messages is not None else input
        body = {"tools": tools, "input": [] if history is None else _plain(history)}
        reading = read_call(body, Memo(max_histories=0))
        return self.tags(
            turn=None if history is None else reading.turn,
            call=None if history is None else reading.call,
            cause=(None if history is None else reading.cause) if cause is None else _cause(cause),
            tools=TOOL_DURATIONS.rows(reading.tools.names),
            final=final,
        ).to_headers()

    def wrap(self, function: Callable[P, R]) -> Callable[P, R]:
        """Return ``function`` made to run in this session, for thread pools.

        A plain thread does not see the context that submitted its work: without this its
        calls are not in the session.
        """

        @functools.wraps(function)
        def in_session(*args: P.args, **kwargs: P.kwargs) -> R:
            with self:
                return function(*args, **kwargs)

        return in_session

    def wait(self, *, expected_s: float) -> None:
        """Tell the server that the next call comes in about ``expected_s`` seconds.

        For waits whose length only the caller knows: a build, a person, a queue. The
        server learns of tools and their usual durations by itself.

        Sent in the background, once, by the client of the session's latest call: this
        neither raises nor waits. Nothing is sent when no server was told of the session,
        and a server that does not know notices is left alone.
        """
        notices.say_wait(self, expected_s)

    def end(self) -> None:
        """Tell the server that nothing follows, so that it may forget this session's KV first.

        In the background, like :meth:`wait`; what is still unsent when the process exits
        gets a second, and when its client is closed it is lost: :meth:`aend` waits for it.
        A call that follows after all is served as any other.
        """
        notices.NOTIFIER.say(self, Notice.FINAL)

    async def aend(self, *, timeout_s: float = 1.0) -> None:
        """Do what :meth:`end` does, and wait until it is said, at most ``timeout_s``.

        For the last line of an async program: what is left to the background ends with
        its event loop.
        """
        await notices.say_final(self, timeout_s)

    def __enter__(self) -> Self:
        self._enter(inspect.currentframe())
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._leave(inspect.currentframe())

    async def __aenter__(self) -> Self:
        self._enter(inspect.currentframe())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._leave(inspect.currentframe())

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickle, (self.id, self.parent_id, self.retain_s, self.priority)

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def tags(
        self,
        *,
        turn: int | None,
        call: int | None,
        cause: Cause | None,
        tools: Mapping[str, float],
        final: bool,
    ) -> CallTags:
        """Return what is said of one call of this session."""
        return CallTags(
            session_id=self.id,
            parent_id=self.parent_id,
            final=final,
            turn=turn,
            call=call,
            cause=cause,
            retain_s=self.retain_s,
            priority=self.priority,
            tools=tools,
        )

    def call_headers(self, call: Call, *, tools: Mapping[str, float]) -> dict[str, str]:
        """Return the headers of a call: what :meth:`tags` would encode, at half of the cost.

        Ids were checked when the session was made.
        """
        headers = {
            SESSION_HEADER: self.id,
            CALL_HEADER: format_call(
                call.turn, call.call, call.cause, self.retain_s, self.priority
            ),
        }
        if self.parent_id is not None:
            headers[PARENT_HEADER] = self.parent_id
        if call.final:
            headers[FINAL_HEADER] = "true"
        if tools and (rows := format_tools(tools)):
            headers[TOOLS_HEADER] = rows
        return headers

    def latest_tags(self, *, final: bool) -> CallTags:
        """Return what is said of the latest call, between it and the next."""
        calls = self.ledger.calls
        latest = calls[-1] if calls else None
        return self.tags(
            turn=latest.turn if latest else None,
            call=latest.call if latest else None,
            cause=latest.cause if latest else None,
            tools={},
            final=final,
        )

    def warn_ended(self) -> None:
        """Say once that a call came after the session or its block had ended."""
        if not self._warned:
            self._warned = True
            LOG.warning(
                "session %s: a call came after the end of its block, from a task or thread "
                "that outlived it; it is sent without a session. Finish the task inside the "
                "block, or use client.with_session(...)",
                self.id,
            )

    def _enter(self, frame: FrameType | None) -> None:
        scope = scopes.enter(self, frame and frame.f_back)
        with LOCK.held:
            scope.open = not self.ended
            self._scopes = (*self._scopes, scope)

    def _leave(self, frame: FrameType | None) -> None:
        with LOCK.held:
            scope = self._scope_to_leave(frame and frame.f_back)
            if scope is None:
                return
            self._scopes = tuple(other for other in self._scopes if other is not scope)
            self.ended = self.ended or (self.anonymous and not self._scopes)
        scopes.leave(scope)

    def _scope_to_leave(self, frame: FrameType | None) -> scopes.Scope | None:
        """Return the innermost block of this session that ``frame`` entered.

        A generator may be closed in another context than it was entered in: then the
        frame tells. An exit stack enters and leaves from different frames: then the
        context tells.
        """
        for scope in reversed(self._scopes):
            if scope.frame is frame:
                return scope
        here = scopes.innermost()
        while here is not None and here not in self._scopes:
            here = here.outer
        return here or (self._scopes[-1] if self._scopes else None)


# Sessions by id. Strong references are bounded; the weak ones keep "one object per id"
# true for sessions that somebody still holds.
_recent: OrderedDict[str, Session] = OrderedDict()
_alive: weakref.WeakValueDictionary[str, Session] = weakref.WeakValueDictionary()


def session(
    session_id: str | None = None,
    *,
    parent: Session | str | None = None,
    retain_s: float | None = None,
    priority: int | None = None,
) -> Session:
    """Return the session with this id, or a new anonymous one.

    Args:
        session_id: 1 to 256 visible ASCII characters; see :func:`opaque_id` for other
            names. The same id gives the same object, while it is among the latest 4096
            or somebody holds it.
        parent: session that this one is spawned from.
        retain_s: seconds to keep the KV after each call, instead of the server's choice.
        priority: 0 to 100, instead of 50.

    Raises:
        ProtocolError: on an illegal id.
        UsageError: on a negative ``retain_s`` or a ``priority`` that is out of range.
    """
    if retain_s is not None and not _within(retain_s, 0, math.inf):
        raise UsageError(f"retain_s={retain_s!r}: expected seconds from 0")
    if priority is not None and not _within(priority, MIN_PRIORITY, MAX_PRIORITY, whole=True):
        raise UsageError(
            f"priority={priority!r}: expected a number from {MIN_PRIORITY} to {MAX_PRIORITY}"
        )
    parent_id = parent.id if isinstance(parent, Session) else parent
    if parent_id is not None:
        check_session_id(parent_id)
    if session_id is None:
        found = Session(f"s-{uuid.uuid4().hex}", anonymous=True)
    else:
        found = _registered(check_session_id(session_id))
    found.parent_id = parent_id or found.parent_id
    found.retain_s = found.retain_s if retain_s is None else retain_s
    found.priority = found.priority if priority is None else priority
    return found


def current_session() -> Session | None:
    """Return the session of the innermost open block around the running code, or None."""
    scope = scopes.innermost()
    return scope.session if scope is not None and scope.open else None


def opaque_id(text: str) -> str:
    """Return a session id for any text: stable, and telling nothing about it.

    For names from elsewhere that may hold spaces, other alphabets or personal data.
    """
    return "h-" + hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def forget_sessions() -> None:
    """Forget every session of the registry: the same id gives another object then."""
    with LOCK.held:
        _recent.clear()
        _alive.clear()


def _registered(session_id: str) -> Session:
    with LOCK.held:
        found = _alive.get(session_id) or Session(session_id)
        _alive[session_id] = found
        _recent[session_id] = found
        _recent.move_to_end(session_id)
        if len(_recent) > MAX_SESSIONS:
            _recent.popitem(last=False)
    return found


def _unpickle(
    session_id: str, parent_id: str | None, retain_s: float | None, priority: int
) -> Session:
    return session(session_id, parent=parent_id, retain_s=retain_s, priority=priority)


def _within(value: object, least: float, most: float, *, whole: bool = False) -> bool:
    """Whether a value, which may come from untyped code, is a number in a range."""
    return isinstance(value, int if whole else (int, float)) and least <= value <= most


def _cause(cause: Cause | str) -> Cause:
    try:
        return Cause(cause)
    except ValueError:
        raise UsageError(f"cause={none_of(cause, Cause)}") from None


def _plain(history: str | Sequence[Any]) -> str | list[Any]:
    """Return messages as mappings: an answer's message object may be among them."""
    if isinstance(history, str):
        return history
    return [
        item
        if isinstance(item, Mapping)
        else {"role": getattr(item, "role", None), "type": getattr(item, "type", None)}
        for item in history
    ]
