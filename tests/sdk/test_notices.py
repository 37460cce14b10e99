"""Notices between two calls: in the background, bounded, silent."""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import openai
import pytest

import turncache
from tests.sdk.support import HELLO, HTTPX, Recorder
from turncache.notices import LEFT_ALONE_S, MAX_QUEUED, NOTIFIER, Notifier
from turncache.protocol import Notice
from turncache.testing import Failure, FakeServer, Request


def ask(client: openai.OpenAI) -> Any:
    """Make a chat completion."""
    return client.chat.completions.create(model="m", messages=HELLO)


def notices(server: FakeServer) -> list[Request]:
    """Return the notices that arrived, when all are sent."""
    assert NOTIFIER.flush(10)
    return [request for request in server.requests if request.path == "/v1/sessions"]


@pytest.fixture
def deaf() -> Iterator[FakeServer]:
    """Give a server that does not know notices."""
    with FakeServer(knows_notices=False) as server:
        yield server


def test_a_wait_is_posted(client: turncache.OpenAI, server: FakeServer) -> None:
    """It names session and call in headers, and the expected seconds in the body."""
    with turncache.session("ticket", priority=80) as session:
        ask(client)
        session.wait(expected_s=74.00049)
    [notice] = notices(server)
    assert notice.method == "POST"
    assert notice.body == {"notice": "wait", "expect_s": 74.0}
    assert notice.headers["x-session-id"] == "ticket"
    assert notice.headers["turncache"].startswith("v=1, turn=1, call=1, cause=user")
    assert "priority=80" in notice.headers["turncache"]
    assert "turncache-tools" not in notice.headers


def test_an_end_is_posted(client: turncache.OpenAI, server: FakeServer) -> None:
    """It is marked as final; a call that follows is served, and tagged, as any other."""
    session = turncache.session("ticket")
    with session:
        ask(client)
    session.end()
    [notice] = notices(server)
    assert notice.body == {"notice": "final"}
    assert notice.headers["x-session-final"] == "true"
    with session:
        ask(client)
    assert server.requests[-1].headers["x-session-id"] == "ticket"


def test_a_notice_carries_the_clients_key() -> None:
    """The client of the latest call sends it, with its own keys and connections."""
    recorder = Recorder()
    with recorder.client(
        turncache.OpenAI, base_url="http://10.0.0.7:8000/v1", api_key="secret"
    ) as client:
        with turncache.session("ticket") as session:
            ask(client)
            session.wait(expected_s=1)
        assert NOTIFIER.flush(10)
    notice = recorder.requests[-1]
    assert str(notice.url) == "http://10.0.0.7:8000/v1/sessions"
    assert notice.headers["authorization"] == "Bearer secret"


def test_nobody_to_tell_is_silence(client: turncache.OpenAI, server: FakeServer) -> None:
    """Before a first call, and after a provider's only, nothing is sent and nothing raised."""
    turncache.session("ticket").wait(expected_s=1)
    turncache.session("ticket").end()
    recorder = Recorder()
    with recorder.client(turncache.OpenAI) as hosted, turncache.session("ticket") as session:
        ask(hosted)
        session.wait(expected_s=1)
        session.end()
        assert NOTIFIER.flush(10)
    assert [request.url.path for request in recorder.requests] == ["/v1/chat/completions"]
    assert notices(server) == []


def test_a_client_that_is_gone_says_nothing(server: FakeServer) -> None:
    """A session keeps no client alive."""
    with turncache.session("ticket") as session:
        with turncache.OpenAI(base_url=server.url, api_key="-") as client:
            ask(client)
        del client
        session.end()
    assert notices(server) == []


def test_a_server_without_notices_is_asked_once(
    deaf: FakeServer, caplog: pytest.LogCaptureFixture
) -> None:
    """A 404 is silence: no warning, and no further notice for ten minutes."""
    now = [0.0]
    notifier = Notifier(clock=lambda: now[0])
    client = turncache.OpenAI(base_url=deaf.url, api_key="-")
    session = turncache.session("ticket")
    with client, session:
        ask(client)
        for wait_s, num_requests in ((0.0, 1), (1.0, 1), (LEFT_ALONE_S, 2)):
            now[0] += wait_s
            notifier.say(session, Notice.FINAL)
            assert notifier.flush(10)
            assert len(deaf.requests) == 1 + num_requests
    assert [r for r in caplog.records if r.levelno > logging.DEBUG and r.name == "turncache"] == []


@pytest.mark.parametrize("failure", [Failure(status=500), Failure(status=0), Failure(status=401)])
def test_a_failing_server_raises_nothing(
    failure: Failure, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever a server answers, the caller and the next call notice nothing."""

    def answer(request: Any) -> Any:
        if not request.url.path.endswith("/sessions"):
            return HTTPX.Response(200, json={"choices": []})
        if failure.status == 0:
            raise HTTPX.ConnectError("gone")
        return HTTPX.Response(failure.status, json={}, headers={"retry-after-ms": "1"})

    recorder = Recorder(answer)
    with (
        recorder.client(turncache.OpenAI, base_url="http://127.0.0.1:9/v1") as client,
        turncache.session("ticket") as session,
    ):
        ask(client)
        session.wait(expected_s=3)
        assert NOTIFIER.flush(10)
        ask(client)
    assert [r for r in caplog.records if r.levelno > logging.DEBUG and r.name == "turncache"] == []


@pytest.mark.parametrize("expected_s", [-1.0, float("nan"), float("inf"), "soon", None])
def test_what_is_no_duration_is_said_once_and_not_sent(
    client: turncache.OpenAI,
    server: FakeServer,
    caplog: pytest.LogCaptureFixture,
    expected_s: Any,
) -> None:
    """A wait that means nothing is a warning, never an error."""
    with turncache.session("ticket") as session:
        ask(client)
        session.wait(expected_s=expected_s)
    assert notices(server) == []
    assert "expected seconds from 0" in caplog.text


def test_the_queue_is_bounded_and_nobody_waits() -> None:
    """While a server hangs, callers go on, and the oldest notices give way."""
    free = threading.Event()

    def answer(request: Any) -> Any:
        if request.url.path.endswith("/sessions"):
            free.wait(20)
        return HTTPX.Response(200, json={"choices": []})

    recorder = Recorder(answer)
    with recorder.client(turncache.OpenAI, base_url="http://127.0.0.1:9/v1") as client:
        sessions = [turncache.session(f"s{at}") for at in range(MAX_QUEUED + 10)]
        for session in sessions:
            with session:
                ask(client)
        for session in sessions:
            session.end()
        free.set()
        assert NOTIFIER.flush(20)
    sent = [r.headers["x-session-id"] for r in recorder.requests if "sessions" in r.url.path]
    assert sent[-MAX_QUEUED:] == [session.id for session in sessions[-MAX_QUEUED:]]
    assert len(sent) <= MAX_QUEUED + 1


def test_a_notice_that_a_call_has_overtaken_is_dropped() -> None:
    """What was said of a wait is not said any more when the wait is over."""
    first, free = threading.Event(), threading.Event()

    def answer(request: Any) -> Any:
        if request.url.path.endswith("/sessions"):
            first.set()
            free.wait(20)
        return HTTPX.Response(200, json={"choices": []})

    recorder = Recorder(answer)
    with (
        recorder.client(turncache.OpenAI, base_url="http://127.0.0.1:9/v1") as client,
        turncache.session("ticket") as session,
    ):
        ask(client)
        session.wait(expected_s=1)
        assert first.wait(10)
        session.wait(expected_s=2)
        ask(client)
        free.set()
        assert NOTIFIER.flush(10)
    assert len([r for r in recorder.requests if "sessions" in r.url.path]) == 1


def test_async_clients_say_it_on_their_loop(server: FakeServer) -> None:
    """From the loop itself, from another thread, and awaited at the end."""

    async def main() -> None:
        async with (
            turncache.AsyncOpenAI(base_url=server.url, api_key="-") as client,
            turncache.session("ticket") as session,
        ):
            await client.chat.completions.create(model="m", messages=HELLO)
            session.wait(expected_s=5)
            await settled(1)
            await asyncio.to_thread(session.wait, expected_s=6)
            await settled(2)
            await session.aend()

    async def settled(number: int) -> None:
        for _ in range(1000):
            if len([r for r in server.requests if r.path == "/v1/sessions"]) >= number:
                return
            await asyncio.sleep(0.01)

    asyncio.run(main())
    bodies = [request.body for request in notices(server)]
    assert bodies == [
        {"notice": "wait", "expect_s": 5},
        {"notice": "wait", "expect_s": 6},
        {"notice": "final"},
    ]
    # The loop is gone: nothing is sent, and nothing complains.
    turncache.session("ticket").end()
    assert len(notices(server)) == 3


def test_aend_waits_for_a_sync_client_too(client: turncache.OpenAI, server: FakeServer) -> None:
    """In an async program with a sync client the thread is waited for."""
    with turncache.session("ticket") as session:
        ask(client)
    asyncio.run(session.aend())
    assert [r.body for r in server.requests if r.path == "/v1/sessions"] == [{"notice": "final"}]


def _say_in_child(client: turncache.OpenAI) -> None:
    with (
        openai.DefaultHttpxClient() as http_client,
        client.with_options(http_client=http_client) as own,
        turncache.session("child") as session,
    ):
        ask(own)
        session.end()
        assert NOTIFIER.flush(10)


# Python 3.12 and later warn about every fork of a process with threads.
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_sends_its_own(client: turncache.OpenAI, server: FakeServer) -> None:
    """A fork while the lock is held leaves the child able to speak."""
    with NOTIFIER._changed:
        process = multiprocessing.get_context("fork").Process(target=_say_in_child, args=(client,))
        process.start()
    process.join(30)
    assert process.exitcode == 0
    assert [notice.headers["x-session-id"] for notice in notices(server)] == ["child"]


def test_the_last_word_of_a_process_is_sent(server: FakeServer) -> None:
    """A script that ends right after end() has said it."""
    code = (
        "import sys, turncache\n"
        "client = turncache.OpenAI(base_url=sys.argv[1], api_key='-')\n"
        "with turncache.session('script') as session:\n"
        "    client.responses.create(model='m', input='x')\n"
        "session.end()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, server.url], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert [notice.body for notice in notices(server)] == [{"notice": "final"}]
