"""What a client says about a call: the request headers, written and read."""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

from turncache.errors import ProtocolError
from turncache.protocol.identity import Identity, check_session_id
from turncache.protocol.tools import format_tools, parse_tools
from turncache.protocol.words import (
    CALL_HEADER,
    DEFAULT_PRIORITY,
    FINAL_HEADER,
    MAX_PRIORITY,
    MIN_PRIORITY,
    PARENT_HEADER,
    PROTOCOL_VERSION,
    SESSION_HEADER,
    SPOKEN_VERSIONS,
    TOOLS_HEADER,
    Cause,
)
from turncache.structured_fields import Item, format_dictionary, parse_dictionary, shown


@dataclass(frozen=True, slots=True, kw_only=True)
class CallTags:
    """What a client says about one call.

    Attributes:
        session_id: the session, 1 to 256 visible ASCII characters.
        parent_id: session that this one was forked or spawned from.
        final: nothing follows this call.
        turn: number of the turn in the session, from 1; for people, never for decisions.
        call: number of the call in its turn, from 1; likewise.
        cause: why the call is made.
        retain_s: seconds to keep the KV after the call, None for the server's choice.
        priority: 0 to 100, orders sessions within a tenant only.
        tools: measured tool durations in seconds by tool name, ``*`` for any other.
    """

    session_id: str
    parent_id: str | None = None
    final: bool = False
    turn: int | None = None
    call: int | None = None
    cause: Cause | None = None
    retain_s: float | None = None
    priority: int = DEFAULT_PRIORITY
    tools: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))

    def to_headers(self) -> dict[str, str]:
        """Encode as request headers."""
        headers = {
            SESSION_HEADER: check_session_id(self.session_id),
            CALL_HEADER: format_call(
                self.turn, self.call, self.cause, self.retain_s, self.priority
            ),
        }
        if self.parent_id is not None:
            headers[PARENT_HEADER] = check_session_id(self.parent_id, field_name=PARENT_HEADER)
        if self.final:
            headers[FINAL_HEADER] = "true"
        if self.tools and (tools := format_tools(self.tools)):
            headers[TOOLS_HEADER] = tools
        return headers


# The same few combinations come again with every call of every session.
@functools.lru_cache(maxsize=4096)
def format_call(
    turn: int | None,
    call: int | None,
    cause: Cause | None,
    retain_s: float | None,
    priority: int,
) -> str:
    """Encode the value of the ``Turncache`` request header; arguments as in :class:`CallTags`."""
    # Written on every call: the members that change are numbers and words that need no check.
    text = f"v={PROTOCOL_VERSION}"
    if turn is not None:
        text += f", turn={turn:d}"
    if call is not None:
        text += f", call={call:d}"
    if cause is not None:
        text += f", cause={cause}"
    return text + _standing_members(retain_s, priority)


@functools.lru_cache(maxsize=256)
def _standing_members(retain_s: float | None, priority: int) -> str:
    """Encode what is the same for all calls of a session."""
    retain: Item = "auto" if retain_s is None else float(retain_s)
    members: dict[str, Item] = {"retain": retain, "priority": priority}
    return ", " + format_dictionary(members, header=CALL_HEADER)


_TAG_HEADERS: Final = frozenset({CALL_HEADER.lower(), FINAL_HEADER.lower(), TOOLS_HEADER.lower()})


def tags_from_headers(headers: Mapping[str, str], identity: Identity) -> CallTags:
    """Decode what a client said about a call whose session is already known.

    Args:
        headers: request headers with lower-case names.
        identity: result of :func:`identify`.

    Raises:
        ProtocolError: on a version that is not spoken here, or a member of the wrong type. What
            the next version says in words that are not known here counts as unsaid.
    """
    if _TAG_HEADERS.isdisjoint(headers):
        return CallTags(session_id=identity.session_id, parent_id=identity.parent_id)
    members = parse_dictionary(CALL_HEADER, headers.get(CALL_HEADER.lower(), ""))
    if members and check_version(CALL_HEADER, members) > PROTOCOL_VERSION:
        members = _known(members)
    final = headers.get(FINAL_HEADER.lower(), "false").strip().lower()
    if final not in ("true", "false"):
        raise ProtocolError(FINAL_HEADER, f"{shown(final)}: expected true or false")
    return CallTags(
        session_id=identity.session_id,
        parent_id=identity.parent_id,
        final=final == "true",
        turn=_count(members, "turn"),
        call=_count(members, "call"),
        cause=_cause(members),
        retain_s=_retain(members),
        priority=_priority(members),
        tools=parse_tools(headers.get(TOOLS_HEADER.lower(), "")),
    )


def check_version(header: str, members: Mapping[str, Item]) -> int:
    """Return a dictionary's version.

    Raises:
        ProtocolError: when member ``v`` is missing, or neither ours nor a neighbour of it.
    """
    version = members.get("v")
    # Python's True and 1.0 equal 1; on the wire they are other items.
    if type(version) is not int or version not in SPOKEN_VERSIONS:
        raise ProtocolError(
            header,
            f"version {version!r} is not supported; this side speaks {PROTOCOL_VERSION}, and "
            "understands the versions next to it",
        )
    return version


def _known(members: Mapping[str, Item]) -> dict[str, Item]:
    """Return the members of the next version whose values mean something here."""
    readers: dict[str, Callable[[Mapping[str, Item]], object]] = {
        "turn": lambda each: _count(each, "turn"),
        "call": lambda each: _count(each, "call"),
        "cause": _cause,
        "retain": _retain,
        "priority": _priority,
    }
    known: dict[str, Item] = {}
    for name, read in readers.items():
        if name not in members:
            continue
        try:
            read(members)
        except ProtocolError:
            continue
        known[name] = members[name]
    return known


def _words(kind: type[enum.StrEnum]) -> str:
    return ", ".join(member.value for member in kind)


def _cause(members: Mapping[str, Item]) -> Cause | None:
    cause = members.get("cause")
    if cause is None:
        return None
    if cause not in set(Cause):
        raise ProtocolError(CALL_HEADER, f"cause={cause}: expected one of {_words(Cause)}")
    return Cause(str(cause))


def _count(members: Mapping[str, Item], name: str) -> int | None:
    value = members.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ProtocolError(CALL_HEADER, f"{name}={value}: expected a whole number from 1")
    return value


def _retain(members: Mapping[str, Item]) -> float | None:
    value = members.get("retain", "auto")
    if value == "auto":
        return None
    if isinstance(value, (bool, str)) or value < 0:
        raise ProtocolError(CALL_HEADER, f"retain={value}: expected auto or seconds from 0")
    return float(value)


def _priority(members: Mapping[str, Item]) -> int:
    value = members.get("priority", DEFAULT_PRIORITY)
    if (
        isinstance(value, bool)
        or not isinstance(value, int)
        or not MIN_PRIORITY <= value <= MAX_PRIORITY
    ):
        raise ProtocolError(
            CALL_HEADER,
            f"priority={value}: expected a whole number from {MIN_PRIORITY} to {MAX_PRIORITY}",
        )
    return value
