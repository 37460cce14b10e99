"""``TurncacheMiddleware`` for ``langchain.agents.create_agent``."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Self, cast

from langchain.agents.middleware import AgentMiddleware, ModelRequest
from langchain.agents.middleware.types import ModelCallResult
from langgraph.runtime import Runtime

from turncache_integrations.langgraph.ambient import graph_session
from turncache_integrations.langgraph.clients import tagged


class TurncacheMiddleware(AgentMiddleware[Any, Any, Any]):
    """Puts the calls of an agent into its thread's session; works with stock ``ChatOpenAI``.

    ::

        agent = create_agent(model, tools, middleware=[TurncacheMiddleware()], ...)

    Put it last: a middleware after it may choose another model. A tool that calls a client
    itself does so under ``with graph_session():``.

    The state, the nodes and the events of the graph are those of the agent without it; with
    ``end=True`` there is one node more.

    Attributes:
        ends: whether a session ends with each run.
    """

    def __new__(cls, *, end: bool = False) -> Self:
        """Return a middleware; only one that ends sessions adds a node to the graph."""
        made: Any = super().__new__(_Ending if end and cls is TurncacheMiddleware else cls)
        return cast("Self", made)

    def __init__(self, *, end: bool = False) -> None:
        """Take the options.

        Args:
            end: say after each run that nothing follows, so that the server keeps nothing
                of it (:meth:`turncache.Session.end`): for threads that are run once.
                Without it the answer says that a user wait begins.
        """
        super().__init__()
        self.ends = end

    def wrap_model_call(
        self,
        request: ModelRequest[Any],
        handler: Callable[[ModelRequest[Any]], ModelCallResult[Any]],
    ) -> ModelCallResult[Any]:
        """Make the call with our client in the model."""
        return handler(_with_our_model(request))

    async def awrap_model_call(
        self,
        request: ModelRequest[Any],
        handler: Callable[[ModelRequest[Any]], Awaitable[ModelCallResult[Any]]],
    ) -> ModelCallResult[Any]:
        """Make the call with our client in the model."""
        return await handler(_with_our_model(request))


class _Ending(TurncacheMiddleware):
    """The middleware that ends the session with the run."""

    @property
    def name(self) -> str:
        """The public class's name."""
        return TurncacheMiddleware.__name__

    def after_agent(self, state: Any, runtime: Runtime[Any]) -> None:  # noqa: ARG002 - LangChain's
        """End the session."""
        if (session := graph_session()) is not None:
            session.end()

    async def aafter_agent(self, state: Any, runtime: Runtime[Any]) -> None:  # noqa: ARG002
        """End the session."""
        if (session := graph_session()) is not None:
            await session.aend()


def _with_our_model(request: ModelRequest[Any]) -> ModelRequest[Any]:
    model = tagged(request.model)
    return request if model is request.model else request.override(model=model)
