"""turncache: the OpenAI client that keeps an agent's KV cache alive while its tools run."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from turncache.client import AsyncAzureOpenAI, AsyncOpenAI, AzureOpenAI, OpenAI
    from turncache.errors import TurncacheError
    from turncache.instrumentation import instrument, uninstrument
    from turncache.protocol import Outcome
    from turncache.records import CallRecord
    from turncache.report import outcome, session_of
    from turncache.retrying import Failover, aopen_stream, open_stream
    from turncache.sessions import Session, current_session, opaque_id, session
    from turncache.untagged import untagged_calls

__all__ = [
    "AsyncAzureOpenAI",
    "AsyncOpenAI",
    "AzureOpenAI",
    "CallRecord",
    "Failover",
    "OpenAI",
    "Outcome",
    "Session",
    "TurncacheError",
    "aopen_stream",
    "current_session",
    "instrument",
    "opaque_id",
    "open_stream",
    "outcome",
    "session",
    "session_of",
    "uninstrument",
    "untagged_calls",
]

# Resolved on first use: the server imports turncache.protocol and must not pay for
# (or depend on) the openai package.
_HOME = {
    "AsyncAzureOpenAI": "client",
    "AsyncOpenAI": "client",
    "AzureOpenAI": "client",
    "CallRecord": "records",
    "Failover": "retrying",
    "OpenAI": "client",
    "Outcome": "protocol",
    "Session": "sessions",
    "TurncacheError": "errors",
    "aopen_stream": "retrying",
    "current_session": "sessions",
    "instrument": "instrumentation",
    "opaque_id": "sessions",
    "open_stream": "retrying",
    "outcome": "report",
    "session": "sessions",
    "session_of": "report",
    "uninstrument": "instrumentation",
    "untagged_calls": "untagged",
}


def __getattr__(name: str) -> Any:
    if name == "langgraph":
        return importlib.import_module("turncache.langgraph")
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"turncache.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
