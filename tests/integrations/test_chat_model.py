"""``ChatOpenAI``: every path of LangChain's model is tagged, and nothing else is changed."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import langchain_openai
import openai
import pytest
from langchain.chat_models import init_chat_model
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.runnables import Runnable, RunnableLambda
from langchain_openai import AzureChatOpenAI
from langchain_openai.chat_models.base import BaseChatOpenAI
from pydantic import BaseModel

import turncache
from tests.integrations.conftest import Run
from tests.integrations.support import (
    HELLO,
    config,
    lookup,
    loop_graph,
    our_model,
    session_ids,
    stock_model,
    thread_id_of,
)
from tests.sdk.support import HTTPX, Recorder
from turncache.langgraph import ChatOpenAI, TurncacheMiddleware, thread_session
from turncache.testing import Failure, FakeServer, Reply
from turncache_integrations.langgraph.clients import tagged


class Answer(BaseModel):
    """An answer with a number."""

    number: int


def _structured(method: str) -> Callable[[ChatOpenAI], Runnable[Any, Any]]:
    return lambda model: model.with_structured_output(Answer, method=method)  # type: ignore[arg-type]


VARIANTS: dict[str, Callable[[Any], Runnable[Any, Any]]] = {
    "plain": lambda model: model,
    "bind_tools": lambda model: model.bind_tools([lookup]),
    "bind": lambda model: model.bind(max_tokens=7),
    "with_config": lambda model: model.with_config(tags=["mine"]),
    "with_retry": lambda model: model.with_retry(stop_after_attempt=2),
    "with_fallbacks": lambda model: model.with_fallbacks([model.bind(max_tokens=3)]),
    "structured (function calling)": _structured("function_calling"),
    "structured (JSON schema)": _structured("json_schema"),
    "chain": lambda model: RunnableLambda(lambda messages: messages) | model,
    "model_copy": lambda model: model.model_copy(),
}
ANSWERS = {
    "structured (function calling)": Reply(tools=[("Answer", {"number": 4})]),
    "structured (JSON schema)": Reply(text='{"number": 4}'),
}


def _call(runnable: Runnable[Any, Any], how: str) -> Callable[[Any], Any]:
    if how == "invoke":
        return runnable.invoke
    if how == "batch":
        return lambda messages: runnable.batch([messages, messages])
    return lambda messages: list(runnable.stream(messages))


def _acall(runnable: Runnable[Any, Any], how: str) -> Callable[[Any], Any]:
    async def call(messages: Any) -> Any:
        if how == "invoke":
            return await runnable.ainvoke(messages)
        if how == "batch":
            return await runnable.abatch([messages, messages])
        if how == "events":
            return [event async for event in runnable.astream_events(messages, version="v2")]
        return [chunk async for chunk in runnable.astream(messages)]

    return call


#: LangChain dumps the parsed answer of a stream, which pydantic warns of in the stock model too.
DUMPS = pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")


@DUMPS
@pytest.mark.parametrize("how", ["invoke", "batch", "stream"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_sync_path_is_in_the_threads_session(
    server: FakeServer, variant: str, how: str
) -> None:
    """Whatever is made of the model, and however it is called, its calls are tagged."""
    server.script(*[ANSWERS.get(variant, Reply())] * 2)
    call = _call(VARIANTS[variant](our_model(server)), how)

    def node(state: Any) -> Any:
        call(state["messages"])
        return {"messages": [AIMessage("done")]}

    loop_graph(node).invoke(HELLO, config())
    assert session_ids(server.requests) == [thread_id_of()] * (2 if how == "batch" else 1)
    assert len(thread_session("t1").calls) == len(server.requests)


@DUMPS
@pytest.mark.parametrize("how", ["invoke", "batch", "stream", "events"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_async_path_is_in_the_threads_session(
    server: FakeServer, run: Run, variant: str, how: str
) -> None:
    """Whatever is made of the model, and however it is awaited, its calls are tagged."""
    server.script(*[ANSWERS.get(variant, Reply())] * 2)
    call = _acall(VARIANTS[variant](our_model(server)), how)

    async def node(state: Any) -> Any:
        await call(state["messages"])
        return {"messages": [AIMessage("done")]}

    run(loop_graph(node).ainvoke(HELLO, config()))
    assert session_ids(server.requests) == [thread_id_of()] * (2 if how == "batch" else 1)
    assert len(thread_session("t1").calls) == len(server.requests)


@pytest.mark.parametrize("stream", [False, True])
def test_the_responses_api_is_tagged(server: FakeServer, run: Run, stream: bool) -> None:
    """The other API of the same model is tagged as well, sync and async."""
    model = our_model(server, use_responses_api=True)

    def node(state: Any) -> Any:
        list(model.stream("hello")) if stream else model.invoke("hello")
        return {"messages": [AIMessage("done")]}

    async def anode(state: Any) -> Any:
        if stream:
            _ = [chunk async for chunk in model.astream("hello")]
        else:
            await model.ainvoke("hello")
        return {"messages": [AIMessage("done")]}

    loop_graph(node).invoke(HELLO, config())
    run(loop_graph(anode).ainvoke(HELLO, config()))
    assert [request.path for request in server.requests] == ["/v1/responses"] * 2
    assert session_ids(server.requests) == [thread_id_of()] * 2


def test_a_retry_of_the_clients_own_is_the_same_call(server: FakeServer) -> None:
    """A 503 that the client tries again is one call with the same tags, seen once."""
    server.script(Failure(), Failure())
    model = our_model(server)
    loop_graph(lambda state: {"messages": [model.invoke(state["messages"])]}).invoke(
        HELLO, config()
    )
    assert session_ids(server.requests) == [thread_id_of()] * 3
    assert len({request.headers["turncache"] for request in server.requests}) == 1
    assert len(thread_session("t1").calls) == 1


def test_bodies_are_the_stock_models(server: FakeServer) -> None:
    """What is sent in the body is what the stock model sends, byte for byte."""
    messages = [HumanMessage("hello")]
    for model in (stock_model(server), our_model(server)):
        model.bind_tools([lookup]).invoke(messages)
        list(model.stream(messages))
    bodies = [request.body for request in server.requests]
    assert bodies[:2] == bodies[2:]


def test_a_hosted_provider_gets_what_the_stock_model_sends() -> None:
    """No header of ours leaves for a hosted provider, from the model or the middleware."""
    recorder = Recorder()
    http_client = openai.DefaultHttpxClient(transport=HTTPX.MockTransport(recorder.handle))
    arguments: dict[str, Any] = {"model": "m", "api_key": "-", "http_client": http_client}
    stock = langchain_openai.ChatOpenAI(base_url="https://api.openai.com/v1", **arguments)
    ours = ChatOpenAI(base_url="https://api.openai.com/v1", **arguments)
    loop_graph(lambda state: {"messages": [stock.invoke(state["messages"])]}).invoke(
        HELLO, config()
    )
    for model in (ours, tagged(stock)):
        loop_graph(
            lambda state, model=model: {"messages": [model.invoke(state["messages"])]}
        ).invoke(HELLO, config())
    sent = [dict(request.headers) for request in recorder.requests]
    assert len(sent) == 3
    assert sent[0] == sent[1] == sent[2]


def test_outside_a_graph_blocks_count_and_else_content(server: FakeServer) -> None:
    """Without a graph the model is as our client: blocks, and automatic sessions."""
    model = our_model(server)
    with turncache.session("mine"):
        model.invoke("hello")
    model.invoke("hello")
    first, second = session_ids(server.requests)
    assert first == "mine"
    assert second is not None
    assert second.startswith("auto-")


def test_without_a_thread_conversations_are_followed(server: FakeServer, run: Run) -> None:
    """A graph without a thread is followed by its content, sync and async calls together."""
    model = our_model(server).bind_tools([lookup])

    def node(state: Any) -> Any:
        return {"messages": [model.invoke(state["messages"])]}

    async def anode(state: Any) -> Any:
        return {"messages": [await model.ainvoke(state["messages"])]}

    state = loop_graph(node, checkpointer=False).invoke(HELLO)
    run(loop_graph(anode, checkpointer=False).ainvoke(state))
    ids = session_ids(server.requests)
    assert len(ids) == 4
    assert len(set(ids)) == 1
    assert str(ids[0]).startswith("auto-")


def test_explicit_headers_win(server: FakeServer) -> None:
    """A session that a call names itself is the call's session."""
    model = our_model(server).bind(extra_headers={"X-Session-ID": "explicit"})
    loop_graph(lambda state: {"messages": [model.invoke(state["messages"])]}).invoke(
        HELLO, config()
    )
    assert session_ids(server.requests) == ["explicit"]


def test_clients_of_the_users_own_are_kept(server: FakeServer) -> None:
    """A model that was given one of our clients keeps that client's session."""
    client = turncache.OpenAI(base_url=server.url, api_key="-").with_session("client's")
    model = ChatOpenAI(model="m", api_key="-", root_client=client, client=client.chat.completions)
    loop_graph(lambda state: {"messages": [model.invoke(state["messages"])]}).invoke(
        HELLO, config()
    )
    assert session_ids(server.requests) == ["client's"]


def test_settings_of_the_client_are_kept(server: FakeServer) -> None:
    """Headers, retries, timeouts and connections are those of the stock model."""
    more: dict[str, Any] = {
        "default_headers": {"X-Mine": "1"},
        "max_retries": 5,
        "timeout": 7,
        "organization": "org",
    }
    stock, ours = stock_model(server, **more), our_model(server, **more)
    for name in ("root_client", "root_async_client"):
        mine, theirs = getattr(ours, name), getattr(stock, name)
        assert isinstance(mine, (turncache.OpenAI, turncache.AsyncOpenAI))
        for setting in ("max_retries", "timeout", "organization", "base_url", "api_key"):
            assert getattr(mine, setting) == getattr(theirs, setting)
        assert mine._client is theirs._client, "LangChain shares connections per URL"
    ours.invoke("hello")
    assert server.requests[-1].headers["x-mine"] == "1"


def test_the_stock_model_is_not_changed(server: FakeServer) -> None:
    """The middleware's model is a copy, made once; the user's own keeps its clients."""
    model = stock_model(server)
    before = {name: getattr(model, name) for name in ("client", "root_client")}
    assert tagged(model) is tagged(model)
    assert {name: getattr(model, name) for name in ("client", "root_client")} == before


def test_other_providers_classes_are_not_tagged(
    server: FakeServer, caplog: pytest.LogCaptureFixture
) -> None:
    """Another class is left alone; when it calls a local server that is said, once."""

    class TheirChat(BaseChatOpenAI):
        """A provider's class on the same base."""

    azure = AzureChatOpenAI(
        api_key="-", api_version="1", azure_endpoint="https://x.openai.azure.com", model="m"
    )
    theirs = TheirChat(model="m", base_url=server.url, api_key="-")
    with caplog.at_level(logging.WARNING, logger="turncache"):
        assert tagged(azure) is azure
        assert caplog.messages == []
        assert tagged(theirs) is theirs
        assert tagged(theirs) is theirs
    [said] = caplog.messages
    assert "TheirChat is not langchain_openai.ChatOpenAI" in said
    theirs.invoke("hello")
    assert session_ids(server.requests) == [None]


def test_a_model_that_hides_another_is_named(caplog: pytest.LogCaptureFixture) -> None:
    """A configurable model chooses when it is called: that it is not tagged is said, once."""
    hidden = init_chat_model("m", model_provider="openai", configurable_fields=("model",))
    with caplog.at_level(logging.WARNING, logger="turncache"):
        assert tagged(hidden) is hidden
    [said] = caplog.messages
    assert "hides which model it calls" in said


def test_subclasses_of_ours_are_tagged(server: FakeServer) -> None:
    """A user's own class on top of ours is tagged as ours is."""

    class Mine(ChatOpenAI):
        """The user's."""

    model = Mine(model="m", base_url=server.url, api_key="-")
    assert tagged(model) is model
    loop_graph(lambda state: {"messages": [model.invoke(state["messages"])]}).invoke(
        HELLO, config()
    )
    assert session_ids(server.requests) == [thread_id_of()]


def test_wrapped_stock_models_are_found() -> None:
    """Inside what bind, with_retry, with_config and with_fallbacks return there is ours."""
    model = langchain_openai.ChatOpenAI(model="m", base_url="http://localhost:1/v1", api_key="-")  # type: ignore[arg-type]
    assert isinstance(tagged(model.bind(stop="x")).bound.root_client, turncache.OpenAI)
    assert isinstance(tagged(model.with_retry()).bound.root_client, turncache.OpenAI)
    both = tagged(model.with_fallbacks([model]))
    assert isinstance(both.runnable.root_client, turncache.OpenAI)
    assert isinstance(both.fallbacks[0].root_client, turncache.OpenAI)
    ours = ChatOpenAI(model="m", base_url="http://localhost:1/v1", api_key="-")  # type: ignore[arg-type]
    bound = ours.bind(stop="x")
    assert tagged(bound) is bound


def test_disabled_is_stock(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """``TURNCACHE_DISABLED`` and profile ``off`` leave every header away."""
    for name, value in (("DISABLED", "1"), ("PROFILE", "off")):
        with monkeypatch.context() as patch:
            patch.setenv(f"TURNCACHE_{name}", value)
            model = our_model(server)
            loop_graph(
                lambda state, model=model: {"messages": [model.invoke(state["messages"])]}
            ).invoke(HELLO, config())
    assert session_ids(server.requests) == [None, None]


def test_the_middleware_is_exported() -> None:
    """The door of the client package leads to the integration's own objects."""
    assert turncache.langgraph.TurncacheMiddleware is TurncacheMiddleware
    assert turncache.langgraph.__all__ == sorted(turncache.langgraph.__all__)
