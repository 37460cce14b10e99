"""Every way to call a model that the openai package has, found by walking it.

Every public method of every resource is called once, with arguments made from its
signature, against a transport that records. What reaches a model's path is a *call path*:
it must be tagged, and return what the stock client returns, plain, raw, as a streaming
response and streamed, sync and async. What belongs to the resources of a model and does
not reach one is in a list of exclusions that may only shrink.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any, Final

import openai
import pytest

import turncache
from tests.sdk.support import HELLO, HTTPX, Recorder
from turncache._fake_forms import Chat, Completions, Form, Reply, Responses
from turncache.tagging import PATHS
from turncache.testing import forget_everything

BASE_URL: Final = "http://127.0.0.1:9/v1"
ARGUMENTS: Final = {"model": "m", "messages": HELLO, "input": "hello", "prompt": "hello"}
#: Resources that call a model, by their own name: whatever else they can do is excluded.
MODEL_RESOURCES: Final = ("completions", "responses")
#: Methods that make no call of a model: they manage stored answers, count, compact (the
#: server answers with items for another request), or open a socket of their own.
EXCLUDED: Final = frozenset(
    {
        "chat.completions.delete",
        "chat.completions.list",
        "chat.completions.retrieve",
        "chat.completions.update",
        "responses.cancel",
        "responses.compact",
        "responses.connect",
        "responses.delete",
        "responses.retrieve",
    }
)
NUM_EXCLUDED: Final = 9
#: These ask again and again for something that is no answer of a model.
WAITING: Final = re.compile(r"\.[a-z_]*(?:poll|wait)[a-z_]*$")
FORMS: Final[dict[str, type[Form]]] = {
    "/chat/completions": Chat,
    "/completions": Completions,
    "/responses": Responses,
}


def answer(request: Any) -> Any:
    """Answer as a model does on a model's path, and with an empty object elsewhere."""
    path = request.url.path.removeprefix("/v1")
    if path not in FORMS or request.method != "POST":
        return HTTPX.Response(200, json={"data": []})
    text = request.content.decode()
    form = FORMS[path](7, {"model": "m"}, Reply())
    headers = {"turncache": "v=1"}
    if '"stream":true' in text.replace(" ", ""):
        headers["content-type"] = "text/event-stream"
        return HTTPX.Response(200, content=b"".join(form.events()), headers=headers)
    return HTTPX.Response(200, json=form.whole(), headers=headers)


def resources(client: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every resource below ``client`` with its dotted name."""
    for name in sorted(dir(type(client))):
        found = inspect.getattr_static(type(client), name)
        if name.startswith(("_", "with_")) or not isinstance(found, functools.cached_property):
            continue
        child = getattr(client, name)
        if type(child).__module__.startswith("openai.resources"):
            yield prefix + name, child
            yield from resources(child, f"{prefix}{name}.")


def methods(client: Any) -> Iterator[str]:
    """Yield the dotted name of every public method of every resource."""
    for name, resource in resources(client):
        for method in sorted(vars(type(resource))):
            value = inspect.getattr_static(resource, method)
            if not method.startswith("_") and inspect.isfunction(inspect.unwrap(value)):
                yield f"{name}.{method}"


def resolve(client: Any, name: str, variant: str = "") -> Any:
    """Return the method called ``name``, of ``variant`` when the resource has one, else None."""
    *path, method = name.split(".")
    resource = functools.reduce(getattr, path, client)
    return getattr(getattr(resource, variant) if variant else resource, method, None)


def arguments_of(method: Callable[..., Any], **more: Any) -> dict[str, Any]:
    """Return arguments for everything that ``method`` needs, and all that a model is asked by."""
    out: dict[str, Any] = {}
    for name, parameter in inspect.signature(method).parameters.items():
        if name in ARGUMENTS:
            out[name] = ARGUMENTS[name]
        elif parameter.default is parameter.empty and parameter.kind not in (
            parameter.VAR_KEYWORD,
            parameter.VAR_POSITIONAL,
        ):
            out[name] = "x"
    return {**out, **more}


def reaches_a_model(recorder: Recorder) -> bool:
    """Whether the latest request went to a path of a model."""
    last = recorder.requests[-1] if recorder.requests else None
    return last is not None and last.method == "POST" and path_of(last) in PATHS


def path_of(request: Any) -> str:
    """Return a request's path relative to the base URL."""
    return str(request.url.path.removeprefix("/v1"))


@functools.lru_cache(maxsize=1)
def call_paths() -> tuple[str, ...]:
    """Return every method that reaches a model's path when it is called."""
    recorder = Recorder(answer)
    found = []
    with recorder.client(openai.OpenAI, base_url=BASE_URL) as client:
        for name in methods(client):
            if WAITING.search(name):
                continue
            recorder.requests.clear()
            method = resolve(client, name)
            # Arguments made from a signature do not fit everywhere: what counts is whether
            # a request was sent before.
            with contextlib.suppress(Exception), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                consume(method(**arguments_of(method)))
            if reaches_a_model(recorder):
                found.append(name)
    return tuple(found)


def consume(result: Any) -> Any:
    """Read a result to its end, and return what tells its type."""
    if hasattr(result, "__enter__") and not isinstance(result, openai.Stream):
        with result as inner:
            return [type(inner).__name__, consume_inner(inner)]
    if isinstance(result, openai.Stream):
        return [type(result).__name__, [type(chunk) for chunk in result]]
    return consume_inner(result)


def consume_inner(result: Any) -> Any:
    """Read what came out of a manager or a raw response."""
    if hasattr(result, "parse") and not isinstance(result, openai.BaseModel):
        return [type(result).__name__, consume(result.parse())]
    if hasattr(result, "__next__"):
        return [type(item) for item in result]
    return type(result)


def made(method: Any, arguments: dict[str, Any]) -> Any:
    """Return what a call makes, or what it raises: some paths cannot be streamed upstream."""
    try:
        return consume(method(**arguments))
    except (AttributeError, TypeError) as error:
        return (type(error), str(error))


async def amade(method: Any, arguments: dict[str, Any]) -> Any:
    """Do for async calls what :func:`made` does for sync ones."""
    try:
        return await aconsume(method(**arguments))
    except (AttributeError, TypeError) as error:
        return (type(error), str(error))


async def aconsume(result: Any) -> Any:
    """Do for async results what :func:`consume` does for sync ones."""
    result = await result if inspect.isawaitable(result) else result
    if isinstance(result, openai.AsyncStream):
        return [type(result).__name__, [type(chunk) async for chunk in result]]
    if hasattr(result, "__aenter__"):
        async with result as inner:
            return [type(inner).__name__, await aconsume_inner(inner)]
    return await aconsume_inner(result)


async def aconsume_inner(result: Any) -> Any:
    """Read what came out of an async manager or raw response."""
    if hasattr(result, "parse") and not isinstance(result, openai.BaseModel):
        return [type(result).__name__, await aconsume(result.parse())]
    if hasattr(result, "__anext__"):
        return [type(item) async for item in result]
    return type(result)


VARIANTS: Final = ("", "with_raw_response", "with_streaming_response")


@pytest.fixture(autouse=True)
def fresh_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each test starts as a fresh process would."""
    monkeypatch.delenv("TURNCACHE_SESSION_ID", raising=False)
    forget_everything()
    yield
    forget_everything()


def test_the_walk_finds_what_is_known() -> None:
    """The ways that every version has are among those found: the walk itself works."""
    known = {
        "chat.completions.create",
        "chat.completions.parse",
        "chat.completions.stream",
        "completions.create",
        "responses.create",
        "responses.parse",
        "responses.stream",
    }
    assert known <= set(call_paths())


def test_exclusions_only_shrink() -> None:
    """What a model's resources can do is a call path or excluded, and nothing is both."""
    with openai.OpenAI(api_key="-") as client:
        existing = {name.removeprefix("beta.") for name in methods(client)}
    found = {name.removeprefix("beta.") for name in call_paths()}
    of_models = {name for name in existing if name.rsplit(".", 2)[-2] in MODEL_RESOURCES}
    assert of_models - found <= EXCLUDED
    assert not EXCLUDED & found
    assert len(EXCLUDED) <= NUM_EXCLUDED
    # Newer versions have them all; older ones may lack some.
    assert existing >= EXCLUDED or int(openai.__version__.split(".", 1)[0]) < 3


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("variant", VARIANTS, ids=["plain", "raw", "streaming_response"])
def test_call_paths_beside_create(variant: str, streamed: bool) -> None:
    """Each sync call path, in each variant, names its session and returns upstream's types."""
    recorder = Recorder(answer)
    with (
        recorder.client(turncache.OpenAI, base_url=BASE_URL) as own,
        recorder.client(openai.OpenAI, base_url=BASE_URL) as stock,
    ):
        ways = list(usable(stock, variant, streamed=streamed))
        assert ways
        for name, arguments in ways:
            expected = made(resolve(stock, name, variant), arguments)
            recorder.requests.clear()
            with turncache.session("ticket"):
                got = made(resolve(own, name, variant), arguments)
            assert got == expected, name
            check_tagged(recorder, name)


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("variant", VARIANTS, ids=["plain", "raw", "streaming_response"])
def test_async_call_paths_are_tagged_and_return_the_stock_types(
    variant: str, streamed: bool
) -> None:
    """Each async call path, in each variant, does the same."""

    async def main() -> None:
        recorder = Recorder(answer)
        async with (
            recorder.client(turncache.AsyncOpenAI, base_url=BASE_URL) as own,
            recorder.client(openai.AsyncOpenAI, base_url=BASE_URL) as stock,
        ):
            for name, arguments in usable(stock, variant, streamed=streamed):
                expected = await amade(resolve(stock, name, variant), arguments)
                recorder.requests.clear()
                async with turncache.session("ticket"):
                    got = await amade(resolve(own, name, variant), arguments)
                assert got == expected, name
                check_tagged(recorder, name)

    asyncio.run(main())


def usable(client: Any, variant: str, *, streamed: bool) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the call paths that have this variant, with arguments."""
    for name in call_paths():
        method = resolve(client, name, variant)
        if method is None:
            continue
        can_stream = "stream" in inspect.signature(method).parameters
        if streamed and not can_stream:
            continue
        yield name, arguments_of(method, **({"stream": True} if streamed else {}))


def check_tagged(recorder: Recorder, name: str) -> None:
    """Check that exactly one request was sent, and that it names the session."""
    [request] = recorder.requests
    assert path_of(request) in PATHS, name
    assert request.headers["x-session-id"] == "ticket", name
    assert request.headers["turncache"].startswith("v=1, "), name


def test_the_forms_cover_every_path() -> None:
    """There is an answer for each path that is tagged."""
    assert set(FORMS) == PATHS
