"""The words of the wire contract: names of headers, bounds, values that are one of a few."""

from __future__ import annotations

import enum
from typing import Final

PROTOCOL_VERSION: Final = 1
#: Versions that differ from ours by this much are understood, so that clients, routers and engines
#: can be updated one after the other.
VERSION_SKEW: Final = 1
#: Versions whose messages are read. There is none before 1.
SPOKEN_VERSIONS: Final = range(
    max(1, PROTOCOL_VERSION - VERSION_SKEW), PROTOCOL_VERSION + VERSION_SKEW + 1
)

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
MAX_RETAIN_S: Final = 3600.0
DEFAULT_RETAIN_S: Final = 120.0
MIN_PRIORITY: Final = 0
MAX_PRIORITY: Final = 100
DEFAULT_PRIORITY: Final = 50


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
