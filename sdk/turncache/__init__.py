"""turncache: the OpenAI client that keeps an agent's KV cache alive while its tools run."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from turncache.client import AsyncAzureOpenAI, AsyncOpenAI, AzureOpenAI, OpenAI
    from turncache.errors import TurncacheError
    from turncache.protocol import Outcome
    from turncache.report import outcome
    from turncache.session import Session, current_session, session

__all__ = [
    "AsyncAzureOpenAI",
    "AsyncOpenAI",
    "AzureOpenAI",
    "OpenAI",
    "Outcome",
    "Session",
    "TurncacheError",
    "current_session",
    "outcome",
    "session",
]

# Resolved on first use: the server imports turncache.protocol and must not pay for
# (or depend on) the openai package.
_HOME = {
    "AsyncAzureOpenAI": "client",
    "AsyncOpenAI": "client",
    "AzureOpenAI": "client",
    "OpenAI": "client",
    "Outcome": "protocol",
    "Session": "session",
    "TurncacheError": "errors",
    "current_session": "session",
    "outcome": "report",
    "session": "session",
}


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"turncache.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
