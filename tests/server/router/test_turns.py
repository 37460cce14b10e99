"""A burst of calls: what has begun goes on between those that begin."""

from __future__ import annotations

import asyncio
import json
from urllib.parse import urlsplit

import pytest

from tests.server.router.conftest import Pair
from tests.server.router.support import CHAT, MESSAGES
from turncache_server.router.events import CallStarted, LegStarted
from turncache_server.router.turns import Turns

pytestmark = pytest.mark.anyio

NUM_CALLS = 64


async def test_the_first_of_a_burst_is_served_before_the_last_begins(pair: Pair) -> None:
    """Calls that arrive in one read of the network are not all begun before one of them goes on."""
    url = urlsplit(pair.bench.router.url)
    body = json.dumps({"model": "fake", "messages": MESSAGES}).encode()
    head = "POST {} HTTP/1.1\r\nhost: router\r\ncontent-type: application/json\r\n"
    request = f"{head.format(CHAT)}content-length: {len(body)}\r\n\r\n".encode() + body
    clients = [await asyncio.open_connection(url.hostname, url.port) for _ in range(NUM_CALLS)]
    for reader, writer in clients:
        writer.write(b"GET /health HTTP/1.1\r\nhost: router\r\n\r\n")
        await reader.readuntil(b"true}")
    for _, writer in clients:
        writer.write(request)
    answers = await asyncio.gather(*(reader.readline() for reader, _ in clients))
    for _, writer in clients:
        writer.transport.abort()
    assert set(answers) == {b"HTTP/1.1 200 OK\r\n"}
    begun = [at for at, e in enumerate(pair.bench.events) if isinstance(e, CallStarted)]
    legs = [at for at, e in enumerate(pair.bench.events) if isinstance(e, LegStarted)]
    decode = [at for at in legs if pair.bench.events[at].kind == "decode"]  # type: ignore[union-attr]
    assert len(begun) == len(decode) == NUM_CALLS
    assert decode[0] < begun[-1]


async def test_turns_come_in_order_and_none_is_held_up_by_who_has_left() -> None:
    """First come, first served; a call whose client leaves while it waits is passed over."""
    turns, begun = Turns(), list[int]()

    async def call(number: int) -> None:
        await turns.come()
        begun.append(number)

    calls = [asyncio.create_task(call(number)) for number in range(40)]
    await asyncio.sleep(0)
    assert begun == [0]
    for call_left in calls[3:6]:
        call_left.cancel()
    await asyncio.gather(*calls, return_exceptions=True)
    assert begun == [0, 1, 2, *range(6, 40)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    await asyncio.create_task(call(40))
    assert begun[-1] == 40
