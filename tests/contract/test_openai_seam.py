"""Exactly what the client relies on in openai: one test per seam, on every version we name.

``python -m tests.contract.openai_versions`` runs this file and ``tests/sdk`` on each. A
failure here says which assumption a new version broke; one in ``tests/sdk`` only says
that something did.
"""

from __future__ import annotations

import asyncio
import copy
import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterator
from typing import Any

import openai
import openai.resources
import pytest

from tests.sdk.support import COMPLETION, HELLO, HTTPX, Recorder
from turncache.tagging import PATHS

BASE_URL = "http://127.0.0.1:9/v1"
BODY: Any = {"model": "m", "messages": HELLO}
CLIENTS = (openai.OpenAI, openai.AsyncOpenAI, openai.AzureOpenAI, openai.AsyncAzureOpenAI)

STREAM = (
    'data: {"id":"a","object":"chat.completion.chunk","created":1,"model":"m","choices":'
    '[{"index":0,"delta":{"content":"x"},"finish_reason":"stop"}]}\n\ndata: [DONE]\n\n'
)


def _answer(request: Any) -> Any:
    if b'"stream":true' in request.content.replace(b" ", b""):
        headers = {"content-type": "text/event-stream", "turncache": "v=1"}
        return HTTPX.Response(200, text=STREAM, headers=headers)
    return HTTPX.Response(200, json=COMPLETION, headers={"turncache": "v=1"})


@pytest.fixture
def recorder() -> Recorder:
    """Give a transport that answers whole or streamed."""
    return Recorder(_answer)


def capturing(kind: Any, recorder: Recorder) -> tuple[Any, list[dict[str, Any]]]:
    """Return a client of ``kind`` and the arguments that its request() gets."""
    seen: list[dict[str, Any]] = []

    class Capturing(kind):  # type: ignore[misc]
        def request(self, cast_to: Any, options: Any, **more: Any) -> Any:
            seen.append({"cast_to": cast_to, "options": options, **more})
            return super().request(cast_to, options, **more)

    return recorder.client(Capturing, base_url=BASE_URL), seen


@pytest.mark.parametrize("kind", CLIENTS)
def test_request_has_the_signature(kind: Any) -> None:
    """request(cast_to, options, *, stream=False, stream_cls=None) is public."""
    parameters = inspect.signature(kind.request).parameters
    assert list(parameters) == ["self", "cast_to", "options", "stream", "stream_cls"]
    for name, default in (("stream", False), ("stream_cls", None)):
        assert parameters[name].kind is inspect.Parameter.KEYWORD_ONLY
        assert parameters[name].default is default


@pytest.mark.parametrize("kind", CLIENTS)
def test_with_options_is_an_alias_of_copy(kind: Any) -> None:
    """The alias is bound to upstream's own copy(): overriding one leaves the other."""
    assert kind.with_options is kind.copy


def test_copy_makes_the_class_of_the_instance(recorder: Recorder) -> None:
    """copy() of a subclass is a new instance of the subclass, on the same HTTP client."""

    class Mine(openai.OpenAI):
        """A subclass."""

    with recorder.client(Mine, base_url=BASE_URL) as client:
        assert type(client.copy()) is Mine
        assert client.copy() is not client
        client.with_options(timeout=3).chat.completions.create(model="m", messages=HELLO)
    assert len(recorder.requests) == 1


def test_options_have_what_is_read_and_written(recorder: Recorder) -> None:
    """Method, path, headers, body and parser are plain attributes of the options."""
    client, seen = capturing(openai.OpenAI, recorder)
    with client:
        client.chat.completions.create(
            model="m",
            messages=(message for message in HELLO),
            extra_headers={"x-mine": "1"},
            extra_body={"top_k": 3},
        )
        client.chat.completions.create(model="m", messages=HELLO)
    options, plain = seen[0]["options"], seen[1]["options"]
    assert (options.method.lower(), options.url) == ("post", "/chat/completions")
    assert dict(options.headers) == {"x-mine": "1"}
    assert options.extra_json == {"top_k": 3}
    assert options.json_data == {"model": "m", "messages": HELLO}
    assert not options.extra_json.keys() & options.json_data.keys()
    assert not isinstance(plain.headers, dict)
    assert not plain.extra_json
    assert not callable(plain.post_parser)


def test_options_copy_shallowly(recorder: Recorder) -> None:
    """A copy of the options can be given other headers without touching the original."""
    client, seen = capturing(openai.OpenAI, recorder)
    with client:
        client.chat.completions.create(model="m", messages=HELLO)
    options = seen[0]["options"]
    twin = copy.copy(options)
    vars(twin).update(headers={"x-mine": "1"}, extra_json={"top_k": 3}, post_parser=str)
    assert twin.headers == {"x-mine": "1"}
    assert twin.extra_json == {"top_k": 3}
    assert twin.post_parser is str
    assert twin.json_data is options.json_data
    assert not isinstance(options.headers, dict)
    assert not options.extra_json
    assert not callable(options.post_parser)


def test_an_answer_may_be_asked_for_unparsed(recorder: Recorder) -> None:
    """A response type to cast to gives a response: with the HTTP response, and a parse() that
    returns what the plain call does. Nothing of it is sent.
    """
    for kind in (openai.types.chat.ChatCompletion, object):
        recorder.requests.clear()
        with recorder.client(openai.OpenAI, base_url=BASE_URL) as client:
            plain, raw = (
                client.post("/chat/completions", body=BODY, cast_to=cast_to)
                for cast_to in (kind, openai.APIResponse[kind])  # type: ignore[valid-type]
            )
        assert type(raw) is openai.APIResponse
        assert raw.http_response.headers["turncache"] == "v=1"
        assert raw.parse() == plain
        assert type(raw.parse()) is type(plain)
        one, other = recorder.requests
        assert dict(one.headers) == dict(other.headers)


def test_an_async_answer_may_be_asked_for_unparsed(recorder: Recorder) -> None:
    """The async client's is the same; its parse() is awaited."""
    kind: Any = openai.types.chat.ChatCompletion

    async def main() -> None:
        async with recorder.client(openai.AsyncOpenAI, base_url=BASE_URL) as client:
            plain = await client.post("/chat/completions", body=BODY, cast_to=kind)
            raw = await client.post(
                "/chat/completions", body=BODY, cast_to=openai.AsyncAPIResponse[kind]
            )
            assert type(raw) is openai.AsyncAPIResponse
            assert raw.http_response.headers["turncache"] == "v=1"
            assert await raw.parse() == plain

    asyncio.run(main())


def test_the_parser_in_the_options_sees_every_parsed_answer(recorder: Recorder) -> None:
    """post_parser is called by parse() of plain, raw and streaming responses."""
    seen: list[str] = []

    def observe(answer: Any) -> Any:
        seen.append(type(answer).__name__)
        return answer

    class Mine(openai.OpenAI):
        def request(self, cast_to: Any, options: Any, **more: Any) -> Any:
            options = copy.copy(options)
            options.post_parser = observe
            return super().request(cast_to, options, **more)

    with recorder.client(Mine, base_url=BASE_URL) as client:
        api = client.chat.completions
        api.create(model="m", messages=HELLO)
        api.with_raw_response.create(model="m", messages=HELLO).parse()
        with api.with_streaming_response.create(model="m", messages=HELLO) as response:
            response.parse()
    assert seen == ["ChatCompletion"] * 3


def test_a_stream_is_of_the_given_class(recorder: Recorder) -> None:
    """stream_cls may be a subclass; its __stream__() yields the chunks."""
    client, seen = capturing(openai.OpenAI, recorder)
    with client:
        with client.chat.completions.create(model="m", messages=HELLO, stream=True) as stream:
            assert type(stream) is openai.Stream
            assert stream.response.headers["turncache"] == "v=1"
        kind: Any = seen[0]["stream_cls"]

        class Mine(kind):  # type: ignore[misc]
            """A subclass of a parametrised stream."""

            def __stream__(self) -> Iterator[Any]:
                for chunk in super().__stream__():
                    yield ("seen", chunk)

        made = client.post(
            "/chat/completions",
            body={"model": "m", "messages": HELLO, "stream": True},
            cast_to=object,
            stream=True,
            stream_cls=Mine,
        )
        with made:
            assert [mark for mark, _ in made] == ["seen"]


def test_an_async_stream_may_be_any_iterator(recorder: Recorder) -> None:
    """AsyncStream's __stream__() may return an async iterator that is no generator; response
    is set before it is called.
    """
    kind: Any = openai.AsyncStream[Any]

    class Two:
        def __init__(self, response: Any) -> None:
            self.left = [response, response]

        def __aiter__(self) -> Any:
            return self

        async def __anext__(self) -> Any:
            if not self.left:
                raise StopAsyncIteration
            return self.left.pop()

    class Mine(kind):  # type: ignore[misc]
        def __stream__(self) -> Any:
            return Two(self.response)

    async def main() -> None:
        async with recorder.client(openai.AsyncOpenAI, base_url=BASE_URL) as client:
            stream = await client.post(
                "/chat/completions",
                body={"model": "m", "messages": HELLO, "stream": True},
                cast_to=object,
                stream=True,
                stream_cls=Mine,
            )
            assert [item async for item in stream] == [stream.response] * 2
            await stream.close()

    asyncio.run(main())


@pytest.mark.parametrize("kind", [openai.Stream, openai.AsyncStream])
def test_streams_have_what_is_overridden(kind: Any) -> None:
    """Both stream classes have __stream__() and close(), and refer weakly."""
    assert inspect.isfunction(kind.__stream__)
    assert inspect.isfunction(kind.close)
    assert kind.__weakrefoffset__


def test_results_refer_weakly() -> None:
    """Answers, HTTP responses and clients can be watched without being held."""
    for kind in (openai.types.chat.ChatCompletion, HTTPX.Response, openai.OpenAI):
        assert kind.__weakrefoffset__, kind


def test_urls_have_host_and_port(recorder: Recorder) -> None:
    """base_url tells where a call goes."""
    with recorder.client(openai.OpenAI, base_url="http://LLM.example.com:8000/v1") as client:
        assert (client.base_url.host, client.base_url.port) == ("llm.example.com", 8000)
    with recorder.client(
        openai.AzureOpenAI,
        azure_endpoint="https://mine.openai.azure.com",
        api_version="2024-10-01",
    ) as client:
        assert client.base_url.host == "mine.openai.azure.com"


def test_default_headers_are_readable(recorder: Recorder) -> None:
    """The constructor's headers are part of default_headers."""
    with recorder.client(
        openai.OpenAI, base_url=BASE_URL, default_headers={"X-Mine": "1"}
    ) as client:
        assert client.default_headers["X-Mine"] == "1"


def test_user_agent_has_the_class_name(recorder: Recorder) -> None:
    """Upstream writes the class's name into User-Agent: ours has upstream's name."""

    class Other(openai.OpenAI):
        """A subclass with another name."""

    with recorder.client(Other, base_url=BASE_URL) as client:
        client.chat.completions.create(model="m", messages=HELLO)
    agent = recorder.requests[0].headers["user-agent"]
    assert agent == f"Other/Python {openai.__version__}"


def test_header_values_may_be_omitted(recorder: Recorder) -> None:
    """Omit as a header's value takes the header away."""
    with recorder.client(
        openai.OpenAI, base_url=BASE_URL, default_headers={"X-Mine": "1"}
    ) as client:
        client.chat.completions.create(
            model="m", messages=HELLO, extra_headers={"X-Mine": openai.Omit()}
        )
    assert "x-mine" not in recorder.requests[0].headers


def test_any_path_can_be_posted_to() -> None:
    """post() takes a path that no resource has, headers, and NoneType for no answer; a copy
    has its own time limit and retries.
    """
    recorder = Recorder(lambda _: HTTPX.Response(204))
    with recorder.client(openai.OpenAI, base_url=BASE_URL) as client:
        answer = client.with_options(max_retries=1, timeout=2.0).post(
            "/sessions",
            body={"notice": "final"},
            cast_to=type(None),
            options={"headers": {"X-Mine": "1"}},
        )
    assert answer is None
    [request] = recorder.requests
    assert str(request.url) == f"{BASE_URL}/sessions"
    assert request.headers["x-mine"] == "1"
    assert request.headers["x-stainless-read-timeout"] == "2.0"


def test_a_status_is_on_the_error() -> None:
    """An answer of 400 and more raises an error with its number."""
    recorder = Recorder(lambda _: HTTPX.Response(405))
    with (
        recorder.client(openai.OpenAI, base_url=BASE_URL) as client,
        pytest.raises(openai.APIStatusError) as caught,
    ):
        client.post("/sessions", body={}, cast_to=type(None))
    assert caught.value.status_code == 405


def test_a_stream_goes_on_where_it_was_left(recorder: Recorder) -> None:
    """A second iterator of a stream continues after what the first has taken."""
    with (
        recorder.client(openai.OpenAI, base_url=BASE_URL) as client,
        client.chat.completions.create(model="m", messages=HELLO, stream=True) as stream,
    ):
        assert next(iter(stream)).choices
        assert list(iter(stream)) == []


_POST = re.compile(r"""self\._post\(\s*"(/(?:chat/completions|completions|responses)[^"]*)\"""")
#: Methods that post to a model's paths and are no calls of the model that we tag.
_UNTAGGED = {"/responses/compact", "/responses/input_tokens"}


def test_every_method_that_calls_a_model_is_known() -> None:
    """A new way to call a model fails here: it must come through a path that we tag."""
    paths: set[str] = set()
    for module in pkgutil.walk_packages(openai.resources.__path__, "openai.resources."):
        source = inspect.getsource(importlib.import_module(module.name))
        paths |= {path.partition("?")[0] for path in _POST.findall(source)}
    assert paths - _UNTAGGED == PATHS


def test_our_tests_use_the_matching_http_library() -> None:
    """The transport of the tests belongs to the family that openai is built on."""
    with openai.DefaultHttpxClient() as client:
        assert isinstance(client, HTTPX.Client)
