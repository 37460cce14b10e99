"""The wire contract: every header, field and word that crosses a process.

Standard library only, so that client, router and engine can share it. Names live
here and nowhere else; how a header's text is parsed and written is in
:mod:`turncache.structured_fields`.

Version history of :data:`PROTOCOL_VERSION`:

1. first version.

A change that an older reader would misunderstand raises the version; a new member
of a dictionary does not, because unknown members are ignored.
"""

from __future__ import annotations

import enum
import functools
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final

from turncache.errors import ProtocolError
from turncache.structured_fields import Item as Item  # noqa: PLC0414 - a part of the contract
from turncache.structured_fields import (
    format_dictionary as format_dictionary,  # noqa: PLC0414 - likewise
)
from turncache.structured_fields import format_item, is_key, shown
from turncache.structured_fields import (
    parse_dictionary as parse_dictionary,  # noqa: PLC0414 - likewise
)

PROTOCOL_VERSION: Final = 1

# --- request headers -------------------------------------------------------------
SESSION_HEADER: Final = "X-Session-ID"
PARENT_HEADER: Final = "X-Parent-Session-ID"
FINAL_HEADER: Final = "X-Session-Final"
CALL_HEADER: Final = "Turncache"
TOOLS_HEADER: Final = "Turncache-Tools"
# --- answer headers --------------------------------------------------------------
OUTCOME_HEADER: Final = "Turncache-Outcome"
REQUEST_ID_HEADER: Final = "X-Request-Id"
# --- notices between two calls -----------------------------------------------------
#: Where a client posts them, relative to its base URL; the session is in the header.
NOTICES_PATH: Final = "/sessions"

MAX_SESSION_ID_CHARS: Final = 256
MAX_TOOLS: Final = 16
MAX_TOOLS_BYTES: Final = 512
ANY_TOOL: Final = "*"
#: A longer duration is no measurement; it would not fit the header's number format.
_LONGEST_TOOL_S: Final = 1e9
MAX_RETAIN_S: Final = 3600.0
DEFAULT_RETAIN_S: Final = 120.0
MIN_PRIORITY: Final = 0
MAX_PRIORITY: Final = 100
DEFAULT_PRIORITY: Final = 50

_VISIBLE_ASCII = re.compile(r"[\x21-\x7e]+")


class Boundary(enum.StrEnum):
    """How a call ended: what kind of wait begins."""

    TOOL = "tool"
    USER = "user"
    FINAL = "final"


class Cause(enum.StrEnum):
    """Why a call is made."""

    USER = "user"
    TOOL = "tool"
    FORK = "fork"
    COMPACTION = "compaction"
    RETRY = "retry"


class Notice(enum.StrEnum):
    """What a client says about a session between two calls."""

    WAIT = "wait"
    FINAL = "final"


class Plan(enum.StrEnum):
    """How the router served a call."""

    SINGLE = "single"
    DECODE = "decode"
    RETURN = "return"
    COLD = "cold"


class Reason(enum.StrEnum):
    """Why a call's KV was reused no further than it was. One closed list."""

    OK = "ok"
    NEW_SESSION = "new_session"
    BELOW_THRESHOLD = "below_threshold"
    DEARER = "dearer"
    EVICTED = "evicted"
    OVER_BUDGET = "over_budget"
    DIVERGED = "diverged"
    SOURCE_UNKNOWN = "source_unknown"
    SOURCE_GONE = "source_gone"
    TIMEOUT = "timeout"
    INCOMPATIBLE = "incompatible"
    UNSUPPORTED = "unsupported"
    DISABLED = "disabled"
    ERROR = "error"


class Mode(enum.StrEnum):
    """What the engine extension does: nothing, count only, or act."""

    OFF = "off"
    OBSERVE = "observe"
    ON = "on"


# --- sessions --------------------------------------------------------------------


def check_session_id(value: str, *, field_name: str = SESSION_HEADER) -> str:
    """Return ``value`` when it is a legal session id.

    Raises:
        ProtocolError: unless it has 1 to 256 visible ASCII characters.
    """
    if not _VISIBLE_ASCII.fullmatch(value):
        raise ProtocolError(
            field_name,
            f"{shown(value)} is no session id: expected 1 to {MAX_SESSION_ID_CHARS} visible "
            "ASCII characters without spaces; hash or percent-encode other names",
        )
    if len(value) > MAX_SESSION_ID_CHARS:
        raise ProtocolError(
            field_name,
            f"session id of {len(value)} characters; at most {MAX_SESSION_ID_CHARS} are allowed: "
            "hash longer names",
        )
    return value


class SessionSource(enum.StrEnum):
    """Where a session id was found, in order of precedence."""

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


def identify(headers: Mapping[str, str], body: Mapping[str, Any]) -> Identity | None:
    """Find the session of a request: the first schema that is present wins, whole.

    Schemas are never mixed: a parent is only read from the schema that gave the id.

    Args:
        headers: request headers with lower-case names.
        body: the parsed JSON body.

    Returns:
        The identity, or None when no schema is present.

    Raises:
        ProtocolError: when the schema that is present holds an illegal id.
    """
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


# --- what a client says about a call -----------------------------------------------


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
        ProtocolError: on a version that is not spoken here, or a member of the wrong type.
    """
    if _TAG_HEADERS.isdisjoint(headers):
        return CallTags(session_id=identity.session_id, parent_id=identity.parent_id)
    members = parse_dictionary(CALL_HEADER, headers.get(CALL_HEADER.lower(), ""))
    if members:
        check_version(CALL_HEADER, members)
    final = headers.get(FINAL_HEADER.lower(), "false").strip().lower()
    if final not in ("true", "false"):
        raise ProtocolError(FINAL_HEADER, f"{shown(final)}: expected true or false")
    cause = members.get("cause")
    if cause is not None and cause not in set(Cause):
        raise ProtocolError(CALL_HEADER, f"cause={cause}: expected one of {_words(Cause)}")
    return CallTags(
        session_id=identity.session_id,
        parent_id=identity.parent_id,
        final=final == "true",
        turn=_count(members, "turn"),
        call=_count(members, "call"),
        cause=None if cause is None else Cause(str(cause)),
        retain_s=_retain(members),
        priority=_priority(members),
        tools=parse_tools(headers.get(TOOLS_HEADER.lower(), "")),
    )


def check_version(header: str, members: Mapping[str, Item]) -> None:
    """Refuse a dictionary whose version is not spoken here.

    Raises:
        ProtocolError: when member ``v`` is missing or another version.
    """
    version = members.get("v")
    # Python's True and 1.0 equal 1; on the wire they are other items.
    if type(version) is not int or version != PROTOCOL_VERSION:
        raise ProtocolError(
            header, f"version {version!r} is not supported; this side speaks {PROTOCOL_VERSION}"
        )


def _words(kind: type[enum.StrEnum]) -> str:
    return ", ".join(member.value for member in kind)


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


_NOT_IN_KEY = re.compile(r"[^a-z0-9_\-.*]")


def tool_key(name: str) -> str:
    """Return the row of ``Turncache-Tools`` that stands for the tool called ``name``.

    Keys of structured fields are lower case: ``Bash`` travels as ``bash``, and a
    character that no key may hold as ``_``. Whoever looks a row up does the same.
    """
    key = _NOT_IN_KEY.sub("_", name.lower())
    return key if is_key(key) else f"t{key}"


def format_tools(durations_s: Mapping[str, float]) -> str:
    """Encode tool durations: at most 16 rows and 512 bytes, what does not fit is left out.

    Names that are no structured-field key are left out too; the row ``*`` covers them.
    """
    rows: list[str] = []
    size = 0
    ordered: Iterable[tuple[str, float]] = durations_s.items()
    if ANY_TOOL in durations_s:
        ordered = [(ANY_TOOL, durations_s[ANY_TOOL]), *durations_s.items()]
    seen: set[str] = set()
    for name, seconds in ordered:
        row = None if name in seen else _tool_row(name, seconds)
        if row is None:
            continue
        if len(rows) == MAX_TOOLS or size + len(row) + 2 > MAX_TOOLS_BYTES:
            break
        seen.add(name)
        rows.append(row)
        size += len(row) + 2
    return ", ".join(rows)


# The tools of an agent come with every call, and few of their durations change between two.
@functools.lru_cache(maxsize=1024)
def _tool_row(name: str, seconds: float) -> str | None:
    if not is_key(name) or not 0 <= seconds <= _LONGEST_TOOL_S:
        return None
    return f"{name}={format_item(TOOLS_HEADER, float(seconds))}"


def parse_tools(text: str) -> dict[str, float]:
    """Decode tool durations in seconds by name.

    Raises:
        ProtocolError: over 512 bytes, over 16 rows, or a value that is not seconds from 0.
    """
    if len(text) > MAX_TOOLS_BYTES:
        raise ProtocolError(
            TOOLS_HEADER, f"{len(text)} bytes; at most {MAX_TOOLS_BYTES} are allowed"
        )
    members = parse_dictionary(TOOLS_HEADER, text)
    if len(members) > MAX_TOOLS:
        raise ProtocolError(TOOLS_HEADER, f"{len(members)} rows; at most {MAX_TOOLS} are allowed")
    out: dict[str, float] = {}
    for name, value in members.items():
        if isinstance(value, (bool, str)) or value < 0:
            raise ProtocolError(TOOLS_HEADER, f"{name}={value}: expected seconds from 0")
        out[name] = float(value)
    return out


# --- what happened to a call's KV ----------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What happened to the KV of one call's prompt, in tokens.

    Always ``local + returned + computed == prompt``.

    Attributes:
        prompt: tokens of the prompt.
        local: found in the cache of the engine that did the prefill.
        returned: pulled from another engine and verified.
        computed: computed by this call.
        lost: part of ``computed`` that an earlier call of the lineage had computed.
        plan: how the router served the call.
        reason: why no more was reused.
        at: token at which the prompt diverged from the lineage, with reason ``diverged``.
    """

    prompt: int
    local: int
    returned: int
    computed: int
    lost: int = 0
    plan: Plan | None = None
    reason: Reason = Reason.OK
    at: int | None = None

    def __post_init__(self) -> None:
        counts = (self.prompt, self.local, self.returned, self.computed, self.lost)
        if min(counts) < 0 or self.local + self.returned + self.computed != self.prompt:
            raise ProtocolError(
                OUTCOME_HEADER,
                f"local {self.local} + returned {self.returned} + computed {self.computed} "
                f"must be prompt {self.prompt}, all from 0",
            )
        if self.lost > self.computed:
            raise ProtocolError(
                OUTCOME_HEADER, f"lost {self.lost} is more than computed {self.computed}"
            )

    @property
    def reused(self) -> int:
        """Tokens that were not computed by this call."""
        return self.local + self.returned

    def to_header(self) -> str:
        """Encode as the value of ``Turncache-Outcome``."""
        members: dict[str, Item] = {
            "prompt": self.prompt,
            "local": self.local,
            "returned": self.returned,
            "computed": self.computed,
            "lost": self.lost,
        }
        if self.plan is not None:
            members["plan"] = self.plan.value
        members["reason"] = self.reason.value
        if self.at is not None:
            members["at"] = self.at
        return format_dictionary(members, header=OUTCOME_HEADER)

    @classmethod
    def from_header(cls, text: str) -> Outcome:
        """Decode the value of ``Turncache-Outcome``.

        Raises:
            ProtocolError: when a count is missing or the counts do not add up.
        """
        members = parse_dictionary(OUTCOME_HEADER, text)
        counts: dict[str, int] = {}
        for name in ("prompt", "local", "returned", "computed", "lost"):
            value = members.get(name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise ProtocolError(OUTCOME_HEADER, f"{name}={value!r}: expected a whole number")
            counts[name] = value
        plan, reason, at = members.get("plan"), members.get("reason"), members.get("at")
        return cls(
            **counts,
            plan=Plan(str(plan)) if plan in set(Plan) else None,
            # A reason that a newer server knows and we do not is still an answer.
            reason=Reason(str(reason)) if reason in set(Reason) else Reason.ERROR,
            at=at if isinstance(at, int) and not isinstance(at, bool) else None,
        )


# --- what the router tells an engine -------------------------------------------------

#: Prefix of every scalar of ours in ``vllm_xargs``.
XARG_PREFIX: Final = "tc_"
#: Members that steer an engine and never come from outside.
STRIPPED_BODY_MEMBERS: Final = ("kv_transfer_params", "ec_transfer_params", "kv_hints")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineHints:
    """Flat scalars for one engine, carried in ``vllm_xargs``.

    Attributes:
        session: namespaced session id.
        parent: namespaced session id of the parent.
        tenant: opaque tenant name.
        retain_s: seconds to keep the KV after this call, None for the engine's default.
        expect_s: seconds until the next call is expected, None when unknown.
        priority: 0 to 100.
        source: engine id to pull from; resolved in the engine's own allow-list.
        handover: another engine will take this prompt: keep it above everything until then.
        call: how this leg is to be counted: ``prefill``, ``decode`` or ``single``.
        request: id under which the outcome is kept; vLLM randomises its own.
        final: nothing follows this call.
        compaction: the caller replaced its history: the old chain is superseded.
        stock: ``kv_transfer_params`` are our router's: hand this prompt over as vLLM's own
            NIXL connector does.
    """

    session: str
    parent: str | None = None
    tenant: str | None = None
    retain_s: float | None = None
    expect_s: float | None = None
    priority: int = DEFAULT_PRIORITY
    source: str | None = None
    handover: bool = False
    call: str | None = None
    request: str | None = None
    final: bool = False
    compaction: bool = False
    stock: bool = False

    def to_xargs(self) -> dict[str, str | int | float]:
        """Encode as scalars; members at their default are left out."""
        out: dict[str, str | int | float] = {
            "tc_v": PROTOCOL_VERSION,
            "tc_session": self.session,
        }
        for name in ("parent", "tenant", "retain_s", "expect_s", "source", "call", "request"):
            value = getattr(self, name)
            if value is not None:
                out[XARG_PREFIX + name] = value
        if self.priority != DEFAULT_PRIORITY:
            out["tc_priority"] = self.priority
        for name in ("handover", "final", "compaction", "stock"):
            if getattr(self, name):
                out[XARG_PREFIX + name] = 1
        return out

    @classmethod
    def from_xargs(cls, xargs: Mapping[str, Any], *, trusted: bool) -> EngineHints | None:
        """Decode scalars; anything malformed is ignored, because an engine must not fail on it.

        Args:
            xargs: the request's extra arguments.
            trusted: whether our router is in front; otherwise only the session and a
                clipped retention are read.

        Returns:
            The hints, or None without a legal session.
        """
        session = _legal_or_none(xargs.get("tc_session"))
        if session is None:
            return None
        retain_s = _seconds(xargs.get("tc_retain_s"))
        if not trusted or xargs.get("tc_v") != PROTOCOL_VERSION:
            return cls(session=session, retain_s=retain_s)
        priority = xargs.get("tc_priority", DEFAULT_PRIORITY)
        return cls(
            session=session,
            parent=_legal_or_none(xargs.get("tc_parent")),
            tenant=_legal_or_none(xargs.get("tc_tenant")),
            retain_s=retain_s,
            expect_s=_seconds(xargs.get("tc_expect_s")),
            priority=priority
            if type(priority) is int and MIN_PRIORITY <= priority <= MAX_PRIORITY
            else DEFAULT_PRIORITY,
            source=_legal_or_none(xargs.get("tc_source")),
            handover=xargs.get("tc_handover") == 1,
            call=_legal_or_none(xargs.get("tc_call")),
            request=_legal_or_none(xargs.get("tc_request")),
            final=xargs.get("tc_final") == 1,
            compaction=xargs.get("tc_compaction") == 1,
            stock=xargs.get("tc_stock") == 1,
        )


def _legal_or_none(value: object) -> str | None:
    if not isinstance(value, str) or len(value) > MAX_SESSION_ID_CHARS:
        return None
    return value if _VISIBLE_ASCII.fullmatch(value) else None


def _seconds(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value == math.inf:
        return None
    # Clipped before it is converted: an integer from outside may exceed every float.
    return float(min(value, MAX_RETAIN_S)) if value >= 0 else None


def members_from_outside(members: Iterable[str]) -> Iterator[str]:
    """Yield the names among ``members`` that a client must not set in ``vllm_xargs``."""
    for name in members:
        if name.startswith(XARG_PREFIX) or name in STRIPPED_BODY_MEMBERS or name == "session_id":
            yield name
