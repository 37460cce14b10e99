"""Requests as nobody planned them: what upstream makes of them is what the caller gets."""

from __future__ import annotations

import threading
from collections import OrderedDict, UserDict, deque
from collections.abc import Callable
from typing import Any

import openai
import pytest

import turncache
from tests.sdk.support import Recorder, assistant, result, session_ids, user
from turncache.testing import FakeServer

BASE_URL = "http://127.0.0.1:9/v1"


def _nested(depth: int) -> list[Any]:
    out: list[Any] = []
    for _ in range(depth):
        out = [out]
    return out


_LONG = [user(str(at)) if at % 2 == 0 else assistant(str(at)) for at in range(7)]
_CIRCLE: list[Any] = []
_CIRCLE.append(_CIRCLE)
_CALLED = openai.types.chat.ChatCompletionMessage.model_validate(
    {**assistant(None, ("c1", "search"))}
)
#: Histories as applications build them, and worse.
ODD_HISTORIES: dict[str, Callable[[], Any]] = {
    "tuple": lambda: tuple(_LONG),
    "generator": lambda: (message for message in _LONG),
    "deque": lambda: deque(_LONG),
    "ordered dicts": lambda: [OrderedDict(message) for message in _LONG],
    "user dicts": lambda: [UserDict(message) for message in _LONG],
    "an answer's message": lambda: [user(), _CALLED, result(), _CALLED, result(), *_LONG],
    "keys that are no strings": lambda: [*_LONG, {1: 2, **user()}],
    "bytes": lambda: [*_LONG, user(b"x")],  # type: ignore[arg-type]
    "parts from a generator": lambda: [user(iter([{"type": "text"}])), *_LONG],  # type: ignore[arg-type]
    "numbers as ids": lambda: [user(), assistant(None, (1, "f")), result(1), *_LONG],  # type: ignore[arg-type]
    "megabytes": lambda: [user(), result("c1", "x" * 3_000_000), *_LONG],
    "a surrogate": lambda: [*_LONG, user("\ud800")],
    "no number": lambda: [*_LONG, user(float("nan"))],  # type: ignore[arg-type]
    "no messages": lambda: [None, "a", 1, [], {}],
    "a circle": lambda: [*_LONG, user(_CIRCLE)],  # type: ignore[arg-type]
    "an abyss": lambda: [*_LONG, user(_nested(3000))],  # type: ignore[arg-type]
}


@pytest.mark.odd_request
@pytest.mark.parametrize("name", ODD_HISTORIES)
def test_odd_histories_are_sent_as_the_stock_client_sends_them(name: str) -> None:
    """Whatever stands for messages: the same bytes, the same answer, or the same error."""
    seen = []
    for kind in (openai.OpenAI, turncache.OpenAI):
        recorder = Recorder()
        with recorder.client(kind, base_url=BASE_URL) as caller:
            for _ in range(2):
                try:
                    answer = caller.chat.completions.create(model="m", messages=_odd(name))
                except Exception as error:  # noqa: BLE001 - whichever it is, it is upstream's
                    answer = f"{type(error).__name__}: {error}"
                seen.append((answer, [request.content for request in recorder.requests]))
    assert seen[:2] == seen[2:]


def _odd(name: str) -> Any:
    return ODD_HISTORIES[name]()


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
def test_an_interrupt_goes_through(
    client: turncache.OpenAI, server: FakeServer, streamed: bool
) -> None:
    """Ctrl-C while an answer is awaited, or between two chunks, leaves the block as it is: the
    call is recorded with it, nothing stays locked, and the session goes on.
    """

    def interrupt(*_: Any) -> Any:
        raise KeyboardInterrupt

    def read(caller: Any, stream: bool) -> None:
        answer = caller.chat.completions.create(model="m", messages=[user()], stream=stream)
        with answer as chunks:
            for chunk in chunks:
                interrupt(chunk)

    with (
        Recorder(interrupt).client(turncache.OpenAI, base_url=BASE_URL) as interrupted,
        turncache.session("ticket") as session,
    ):
        with pytest.raises(KeyboardInterrupt):
            read(client if streamed else interrupted, streamed)
        other = threading.Thread(target=lambda: turncache.session("elsewhere"))
        other.start()
        other.join(20)
        assert not other.is_alive()
        client.chat.completions.create(model="m", messages=[user()])
    first, second = session.calls
    assert first.error == ("abandoned" if streamed else "KeyboardInterrupt")
    assert (second.boundary, second.error) == ("user", None)
    assert session_ids(server.requests)[-1] == "ticket"


def test_a_chain_of_options_is_one_client(client: turncache.OpenAI, server: FakeServer) -> None:
    """A hundred copies of copies follow one conversation, and each says what it was given."""
    caller: Any = client
    for at in range(100):
        caller = caller.with_options(timeout=5 + at).copy(default_headers={"X-Mine": str(at)})
        if at % 25 == 0:
            caller.chat.completions.create(model="m", messages=[user()])
    assert len(set(session_ids(server.requests))) == 1
    assert [request.headers["x-mine"] for request in server.requests] == ["0", "25", "50", "75"]
    assert type(caller) is turncache.OpenAI
