"""LangGraph and LangChain's agents: one line, and an agent's KV survives its tools."""

from __future__ import annotations

from turncache_integrations.langgraph.ambient import graph_session, thread_session
from turncache_integrations.langgraph.chat import ChatOpenAI
from turncache_integrations.langgraph.middleware import TurncacheMiddleware
from turncache_integrations.langgraph.nodes import session_node
from turncache_integrations.langgraph.places import Scope

__all__ = [
    "ChatOpenAI",
    "Scope",
    "TurncacheMiddleware",
    "graph_session",
    "session_node",
    "thread_session",
]
