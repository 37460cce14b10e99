"""Which vLLM versions the extension may act on. Standard library only.

The one table of versions: the connector decides by it at start, the launcher before it.
A version is entered after the scheduler and engine tests have passed on it; nothing else
makes it tested. A newer one runs in mode ``observe`` until somebody allows it.
"""

from __future__ import annotations

import enum
import re
from types import MappingProxyType
from typing import Final

#: The oldest vLLM with the hooks that the connector needs (``bind_kv_cache_manager``,
#: ``request.session_id``).
OLDEST: Final = (0, 32)

#: Tested minor versions, and on what.
TESTED: Final = MappingProxyType(
    {
        (0, 32): "0.32.0 on CPU, single and pair (requirements/engine-cpu.lock)",
    }
)

_RELEASE = re.compile(r"v?(\d+)\.(\d+)(?:\.\d+)*(?P<rest>.*)")
_FINAL_SUFFIX = re.compile(r"(?:\.post\d+)?(?:\+[a-z0-9.]+)?", re.IGNORECASE)


class Support(enum.StrEnum):
    """What a version of vLLM is to us."""

    TESTED = "tested"
    UNTESTED = "untested"
    TOO_OLD = "too_old"


def support_of(version: str) -> Support:
    """Look a version up, such as ``0.32.0``, ``0.32.1+cpu`` or ``0.33.0rc1``.

    Pre-releases and what cannot be read (``dev``) are untested.
    """
    match = _RELEASE.fullmatch(version.strip())
    if match is None:
        return Support.UNTESTED
    minor = int(match[1]), int(match[2])
    if minor < OLDEST:
        return Support.TOO_OLD
    final = _FINAL_SUFFIX.fullmatch(match["rest"]) is not None
    return Support.TESTED if final and minor in TESTED else Support.UNTESTED


def name_tested_versions() -> str:
    """Return the tested versions for a message, such as ``0.32.x``."""
    return ", ".join(f"{major}.{minor}.x" for major, minor in sorted(TESTED))
