"""The wire contract: every header, field and word that crosses a process.

Standard library only, so that client, router and engine can share it. Names live in this
package and nowhere else; how a header's text is parsed and written is in
:mod:`turncache.structured_fields`.

Version history of :data:`PROTOCOL_VERSION`:

1. first version.

A change that an older reader would misunderstand raises the version; a new member
of a dictionary does not, because unknown members are ignored. A version understands its
neighbours (:data:`SPOKEN_VERSIONS`): of the next one it reads the members that it knows, and
takes one whose value it does not know for absent. So a version may add words and members, and
give a member another meaning only under another name.
"""

from __future__ import annotations

from turncache.protocol.hints import (
    STRIPPED_BODY_MEMBERS,
    XARG_PREFIX,
    EngineHints,
    members_from_outside,
)
from turncache.protocol.identity import Identity, SessionSource, check_session_id, identify
from turncache.protocol.outcome import Outcome
from turncache.protocol.tags import CallTags, check_version, format_call, tags_from_headers
from turncache.protocol.tools import format_tools, parse_tools, tool_key
from turncache.protocol.words import (
    ANY_TOOL,
    CALL_HEADER,
    DEFAULT_PRIORITY,
    DEFAULT_RETAIN_S,
    FINAL_HEADER,
    MAX_PRIORITY,
    MAX_RETAIN_S,
    MAX_SESSION_ID_CHARS,
    MAX_TOOLS,
    MAX_TOOLS_BYTES,
    MIN_PRIORITY,
    NOTICES_PATH,
    OUTCOME_HEADER,
    PARENT_HEADER,
    PROTOCOL_VERSION,
    REQUEST_ID_HEADER,
    SESSION_HEADER,
    SPOKEN_VERSIONS,
    TOOLS_HEADER,
    Boundary,
    Cause,
    Mode,
    Notice,
    Plan,
    Reason,
)
from turncache.structured_fields import Item, format_dictionary, parse_dictionary

__all__ = [
    "ANY_TOOL",
    "CALL_HEADER",
    "DEFAULT_PRIORITY",
    "DEFAULT_RETAIN_S",
    "FINAL_HEADER",
    "MAX_PRIORITY",
    "MAX_RETAIN_S",
    "MAX_SESSION_ID_CHARS",
    "MAX_TOOLS",
    "MAX_TOOLS_BYTES",
    "MIN_PRIORITY",
    "NOTICES_PATH",
    "OUTCOME_HEADER",
    "PARENT_HEADER",
    "PROTOCOL_VERSION",
    "REQUEST_ID_HEADER",
    "SESSION_HEADER",
    "SPOKEN_VERSIONS",
    "STRIPPED_BODY_MEMBERS",
    "TOOLS_HEADER",
    "XARG_PREFIX",
    "Boundary",
    "CallTags",
    "Cause",
    "EngineHints",
    "Identity",
    "Item",
    "Mode",
    "Notice",
    "Outcome",
    "Plan",
    "Reason",
    "SessionSource",
    "check_session_id",
    "check_version",
    "format_call",
    "format_dictionary",
    "format_tools",
    "identify",
    "members_from_outside",
    "parse_dictionary",
    "parse_tools",
    "tags_from_headers",
    "tool_key",
]
