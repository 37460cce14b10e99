"""``session_node``: nodes that call our client, or any HTTP client, in their graph's session."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar, overload

from langchain_core.runnables import Runnable
from langgraph.errors import GraphInterrupt

import turncache
from turncache import Session
from turncache.errors import UsageError
from turncache_integrations.langgraph.ambient import graph_session
from turncache_integrations.langgraph.places import Scope

Node = TypeVar("Node", bound=Callable[..., Any])

#: A session, its id, or a function of the node's state that returns one of both.
Chosen = Session | str | Callable[[Any], Session | str]


@overload
def session_node(node: Node, /) -> Node: ...
@overload
def session_node(
    node: Node,
    /,
    *,
    session: Chosen | None = None,
    scope: Scope = "thread",
    person_s: float | None = None,
) -> Node: ...
@overload
def session_node(
    *,
    session: Chosen | None = None,
    scope: Scope = "thread",
    person_s: float | None = None,
) -> Callable[[Node], Node]: ...
def session_node(
    node: Any = None,
    /,
    *,
    session: Chosen | None = None,
    scope: Scope = "thread",
    person_s: float | None = None,
) -> Any:
    """Return a node that runs in its graph's session: as a decorator, or around any node.

    Inside, :func:`turncache.current_session` is that session. Without a thread and a block
    around the graph there is none, and the node runs as it is.

    Args:
        node: a function, a coroutine function, or an object with ``__call__``. What it
            takes (``config``, ``runtime``, ``writer``, ``store``) and returns
            (``Command``, ``Send``) is unchanged.
        session: instead of the graph's: a session, an id, or a function of the state.
        scope: as of :func:`graph_session`.
        person_s: seconds that a person is expected to take when the node interrupts: told
            to the server then (:meth:`turncache.Session.wait`).

    Raises:
        UsageError: when ``node`` is a Runnable or a generator function.
    """
    if node is None:
        return functools.partial(session_node, session=session, scope=scope, person_s=person_s)
    _check(node)

    async def in_session_async(*args: Any, **kwargs: Any) -> Any:
        chosen = _chosen(session, scope, args, kwargs)
        with chosen or contextlib.nullcontext():
            try:
                return await node(*args, **kwargs)
            except GraphInterrupt:
                _announce(chosen, person_s)
                raise

    def in_session(*args: Any, **kwargs: Any) -> Any:
        chosen = _chosen(session, scope, args, kwargs)
        with chosen or contextlib.nullcontext():
            try:
                return node(*args, **kwargs)
            except GraphInterrupt:
                _announce(chosen, person_s)
                raise

    wrapper: Any = in_session_async if _is_async(node) else in_session
    function = node if hasattr(node, "__name__") else _named(node)
    named: Any = functools.wraps(function)(wrapper)
    named.__name__ = _name_of(node)
    return named


def _chosen(
    chosen: Chosen | None, scope: Scope, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Session | None:
    if chosen is None:
        return graph_session(scope)
    if callable(chosen):
        chosen = chosen(args[0] if args else next(iter(kwargs.values())))
    return chosen if isinstance(chosen, Session) else turncache.session(chosen)


def _announce(session: Session | None, person_s: float | None) -> None:
    """Tell the server that a person is asked, when the caller said how long that takes."""
    if session is not None and person_s is not None:
        session.wait(expected_s=person_s)


def _check(node: Any) -> None:
    if isinstance(node, Runnable):
        raise UsageError(
            f"session_node({type(node).__name__}): a Runnable needs no wrapper: use "
            "turncache.langgraph.ChatOpenAI in it, or wrap a function that invokes it"
        )
    if not callable(node):
        raise UsageError(f"session_node({node!r}): expected a function or a callable object")
    call = _called(node)
    if inspect.isgeneratorfunction(call) or inspect.isasyncgenfunction(call):
        raise UsageError(
            f"session_node({_name_of(node)}): a node that yields keeps its session by itself: "
            "write `with graph_session():` inside it"
        )


def _called(node: Any) -> Any:
    while isinstance(node, functools.partial):
        node = node.func
    if inspect.isfunction(node) or inspect.ismethod(node):
        return node
    return type(node).__call__


def _is_async(node: Any) -> bool:
    return inspect.iscoroutinefunction(_called(node))


def _named(node: Any) -> Any:
    """Return what tells signature and annotations of a callable object or a partial."""
    return node if isinstance(node, functools.partial) else node.__call__


def _name_of(node: Any) -> str:
    while isinstance(node, functools.partial):
        node = node.func
    return str(getattr(node, "__name__", type(node).__name__))
