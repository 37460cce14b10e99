"""Calls to a stock pair: two legs, one id, and what decode says comes back once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

import pytest

from tests.fakes.engine import FakeEngine, Script
from turncache_tools.bench.arms import Arm, StockPair
from turncache_tools.bench.client import CallFailed, Client
from turncache_tools.bench.conversation import Conversation

_T = TypeVar("_T")
PREFILL = {"remote_engine_id": "prefill-0", "remote_block_ids": [[1]]}
DECODE = {"remote_engine_id": "decode-0", "remote_block_ids": [[7]], "remote_num_tokens": 40}


def body(*said: str) -> Mapping[str, Any]:
    """Return a call with these messages."""
    messages = [{"role": "user", "content": each} for each in said]
    return {"model": "fake", "messages": messages, "max_tokens": 4}


def run(
    work: Callable[[Conversation, FakeEngine, FakeEngine], Awaitable[_T]], *, returning: bool
) -> _T:
    """Run a conversation on two fake stock engines."""

    async def all_of_it() -> _T:
        prefill = FakeEngine("prefill-0", "prefill", control=False)
        decode = FakeEngine("decode-0", "decode", control=False)
        prefill.default = Script(kv_transfer_params=PREFILL)
        decode.default = Script(kv_transfer_params=DECODE)
        await prefill.start()
        await decode.start()
        try:
            async with Client("-", timeout_s=10.0) as client:
                pair = StockPair(prefill=prefill.url, decode=decode.url, returning=returning)
                arm = Arm(name="bidirectional", what="", url=decode.url, pair=pair)
                return await work(Conversation(client, arm), prefill, decode)
        finally:
            await prefill.close()
            await decode.close()

    return asyncio.run(all_of_it())


def test_legs_share_an_id_and_hand_over() -> None:
    """Prefill makes one token, decode gets what prefill says; without returns nothing else."""

    async def work(calls: Conversation, prefill: FakeEngine, decode: FakeEngine) -> None:
        for said in (("one",), ("one", "two")):
            asked = await calls.ask(body(*said), {"x-session-id": "s"})
            assert asked.streamed.text
            assert asked.streamed.first_s is not None
        first, second = prefill.seen
        assert (first.body["max_tokens"], decode.seen[0].body["max_tokens"]) == (1, 4)
        assert [seen.body["stream"] for seen in decode.seen] == [True, True]
        for mine, theirs in zip(prefill.seen, decode.seen, strict=True):
            assert mine.headers["x-request-id"] == theirs.headers["x-request-id"]
            assert theirs.body["kv_transfer_params"] == PREFILL
        assert first.headers["x-request-id"] != second.headers["x-request-id"]
        assert second.body["kv_transfer_params"]["remote_block_ids"] is None

    run(work, returning=False)


def test_what_decode_says_is_brought_back_once() -> None:
    """Each answer's parameters go to prefill with the next call, and never twice."""

    async def work(calls: Conversation, prefill: FakeEngine, decode: FakeEngine) -> None:
        await calls.ask(body("one"), {})
        decode.default = Script()
        await calls.ask(body("one", "two"), {})
        await calls.ask(body("one", "two", "three"), {})
        told = [seen.body["kv_transfer_params"] for seen in prefill.seen]
        assert [each["remote_block_ids"] for each in told] == [None, [[7]], None]
        assert told[1]["do_remote_decode"] is True
        assert told[1]["do_remote_prefill"] is False
        assert not any(seen.body.get("stream") for seen in decode.seen)

    run(work, returning=True)


def test_engines_that_hand_nothing_over_are_told_apart() -> None:
    """A prefill leg without parameters is no answer."""

    async def work(calls: Conversation, prefill: FakeEngine, _: FakeEngine) -> None:
        prefill.default = Script()
        with pytest.raises(CallFailed, match="kv_transfer_params"):
            await calls.ask(body("one"), {})

    run(work, returning=False)
