"""LangChain's OpenAI models with our clients in them.

A model holds four objects of the openai package: two clients and their completions. Ours
take their place, on the same connections, so that every path of the model (streams,
structured output, the Responses API, raw responses) is one that the client tags.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Final

import langchain_openai
import openai
from langchain_core.language_models import BaseChatModel
from langchain_core.runnables import RunnableWithFallbacks
from langchain_core.runnables.base import RunnableBindingBase
from langchain_openai.chat_models.base import BaseChatOpenAI

import turncache
from turncache.client import Bound
from turncache.family import bind, binding_of
from turncache.hosts import Audience, audience
from turncache.results import WeakTable
from turncache_integrations.langgraph.ambient import graph_session

LOG: Final = logging.getLogger("turncache")

_OURS: Final[Mapping[type, type[Any]]] = {
    openai.OpenAI: turncache.OpenAI,
    openai.AsyncOpenAI: turncache.AsyncOpenAI,
}
#: (field with the client, field with its chat completions) of a model.
_FIELDS: Final = (("root_client", "client"), ("root_async_client", "async_client"))

# Models with our clients in them, by the stock model that they stand for.
_copies: Final[WeakTable[Any]] = WeakTable()
_warned: Final[set[str]] = set()


def our_clients(model: BaseChatOpenAI) -> dict[str, Any]:
    """Return the fields of ``model`` that hold clients, with ours in them.

    Clients that follow conversations, when there is no thread, follow them together. What
    is no client of the openai package stays out: a test's double, say.
    """
    fields: dict[str, Any] = {}
    family: Any = None
    for root_name, resource_name in _FIELDS:
        resource = getattr(model, resource_name)
        client = getattr(model, root_name) or getattr(resource, "_client", None)
        ours = _ours(client)
        if ours is None:
            continue
        family = family or binding_of(ours).family
        bind(ours, binding_of(ours), family=family, ambient=graph_session)
        fields |= {root_name: ours, resource_name: ours.chat.completions}
    return fields


def tagged(model: Any) -> Any:
    """Return ``model`` as one whose calls are tagged, made once per model.

    Stock ``ChatOpenAI`` gets our clients in a copy; so do the models in what ``bind``,
    ``with_retry``, ``with_config`` and ``with_fallbacks`` return. Models of other classes
    are returned as they are.
    """
    if type(model) is langchain_openai.ChatOpenAI:
        copy = _copies.get(model)
        if copy is None:
            copy = model.model_copy(update=our_clients(model))
            _copies.put(model, copy)
        return copy
    if isinstance(model, RunnableBindingBase):
        inner = tagged(model.bound)
        return model if inner is model.bound else model.model_copy(update={"bound": inner})
    if isinstance(model, RunnableWithFallbacks):
        return model.model_copy(
            update={
                "runnable": tagged(model.runnable),
                "fallbacks": [tagged(fallback) for fallback in model.fallbacks],
            }
        )
    if not isinstance(model, BaseChatModel):
        _warn(model, "hides which model it calls")
    elif _calls_a_server_of_the_users_own(model):
        _warn(model, "is not langchain_openai.ChatOpenAI")
    return model


def _ours(client: Any) -> Any:
    """Return our client on the connections of ``client``, or None when it is neither's."""
    if isinstance(client, Bound):
        return client.copy()  # type: ignore[attr-defined]
    ours = _OURS.get(type(client))
    if ours is None:
        return None
    # Our classes add methods and no state, and upstream's copy() constructs an object of the
    # class that it is called on: so no argument of the constructor is named here, and those
    # of later versions are kept.
    shell: Any = object.__new__(ours)
    vars(shell).update(vars(client))
    return shell.copy()


def _calls_a_server_of_the_users_own(model: BaseChatModel) -> bool:
    client = getattr(model, "root_client", None)
    if not isinstance(client, openai.OpenAI) or isinstance(client, Bound):
        return False
    return audience(client.base_url.host, client.base_url.port) is Audience.TOLD


def _warn(model: Any, what: str) -> None:
    """Say once per class that its calls are not tagged."""
    name = f"{type(model).__module__}.{type(model).__name__}"
    if name not in _warned:
        _warned.add(name)
        LOG.warning(
            "%s %s: its calls are sent without a session. Use turncache.langgraph.ChatOpenAI, "
            "or a subclass of it",
            name,
            what,
        )
