"""Web applications: the session of a request, for every call made while it is answered."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from turncache.errors import ProtocolError
from turncache.protocol import SESSION_HEADER, check_session_id
from turncache.sessions import session

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]


class SessionFromHeader:
    """ASGI middleware: the session that a request names is ambient until its answer has ended.

    It wraps the whole answer. A block inside a handler ends when the handler returns,
    before a streaming answer has run.

    A request without the header, or with an id that no session may have, is passed on
    without a session. Whoever can send the header chooses the session: put it behind what
    authenticates, or name a header that only your proxy sets.

    Args:
        app: the ASGI application.
        header: name of the header that holds the session id.
        prefix: goes before the id, to keep sessions of several applications apart.
    """

    def __init__(self, app: App, *, header: str = SESSION_HEADER, prefix: str = "") -> None:
        """Wrap ``app``."""
        self._app = app
        self._header = header.lower().encode("latin-1")
        self._prefix = prefix

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Answer one request, in its session."""
        session_id = self._session_id(scope)
        if session_id is None:
            await self._app(scope, receive, send)
            return
        async with session(session_id):
            await self._app(scope, receive, send)

    def _session_id(self, scope: Message) -> str | None:
        for name, value in scope.get("headers") or ():
            if name.lower() == self._header:
                try:
                    return check_session_id(self._prefix + value.decode("latin-1"))
                except ProtocolError:
                    return None
        return None
