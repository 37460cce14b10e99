"""``TurncacheMiddleware`` for ``langchain.agents.create_agent``."""

from __future__ import annotations

import weakref
from collections.abc import Awaitable, Callable
from typing import Any, Self, cast

from langchain.agents.middleware import AgentMiddleware, ModelRequest
from langchain.agents.middleware.types import ModelCallResult
from langgraph.runtime import Runtime

from turncache import Session
from turncache_integrations.langgraph.ambient import graph_session
from turncache_integrations.langgraph.clients import innermost, tagged
from turncache_integrations.langgraph.ending import aend, end


class TurncacheMiddleware(AgentMiddleware[Any, Any, Any]):
    """Puts the calls of an agent into its thread's session; works with stock ``ChatOpenAI``.

    ::

        agent = create_agent(model, tools, middleware=[TurncacheMiddleware()], ...)

    Put it last: a middleware after it may choose another model. A tool that calls a client
    itself does so under ``with graph_session():``.

    The state, the nodes and the events of the graph are those of the agent without it; with
    ``end=True`` there is one node more.
    """

    def __new__(cls, *, end: bool = False) -> Self:
        """Return a middleware; only one that ends sessions adds a node to the graph."""
        made: Any = super().__new__(_Ending if end and cls is TurncacheMiddleware else cls)
        return cast("Self", made)

    def __init__(self, *, end: bool = False) -> None:
        """Take the options.

        Args:
            end: say after each run that nothing follows, so that the server keeps nothing
                of it: for threads that are run once. It costs a request after the run, to
                servers that answer with a ``Turncache`` header. Without it the answer says
                that a user wait begins.
        """
        super().__init__()
        self._ends = end
        self._models: weakref.WeakKeyDictionary[Session, Any] = weakref.WeakKeyDictionary()

    def wrap_model_call(
        self,
        request: ModelRequest[Any],
        handler: Callable[[ModelRequest[Any]], ModelCallResult[Any]],
    ) -> ModelCallResult[Any]:
        """Make the call with our client in the model."""
        return handler(self._with_our_model(request))

    async def awrap_model_call(
        self,
        request: ModelRequest[Any],
        handler: Callable[[ModelRequest[Any]], Awaitable[ModelCallResult[Any]]],
    ) -> ModelCallResult[Any]:
        """Make the call with our client in the model."""
        return await handler(self._with_our_model(request))

    def _with_our_model(self, request: ModelRequest[Any]) -> ModelRequest[Any]:
        model = tagged(request.model)
        if self._ends and (session := graph_session()) is not None:
            self._models[session] = innermost(model)
        return request if model is request.model else request.override(model=model)


class _Ending(TurncacheMiddleware):
    """The middleware that ends the session with the run."""

    @property
    def name(self) -> str:
        """The public class's name."""
        return TurncacheMiddleware.__name__

    def after_agent(self, state: Any, runtime: Runtime[Any]) -> None:  # noqa: ARG002 - LangChain's
        """End the session."""
        if (session := graph_session()) is not None:
            end(session, self._models.pop(session, None))

    async def aafter_agent(self, state: Any, runtime: Runtime[Any]) -> None:  # noqa: ARG002
        """End the session."""
        if (session := graph_session()) is not None:
            await aend(session, self._models.pop(session, None))
