"""The session of the running code: what LangGraph says, and the blocks around it.

LangGraph puts the config of the running task into a context variable. A block
(``with turncache.session(...)``) keeps the context that it was entered in, so that it can be
told which of the two is the inner one.
"""

from __future__ import annotations

from langchain_core.runnables.config import var_child_runnable_config

import turncache
from turncache import Session
from turncache import scope as scopes
from turncache.protocol import MAX_SESSION_ID_CHARS
from turncache_integrations.langgraph.places import (
    Place,
    Scope,
    place_of,
    step_label,
    step_name,
    thread_label,
    thread_session_id,
)


def thread_session(thread_id: object, *, graph: str = "") -> Session:
    """Return the session of a thread: for its table, its children, ``retain_s``, ``priority``.

    Args:
        thread_id: the thread's id, as in ``configurable``.
        graph: ``turncache_graph`` of ``configurable``, where several graphs share a thread.
    """
    name = str(thread_id)
    return _labelled(turncache.session(thread_session_id(name, graph)), thread_label(name, graph))


def graph_session(scope: Scope = "thread") -> Session | None:
    """Return the session of the running code, or None without a thread and a block.

    A block that was entered in the running task is its session. Else it is its thread's,
    or, when a block is around the whole graph, that block's; subgraphs and branches are
    children of it.

    Args:
        scope: ``thread``: nodes of a graph share a session; ``node`` and ``task`` give each
            node, or each run of one, a child, for nodes that run side by side with
            histories of their own.
    """
    block = scopes.innermost()
    here = place_of(var_child_runnable_config.get())
    # Read once: another thread may close the block. A closed block says nothing here.
    context = None if block is None else block.context
    if block is None or context is None:
        return None if here is None else _session_at(here, scope)
    entered_at = place_of(context.get(var_child_runnable_config))
    if here is None or here == entered_at:
        return block.session
    if entered_at is None:
        return _below(block.session, here.steps(scope))
    if here.is_inside(entered_at):
        return _below(block.session, here.steps(scope)[len(entered_at.steps()) :])
    return _session_at(here, scope)


def _session_at(place: Place, scope: Scope) -> Session:
    return _below(thread_session(place.thread_id, graph=place.graph), place.steps(scope))


def _below(session: Session, steps: tuple[str, ...]) -> Session:
    """Return the session that ``steps`` lead to from ``session``.

    Its parent is the session that the tree starts from, because servers place by it, and a
    session between the two may never make a call.
    """
    if not steps:
        return session
    session_id = "/".join([session.id, *map(step_name, steps)])
    if len(session_id) > MAX_SESSION_ID_CHARS:
        session_id = f"{turncache.opaque_id(session.id)}/{step_name('|'.join(steps))}"
    label = "/".join([session.label or session.id, *map(step_label, steps)])
    found = turncache.session(session_id, parent=session.parent_id or session.id)
    return _labelled(found, label)


def _labelled(session: Session, label: str) -> Session:
    session.label = label
    return session
