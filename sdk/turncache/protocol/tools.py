"""How long tools take: the ``Turncache-Tools`` header, written and read."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from typing import Final

from turncache.errors import ProtocolError
from turncache.protocol.words import ANY_TOOL, MAX_TOOLS, MAX_TOOLS_BYTES, TOOLS_HEADER
from turncache.structured_fields import format_item, is_key, parse_dictionary

#: A longer duration is no measurement; it would not fit the header's number format.
_LONGEST_TOOL_S: Final = 1e9
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
    if ANY_TOOL in durations_s:
        # First, so that it is never what does not fit.
        durations_s = {ANY_TOOL: durations_s[ANY_TOOL], **durations_s}
    for name, seconds in durations_s.items():
        row = _tool_row(name, seconds)
        if row is None:
            continue
        if len(rows) == MAX_TOOLS or size + len(row) + 2 > MAX_TOOLS_BYTES:
            break
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
