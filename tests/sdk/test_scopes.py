"""Who sees a block's session: tasks, threads and generators never get another's."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import gc
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager, contextmanager
from typing import Any

import pytest

import turncache
from tests.sdk.support import HELLO, session_ids
from turncache.testing import FakeServer


def current() -> str | None:
    """Return the id of the session around the caller."""
    session = turncache.current_session()
    return None if session is None else session.id


def test_many_threads_and_tasks_keep_their_own(
    client: turncache.OpenAI, server: FakeServer
) -> None:
    """Fifty threads and fifty tasks at once: each request has the session of its caller."""

    def in_thread(number: int) -> None:
        with turncache.session(f"thread{number}"):
            client.chat.completions.create(model="m", messages=HELLO, user=f"thread{number}")

    async def in_task(async_client: turncache.AsyncOpenAI, number: int) -> None:
        with turncache.session(f"task{number}"):
            await asyncio.sleep(0)
            await async_client.chat.completions.create(
                model="m", messages=HELLO, user=f"task{number}"
            )
            assert current() == f"task{number}"

    async def tasks() -> None:
        async with turncache.AsyncOpenAI(base_url=server.url, api_key="-") as async_client:
            await asyncio.gather(*(in_task(async_client, number) for number in range(50)))

    with ThreadPoolExecutor(8) as pool:
        jobs = [pool.submit(in_thread, number) for number in range(50)]
        asyncio.run(tasks())
        for job in jobs:
            job.result()
    assert len(server.requests) == 100
    for request in server.requests:
        assert request.headers["x-session-id"] == request.body["user"]


def test_a_task_inherits_the_session_of_its_block() -> None:
    """A task started inside a block belongs to it, also in a worker thread."""

    async def main() -> None:
        async with turncache.session("ticket"):
            task = asyncio.create_task(asyncio.to_thread(current))
            assert await task == "ticket"
        assert current() is None

    asyncio.run(main())


def test_a_task_that_outlives_its_block_is_untagged(
    server: FakeServer, caplog: pytest.LogCaptureFixture
) -> None:
    """It finds the block closed: no session, not the outer one either, and one warning."""

    async def main() -> None:
        async with turncache.AsyncOpenAI(base_url=server.url, api_key="-") as client:

            async def late(gate: asyncio.Event) -> None:
                await gate.wait()
                for _ in range(2):
                    await client.chat.completions.create(model="m", messages=HELLO)

            gate = asyncio.Event()
            with turncache.session("outer"):
                with turncache.session("inner"):
                    task = asyncio.create_task(late(gate))
                gate.set()
                await task

    asyncio.run(main())
    assert session_ids(server.requests) == [None, None]
    assert all("turncache" not in request.headers for request in server.requests)
    [record] = caplog.records
    assert "session inner: a call came after the end of its block" in record.getMessage()


def test_plain_threads_do_not_inherit_and_wrapped_ones_do() -> None:
    """A pool's thread has no session unless the work is wrapped or its context copied."""
    with turncache.session("ticket") as session, ThreadPoolExecutor(1) as pool:
        assert pool.submit(current).result() is None
        assert pool.submit(session.wrap(current)).result() == "ticket"
        assert pool.submit(contextvars.copy_context().run, current).result() == "ticket"
        assert pool.submit(current).result() is None


def test_wrapped_work_keeps_an_anonymous_session_open() -> None:
    """An anonymous session ends when its last block does, in whatever thread."""
    started, go = threading.Event(), threading.Event()

    def work() -> str | None:
        started.set()
        go.wait(10)
        return current()

    with ThreadPoolExecutor(1) as pool:
        with turncache.session() as session:
            job = pool.submit(session.wrap(work))
            started.wait(10)
        assert not session.ended
        go.set()
        assert job.result() == session.id
    assert session.ended


def items() -> Iterator[str | None]:
    """Yield twice inside a session."""
    with turncache.session("generator"):
        yield current()
        yield current()


async def async_items() -> AsyncIterator[str | None]:
    """Yield twice inside a session."""
    async with turncache.session("generator"):
        yield current()
        await asyncio.sleep(0)
        yield current()


def test_a_generator_keeps_its_session_to_itself() -> None:
    """Between two items the consumer has its own session, or none."""
    for item in items():
        assert (item, current()) == ("generator", None)
    with turncache.session("consumer"):
        for item in items():
            assert (item, current()) == ("generator", "consumer")
        assert current() == "consumer"
    assert current() is None


def test_an_async_generator_keeps_its_session_to_itself() -> None:
    """The same for async generators, whose consumers share their context too."""

    async def main() -> None:
        with turncache.session("consumer"):
            async for item in async_items():
                assert (item, current()) == ("generator", "consumer")
        assert current() is None

    asyncio.run(main())


def test_tasks_started_in_a_generator_inherit() -> None:
    """What a generator starts belongs to its session."""

    async def stream() -> AsyncIterator[Any]:
        with turncache.session("generator"):

            async def work() -> str | None:
                await asyncio.sleep(0)
                return current()

            yield list(await asyncio.gather(work(), work()))

    async def main() -> None:
        async for found in stream():
            assert found == ["generator", "generator"]
            assert current() is None

    asyncio.run(main())


def test_an_abandoned_generator_closes_its_block(caplog: pytest.LogCaptureFixture) -> None:
    """Dropped after one item, or closed in another context: no noise, closed once."""

    async def main() -> None:
        with turncache.session("consumer"):
            stream = async_items()
            async for _ in stream:
                break
            await asyncio.create_task(stream.aclose())  # type: ignore[attr-defined]
            assert current() == "consumer"
            dropped = async_items()
            await anext(dropped)
            del dropped
            gc.collect()
            await asyncio.sleep(0)
            assert current() == "consumer"

    asyncio.run(main())
    pending = items()
    next(pending)
    del pending
    gc.collect()
    assert current() is None
    assert turncache.session("generator")._scopes == ()
    assert caplog.records == []


@contextmanager
def block() -> Iterator[turncache.Session]:
    """Stand for a block of a session."""
    with turncache.session("block") as session:
        yield session


@asynccontextmanager
async def async_block() -> AsyncIterator[turncache.Session]:
    """Stand for a block of a session."""
    async with turncache.session("block") as session:
        yield session


def test_a_generator_that_is_a_block_is_one() -> None:
    """A contextmanager function means its ``with`` body to be in the session."""
    with block():
        assert current() == "block"
    assert current() is None

    async def main() -> None:
        async with async_block():
            assert current() == "block"
        assert current() is None

    asyncio.run(main())


def test_a_block_inside_a_generator_is_the_generators() -> None:
    """A contextmanager entered by a generator does not reach the generator's consumer."""

    def stream() -> Iterator[str | None]:
        with block():
            yield current()

    for item in stream():
        assert (item, current()) == ("block", None)


@pytest.fixture
def session_by_fixture() -> Iterator[turncache.Session]:
    """Open a session for a test."""
    with turncache.session("fixture") as session:
        yield session


def test_a_fixture_is_a_block(session_by_fixture: turncache.Session) -> None:
    """A pytest fixture that opens a session opens it for the test."""
    assert turncache.current_session() is session_by_fixture


def test_exit_stacks_close_what_they_entered() -> None:
    """Blocks entered and left by a stack nest as any others."""
    with ExitStack() as stack:
        stack.enter_context(turncache.session("a"))
        stack.enter_context(turncache.session("b"))
        assert current() == "b"
        stack.pop_all().close()
        assert current() is None

    async def main() -> None:
        async with contextlib.AsyncExitStack() as stack:
            await stack.enter_async_context(turncache.session("a"))
            assert current() == "a"
        assert current() is None

    asyncio.run(main())


def test_blocks_close_when_an_error_leaves_them() -> None:
    """An exception goes through, and the block is closed."""
    with pytest.raises(KeyError), turncache.session("a"):
        raise KeyError
    assert current() is None


def test_one_session_in_many_blocks_at_once() -> None:
    """Threads that share a session leave only their own block."""
    session: Any = turncache.session("shared")
    with session:
        with ThreadPoolExecutor(4) as pool:
            assert set(pool.map(session.wrap(lambda _: current()), range(16))) == {"shared"}
        assert current() == "shared"
    assert session._scopes == ()
