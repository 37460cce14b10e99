"""The session table: which engine served a session last, and its root.

Owner of that state. Bounded, least recently used first; an entry that is lost costs a
recompute, never a wrong answer, because engines verify by content what they pull. An entry
is written only after a call has ended well: a session is never pinned to an engine that
failed it.
"""

from __future__ import annotations

import hashlib
import itertools
from collections import OrderedDict

import msgspec

from turncache_server.router.alone import Answered


def namespaced(session_id: str, *, tenant: str | None = None) -> str:
    """Return the session id that engines see: 1 to 256 visible ASCII characters.

    Without tenants it is the client's own. With one it is a digest of both, so that equal
    ids of two tenants are two sessions and an engine's log names neither.
    """
    if tenant is None:
        return session_id
    text = f"{len(tenant)}:{tenant}{session_id}".encode()
    return "t-" + hashlib.blake2b(text, digest_size=20).hexdigest()


def answer_key(answer_id: str, tenant: str | None) -> str:
    """Return the key of an answer that an engine keeps; no session id holds a space."""
    return f"answer {namespaced(answer_id, tenant=tenant)}"


class SessionEntry(msgspec.Struct, frozen=True, kw_only=True):
    """What is known about a session.

    Attributes:
        served_by: name of the engine that generated the session's last answer.
        root: namespaced id of the first session of its tree: the key for placing.
        answered: its last call, None unless decode may serve calls alone.
        num_answers: of the model in the history of its last call, None when nobody knows.
    """

    served_by: str
    root: str
    answered: Answered | None = None
    num_answers: int | None = None

    def is_behind(self, num_answers: int | None) -> bool:
        """Say whether another router has had calls of it since, by the history of a call."""
        if self.num_answers is None or num_answers is None:
            return False
        return num_answers > self.num_answers + 1


class SessionTable:
    """Bounded table from namespaced session id, or answer, to :class:`SessionEntry`."""

    def __init__(self, max_sessions: int) -> None:
        self._max_sessions = max_sessions
        self._entries: OrderedDict[str, SessionEntry] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def newest(self, max_entries: int) -> list[tuple[str, SessionEntry]]:
        """Return the sessions that were used last, the latest first."""
        return list(itertools.islice(reversed(self._entries.items()), max_entries))

    def get(self, session: str) -> SessionEntry | None:
        """Return a session's entry and mark it as used."""
        entry = self._entries.get(session)
        if entry is not None:
            self._entries.move_to_end(session)
        return entry

    def root_of(self, session: str, parent: str | None) -> str:
        """Return the root that a session is placed by.

        A session that is known keeps its root: a parent that appears or disappears from one
        call to the next must not move it. An unknown parent is taken as a root itself.
        """
        entry = self._entries.get(session)
        if entry is not None:
            return entry.root
        if parent is None:
            return session
        above = self._entries.get(parent)
        return above.root if above is not None else parent

    def advance(
        self,
        session: str,
        *,
        served_by: str,
        root: str,
        answered: Answered | None = None,
        num_answers: int | None = None,
    ) -> str | None:
        """Record that a call of the session has ended well on an engine.

        Returns:
            The engine that it has come from, None when it stays or is new.
        """
        before = self._entries.get(session)
        self._entries[session] = SessionEntry(
            served_by=served_by, root=root, answered=answered, num_answers=num_answers
        )
        self._entries.move_to_end(session)
        while len(self._entries) > self._max_sessions:
            self._entries.popitem(last=False)
        return None if before is None or before.served_by == served_by else before.served_by

    def forget(self, session: str) -> str | None:
        """Drop a session that has ended; returns the engine that served it last."""
        entry = self._entries.pop(session, None)
        return None if entry is None else entry.served_by
