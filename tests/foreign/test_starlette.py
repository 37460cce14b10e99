"""Web applications: a streaming answer runs after its handler has returned."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Route

import turncache
from tests.sdk.support import HELLO, session_ids
from turncache.asgi import SessionFromHeader
from turncache.testing import FakeServer


async def get(app: Any, path: str, session_id: str | None = None) -> str:
    """Return what an application answers to one request."""
    headers = [] if session_id is None else [(b"x-session-id", session_id.encode())]
    parts: list[bytes] = []
    done = asyncio.Event()

    async def receive() -> dict[str, Any]:
        await done.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        parts.append(message.get("body", b""))
        if message["type"] == "http.response.body" and not message.get("more_body"):
            done.set()

    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.4"},
        "http_version": "1.1",
        "method": "GET",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "scheme": "http",
        "headers": headers,
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 80),
    }
    await app(scope, receive, send)
    return b"".join(parts).decode()


def application(client: turncache.AsyncOpenAI) -> Starlette:
    """Return an application whose answers are streamed from a model."""

    async def tokens(own: turncache.AsyncOpenAI) -> AsyncIterator[str]:
        stream = await own.chat.completions.create(model="m", messages=HELLO, stream=True)
        async for chunk in stream:
            yield chunk.choices[0].delta.content or ""
        current = turncache.current_session()
        yield json.dumps({"session": None if current is None else current.id})

    async def by_header(_: Request) -> StreamingResponse:
        return StreamingResponse(tokens(client))

    async def by_client(_: Request) -> StreamingResponse:
        return StreamingResponse(tokens(client.with_session("by-client")))

    async def by_block(_: Request) -> StreamingResponse:
        with turncache.session("by-block"):
            return StreamingResponse(tokens(client))

    return Starlette(
        routes=[
            Route("/header", by_header),
            Route("/client", by_client),
            Route("/block", by_block),
        ]
    )


def test_streamed_answers_are_in_their_session(server: FakeServer) -> None:
    """By the request's header for all of the answer; by the client that was given a session;
    a block in the handler has ended by then, and its session is not taken for another's.
    """

    async def main() -> list[str]:
        async with turncache.AsyncOpenAI(base_url=server.url, api_key="-") as client:
            app = SessionFromHeader(application(client))
            return [
                await get(app, "/header", "ticket"),
                await get(app, "/client"),
                await get(app, "/block"),
            ]

    answers = asyncio.run(main())
    assert all(answer.startswith("fine") for answer in answers)
    assert answers[0].endswith('{"session": "ticket"}')
    assert answers[1].endswith('{"session": null}')
    header, own, block = session_ids(server.requests)
    assert (header, own) == ("ticket", "by-client")
    assert str(block).startswith("auto-")


def test_requests_at_once_keep_their_own(server: FakeServer) -> None:
    """Twenty requests in one process: each answer's calls carry the session of its request."""

    async def main() -> list[str]:
        async with turncache.AsyncOpenAI(base_url=server.url, api_key="-") as client:
            app = SessionFromHeader(application(client))
            return await asyncio.gather(*(get(app, "/header", f"s{at}") for at in range(20)))

    for at, answer in enumerate(asyncio.run(main())):
        assert answer.endswith(json.dumps({"session": f"s{at}"}))
    assert sorted(filter(None, session_ids(server.requests))) == sorted(
        f"s{at}" for at in range(20)
    )
