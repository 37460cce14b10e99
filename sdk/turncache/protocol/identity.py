"""Who a request belongs to: the schemas that name a session, in order of precedence."""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from turncache.errors import ProtocolError
from turncache.protocol.words import MAX_SESSION_ID_CHARS, SESSION_HEADER
from turncache.structured_fields import shown

VISIBLE_ASCII = re.compile(r"[\x21-\x7e]+")


def check_session_id(value: str, *, field_name: str = SESSION_HEADER) -> str:
    """Return ``value`` when it is a legal session id.

    Raises:
        ProtocolError: unless it has 1 to 256 visible ASCII characters.
    """
    if not isinstance(value, str):
        raise ProtocolError(field_name, f"{value!r:.80} is no session id: expected text")
    if not VISIBLE_ASCII.fullmatch(value):
        raise ProtocolError(
            field_name,
            f"{shown(value)} is no session id: expected 1 to {MAX_SESSION_ID_CHARS} visible "
            "ASCII characters without spaces; hash other names, as turncache.opaque_id does, or "
            "percent-encode them",
        )
    if len(value) > MAX_SESSION_ID_CHARS:
        raise ProtocolError(
            field_name,
            f"session id of {len(value)} characters; at most {MAX_SESSION_ID_CHARS} are allowed: "
            "hash longer names, as turncache.opaque_id does",
        )
    return value


class SessionSource(enum.StrEnum):
    """Where a session id was found, in order of precedence; headers by their names."""

    OWN_HEADER = "own header"
    SESSION_HEADER = "x-session-id"
    DYNAMO_HEADER = "x-dynamo-session-id"
    CLAUDE_CODE = "x-claude-code-session-id"
    OPENCODE = "x-opencode-session"
    AFFINITY_HEADER = "x-session-affinity"
    CORRELATION_HEADER = "x-correlation-id"
    CODEX = "session-id"
    BODY_SESSION = "session_id"
    BODY_CONVERSATION = "conversation_id"
    BODY_CACHE_KEY = "prompt_cache_key"
    BODY_USER_ID = "metadata.user_id"


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Who a request belongs to, as one schema says it."""

    session_id: str
    source: SessionSource
    parent_id: str | None = None


#: Header schemas in order of precedence: (id header, parent or agent header or None).
_HEADER_SCHEMAS: Final = (
    (SessionSource.SESSION_HEADER, "x-parent-session-id"),
    (SessionSource.DYNAMO_HEADER, "x-dynamo-parent-session-id"),
    (SessionSource.CLAUDE_CODE, "x-claude-code-parent-agent-id"),
    (SessionSource.OPENCODE, None),
    (SessionSource.AFFINITY_HEADER, None),
    (SessionSource.CORRELATION_HEADER, None),
    (SessionSource.CODEX, None),
)
#: Names under which older versions of a client send what a header schema holds.
_OLDER_NAMES: Final = {SessionSource.CODEX: "session_id"}
#: Schemas whose sub-agents share the session's id, with the header that tells them apart.
_AGENT_HEADERS: Final = {
    SessionSource.CLAUDE_CODE: "x-claude-code-agent-id",
    SessionSource.CODEX: "thread-id",
}
_BODY_SCHEMAS: Final = (
    SessionSource.BODY_SESSION,
    SessionSource.BODY_CONVERSATION,
    SessionSource.BODY_CACHE_KEY,
)


#: How Claude Code puts its session into the user id of ``/v1/messages``. Any other user id
#: names a user, not a session.
_USER_ID_SESSION: Final = re.compile(
    r'(?:_session_|"session_id": ?")([0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})'
)


def identify(
    headers: Mapping[str, str], body: Mapping[str, Any], *, own_header: str = ""
) -> Identity | None:
    """Find the session of a request: the first schema that is present wins, whole.

    Schemas are never mixed: a parent is only read from the schema that gave the id.

    Args:
        headers: request headers with lower-case names.
        body: the parsed JSON body.
        own_header: lower-case name of one more header, of whoever runs the server, which comes
            before all others; empty for none.

    Returns:
        The identity, or None when no schema is present.

    Raises:
        ProtocolError: when the schema that is present holds an illegal id.
    """
    if value := headers.get(own_header):
        return Identity(
            session_id=check_session_id(value, field_name=own_header),
            source=SessionSource.OWN_HEADER,
        )
    for source, parent_name in _HEADER_SCHEMAS:
        value = headers.get(source.value) or headers.get(_OLDER_NAMES.get(source, ""))
        if value:
            session_id = check_session_id(value, field_name=source.value)
            agent = headers.get(_AGENT_HEADERS.get(source, ""))
            # Codex's first thread has the session's own id.
            if agent and agent != session_id:
                child = check_session_id(f"{session_id}/{agent}", field_name=source.value)
                return Identity(session_id=child, source=source, parent_id=session_id)
            parent = headers.get(parent_name) if parent_name else None
            if parent:
                check_session_id(parent, field_name=parent_name or source.value)
            return Identity(session_id=session_id, source=source, parent_id=parent or None)
    for source in _BODY_SCHEMAS:
        value = body.get(source.value)
        if isinstance(value, str) and value:
            return Identity(
                session_id=check_session_id(value, field_name=source.value), source=source
            )
    metadata = body.get("metadata")
    user = metadata.get("user_id") if isinstance(metadata, Mapping) else None
    found = _USER_ID_SESSION.search(user) if isinstance(user, str) else None
    if found is not None:
        return Identity(session_id=found[1], source=SessionSource.BODY_USER_ID)
    return None
