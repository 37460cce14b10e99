"""Asking a control socket from threads and from asyncio: timeouts, late and odd answers."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import pytest

from turncache.errors import EngineFault
from turncache_server.control.client import AsyncControlClient, ControlClient
from turncache_server.control.messages import (
    MAX_MESSAGE_BYTES,
    Call,
    CallReply,
    ModeReply,
    Peek,
    PeekReply,
    Reply,
    Request,
    SetMode,
    encode,
    open_envelope,
)
from turncache_server.control.server import ControlServer

Serve = Callable[[Callable[[Request], Reply]], ControlServer]
Ask = Callable[..., Any]


def echo(request: Request) -> Reply:
    """Answer a call question with its id as the reason."""
    assert isinstance(request, Call)
    return CallReply(found=True, reason=request.request)


def nobody() -> str:
    """Return an address where nothing listens."""
    server = ControlServer("tcp://127.0.0.1:0", echo)
    server.close()
    return server.address


def sync_ask(address: str, request: Request, kind: type[Any], *, timeout_s: float) -> Any:
    """Ask one question from this thread."""
    client = ControlClient()
    try:
        return client.ask(address, request, kind, timeout_s=timeout_s)
    finally:
        client.close()


def async_ask(address: str, request: Request, kind: type[Any], *, timeout_s: float) -> Any:
    """Ask one question from an event loop."""

    async def run() -> Any:
        client = AsyncControlClient()
        try:
            return await client.ask(address, request, kind, timeout_s=timeout_s)
        finally:
            await client.close()

    return asyncio.run(run())


@pytest.fixture(params=[sync_ask, async_ask], ids=["thread", "asyncio"])
def ask(request: pytest.FixtureRequest) -> Ask:
    """One question through either client."""
    asked: Ask = request.param
    return asked


def test_nobody_there_ends_by_the_deadline(ask: Ask) -> None:
    """An engine that is not there is a fault of that engine, with its address and the time."""
    address = nobody()
    with pytest.raises(EngineFault, match=r"no answer on the control socket within 0.05 s") as c:
        ask(address, Call(request="r"), CallReply, timeout_s=0.05)
    assert c.value.engine == address


def test_a_refusal_is_a_fault_of_the_engine(ask: Ask, serve: Serve) -> None:
    """The reason is passed on in words."""

    def refuse(_: Request) -> Reply:
        raise RuntimeError("not today")

    with pytest.raises(EngineFault, match=r"refused \(error\): RuntimeError: not today"):
        ask(serve(refuse).address, Call(request="r"), CallReply, timeout_s=5)


def test_an_answer_of_another_kind_is_a_fault_of_the_engine(ask: Ask, serve: Serve) -> None:
    """The caller never gets a reply that it did not ask for."""
    server = serve(lambda _: ModeReply(mode="on"))
    with pytest.raises(EngineFault, match="answered ModeReply, expected CallReply"):
        ask(server.address, Call(request="r"), CallReply, timeout_s=5)


@pytest.mark.parametrize(
    ("answer", "what"),
    [
        (lambda n: b"\xff", "malformed"),
        (lambda n: msgspec.msgpack.encode({"v": 4, "id": n, "body": {}}), "version 4"),
        (lambda n: msgspec.msgpack.encode({"v": 4, "id": 0, "body": {}}), "version 4"),
        (lambda n: msgspec.msgpack.encode({"v": 1, "id": n, "body": {"type": "?"}}), "unsupported"),
    ],
    ids=["garbage", "other-version", "other-version-other-number", "unknown-reply"],
)
def test_answers_that_cannot_be_read_say_so_at_once(
    answer: Callable[[int], bytes], what: str, ask: Ask, raw_server: Callable[..., Any]
) -> None:
    """A peer of another version is named as that, not as one that does not answer."""
    server = raw_server(
        lambda questions: [(len(questions) - 1, answer(open_envelope(questions[-1])[0]))]
    )
    with pytest.raises(EngineFault, match=what):
        ask(server.address, Call(request="r"), CallReply, timeout_s=30)


def test_an_oversized_question_is_not_sent(ask: Ask, serve: Serve) -> None:
    """The asker learns it at once instead of losing its connection."""
    server = serve(echo)
    huge = Peek(session="s", hashes=[bytes(MAX_MESSAGE_BYTES)])
    with pytest.raises(EngineFault, match="too_large"):
        ask(server.address, huge, PeekReply, timeout_s=30)


def test_a_late_answer_is_never_taken_for_the_next_one(serve: Serve, client: ControlClient) -> None:
    """After a timeout the next question gets its own answer, from a thread."""
    asked, let_go = threading.Event(), threading.Event()

    def slow_once(request: Request) -> Reply:
        if not asked.is_set():
            asked.set()
            assert let_go.wait(10)
        return echo(request)

    server = serve(slow_once)
    with pytest.raises(EngineFault, match="no answer"):
        client.ask(server.address, Call(request="late"), CallReply, timeout_s=0.05)
    let_go.set()
    reply = client.ask(server.address, Call(request="own"), CallReply, timeout_s=10)
    assert reply.reason == "own"


def test_a_late_answer_is_dropped_in_asyncio(serve: Serve) -> None:
    """After a timeout the next question on the same socket gets its own answer."""
    asked, let_go = threading.Event(), threading.Event()

    def slow_once(request: Request) -> Reply:
        if not asked.is_set():
            asked.set()
            assert let_go.wait(10)
        return echo(request)

    server = serve(slow_once)

    async def run() -> str:
        client = AsyncControlClient()
        with pytest.raises(EngineFault, match="no answer"):
            await client.ask(server.address, Call(request="late"), CallReply, timeout_s=0.05)
        let_go.set()
        reply = await client.ask(server.address, Call(request="own"), CallReply, timeout_s=10)
        await client.close()
        return reply.reason

    assert asyncio.run(run()) == "own"


def test_many_questions_in_flight_each_get_their_own_answer(
    raw_server: Callable[..., Any],
) -> None:
    """Hundreds of coroutines share one socket, and answers in reverse order are not mixed up."""
    count = 300

    def reverse(questions: list[bytes]) -> list[tuple[int, bytes]]:
        if len(questions) < count:
            return []
        out = []
        for index in reversed(range(count)):
            number, body = open_envelope(questions[index])
            request = msgspec.msgpack.decode(body)["request"]
            out.append((index, encode(number, CallReply(found=True, reason=request))))
        return out

    server = raw_server(reverse)

    async def run() -> list[str]:
        client = AsyncControlClient()
        asked = (
            client.ask(server.address, Call(request=f"r{i}"), CallReply, timeout_s=20)
            for i in range(count)
        )
        replies = await asyncio.gather(*asked)
        await client.close()
        return [reply.reason for reply in replies]

    assert asyncio.run(run()) == [f"r{i}" for i in range(count)]


def test_a_cancelled_question_leaves_the_others_alone(serve: Serve) -> None:
    """A client that leaves does not take its neighbours' answers along."""
    server = serve(echo)

    async def run() -> list[str]:
        client = AsyncControlClient()
        tasks = [
            asyncio.create_task(
                client.ask(server.address, Call(request=f"r{i}"), CallReply, timeout_s=20)
            )
            for i in range(20)
        ]
        await asyncio.sleep(0)
        for task in tasks[::2]:
            task.cancel()
        done = await asyncio.gather(*tasks, return_exceptions=True)
        await client.close()
        assert all(isinstance(result, asyncio.CancelledError) for result in done[::2])
        return [result.reason for result in done[1::2] if isinstance(result, CallReply)]

    assert asyncio.run(run()) == [f"r{i}" for i in range(1, 20, 2)]


def test_a_forgotten_engine_leaves_nothing_behind(serve: Serve) -> None:
    """Its connection closes, and whoever is asked at the address later may have any name."""
    server = serve(echo)

    def readers() -> set[str]:
        return {t.get_name() for t in asyncio.all_tasks() if server.address in t.get_name()}

    async def run() -> None:
        client = AsyncControlClient()
        client.forget(server.address)
        for name in ("", "other"):
            client.expect(server.address, name)
            question = Call(request="r")
            await client.ask(server.address, question, CallReply, timeout_s=20)
            assert len(readers()) == 2
            client.forget(server.address)
            for _ in range(50):
                await asyncio.sleep(0)
            assert readers() == set()
        await client.close()

    asyncio.run(run())


def test_one_blocking_client_serves_many_threads(serve: Serve, client: ControlClient) -> None:
    """Each thread has its own socket, so answers cannot cross."""
    server = serve(echo)

    def ask_some(thread: int) -> bool:
        names = [f"{thread}-{i}" for i in range(20)]
        return all(
            client.ask(server.address, Call(request=name), CallReply, timeout_s=20).reason == name
            for name in names
        )

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(ask_some, range(8)))


def test_an_engine_that_restarts_is_answered_by_the_new_one(
    serve: Serve, client: ControlClient
) -> None:
    """The same client reaches whoever listens at the address."""
    first = serve(lambda _: ModeReply(mode="on"))
    assert client.ask(first.address, SetMode(), ModeReply, timeout_s=5).mode == "on"
    first.close()
    second = ControlServer(first.address, lambda _: ModeReply(mode="off"))
    second.start()
    assert client.ask(second.address, SetMode(), ModeReply, timeout_s=10).mode == "off"
    second.close()


def test_asking_after_close_is_a_fault_not_a_crash(serve: Serve) -> None:
    """A thread that is a moment late at shutdown gets an ordinary error."""
    server = serve(echo)
    client = ControlClient()
    client.close()
    with pytest.raises(EngineFault, match="control request failed"):
        client.ask(server.address, Call(request="r"), CallReply, timeout_s=1)
