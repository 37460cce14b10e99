"""The APIs that the router serves: how each is read, split into legs, and judged. Pure."""

from __future__ import annotations

from typing import Final

from turncache_server.router.apis.api import OPENAI_ERRORS, Api, ErrorForm
from turncache_server.router.apis.chat import CHAT
from turncache_server.router.apis.completions import COMPLETIONS
from turncache_server.router.apis.messages import ANTHROPIC_ERRORS, MESSAGES
from turncache_server.router.apis.responses import RESPONSES

#: Every API whose calls are planned.
APIS: Final[tuple[Api, ...]] = (CHAT, COMPLETIONS, RESPONSES, MESSAGES)


def errors_of(path: str) -> ErrorForm:
    """Return the shape of errors that the clients of a path parse."""
    return ANTHROPIC_ERRORS if path.startswith(MESSAGES.path) else OPENAI_ERRORS
