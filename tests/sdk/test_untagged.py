"""Calls without a session: counted, with the reason."""

from __future__ import annotations

import threading

import openai
import pytest

import turncache
from tests.sdk.support import HELLO, Recorder, Unreadable
from turncache.testing import FakeServer


def ask(client: openai.OpenAI, **more: object) -> None:
    """Make a chat completion."""
    client.chat.completions.create(model="m", messages=HELLO, **more)  # type: ignore[call-overload]


def test_tagged_calls_are_not_counted(client: turncache.OpenAI, server: FakeServer) -> None:
    """In a session, or followed: nothing is counted, and other requests never are."""
    with turncache.session("ticket"):
        ask(client)
        client.completions.create(model="m", prompt="text")
    ask(client)
    client.embeddings.create(model="m", input="text")
    assert turncache.untagged_calls() == {}


def test_each_reason_is_counted(client: turncache.OpenAI, server: FakeServer) -> None:
    """A block that has ended, an id that is not ours, a text without a session."""
    with turncache.session() as session:
        pass
    ask(client.with_session(session))
    ask(client, extra_headers={"X-Session-ID": "not an id"})
    ask(client, extra_body={"session_id": 7})
    client.completions.create(model="m", prompt="text")
    assert turncache.untagged_calls() == {"ended": 1, "foreign_id": 2, "text": 1}


def test_a_server_that_is_not_told_is_counted() -> None:
    """A provider's calls say nothing of a session, and that is visible."""
    with Recorder().client(turncache.OpenAI) as hosted:
        ask(hosted)
        with turncache.session("ticket"):
            ask(hosted)
        assert turncache.untagged_calls() == {"not_told": 2}
        ask(hosted.with_profile("off"))
    assert turncache.untagged_calls() == {"not_told": 2}


@pytest.mark.odd_request
def test_a_request_that_cannot_be_read_is_counted(
    client: turncache.OpenAI, server: FakeServer
) -> None:
    """It goes on as the stock client's, once per call."""
    body = {"model": "m", "messages": [Unreadable(role="user", content="hello")]}
    for _ in range(2):
        client.post("/chat/completions", body=body, cast_to=object)
    assert turncache.untagged_calls() == {"unreadable": 2}


def test_threads_lose_no_count(client: turncache.OpenAI, server: FakeServer) -> None:
    """Counting is exact when many threads do it."""
    with turncache.session() as session:
        pass
    own = client.with_session(session)
    threads = [threading.Thread(target=ask, args=(own,)) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert turncache.untagged_calls() == {"ended": 20}
