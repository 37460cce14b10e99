"""The door to the LangGraph integration, which needs the extra ``langgraph``.

It lives in :mod:`turncache_integrations.langgraph`; nothing else of turncache imports it.
"""

from __future__ import annotations

try:
    from turncache_integrations.langgraph import (
        ChatOpenAI,
        Scope,
        TurncacheMiddleware,
        graph_session,
        session_node,
        thread_session,
    )
except ModuleNotFoundError as missing:
    package = (missing.name or "").partition(".")[0]
    raise ModuleNotFoundError(
        f"{package} is not installed, and turncache.langgraph needs it: "
        "pip install 'turncache[langgraph]'",
        name=missing.name,
    ) from missing

__all__ = [
    "ChatOpenAI",
    "Scope",
    "TurncacheMiddleware",
    "graph_session",
    "session_node",
    "thread_session",
]
