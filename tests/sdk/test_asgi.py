"""SessionFromHeader: the session lasts as long as the answer, and no longer."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import turncache
from turncache.asgi import SessionFromHeader


def serve(headers: list[tuple[bytes, bytes]], **arguments: Any) -> list[str | None]:
    """Return the sessions that a streaming application sees, and the one after it."""
    seen: list[str | None] = []

    def note() -> None:
        session = turncache.current_session()
        seen.append(None if session is None else session.id)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        for _ in range(2):
            await send({"type": "http.response.body", "more_body": True})
            await asyncio.create_task(asyncio.to_thread(note))

    async def receive() -> Any:
        return {"type": "http.request"}

    async def send(_: Any) -> None:
        await asyncio.sleep(0)

    async def main() -> None:
        middleware = SessionFromHeader(app, **arguments)
        await middleware({"type": "http", "headers": headers}, receive, send)
        note()

    asyncio.run(main())
    return seen


def test_the_session_lasts_for_the_whole_answer() -> None:
    """Every part of a streamed answer is in the request's session; what follows is not."""
    assert serve([(b"x-session-id", b"ticket")]) == ["ticket", "ticket", None]


def test_header_and_prefix_are_chosen() -> None:
    """Another header may name the session, and a prefix keeps applications apart."""
    headers = [(b"X-Chat", b"7"), (b"x-session-id", b"ticket")]
    assert serve(headers, header="x-chat", prefix="shop/")[0] == "shop/7"


@pytest.mark.parametrize("value", [b"", b"two words", b"x" * 300, b"\xff"])
def test_an_illegal_id_is_no_session(value: bytes) -> None:
    """A request that names an impossible session is answered without one."""
    assert serve([(b"x-session-id", value)]) == [None, None, None]
    assert serve([]) == [None, None, None]


def test_other_scopes_pass() -> None:
    """Lifespan events have no headers, and are passed on."""
    calls: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        calls.append(scope["type"])

    async def nothing(*_: Any) -> Any:
        return None

    asyncio.run(SessionFromHeader(app)({"type": "lifespan"}, nothing, nothing))
    assert calls == ["lifespan"]
