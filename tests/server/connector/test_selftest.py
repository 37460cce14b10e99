"""The start-up self-test finds every way in which a pool may differ from the tested one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.server.connector.pool_fakes import FakeBlock, FakePool, FakeQueue
from turncache_server.connector.selftest import surprises
from turncache_server.retention.free_queue import FreeQueue
from turncache_server.retention.ledger import Ledger
from turncache_server.retention.lineages import Limits, LineageTable
from turncache_server.retention.policy import Deadline


def adopt(stock: Any) -> FreeQueue:
    """Make our queue from a scratch pool's."""
    table = LineageTable(Limits(num_blocks=16), Deadline())
    return FreeQueue.adopt(stock, num_blocks=16, ledger=Ledger(16), table=table)


def pool(kind: type[FakePool] = FakePool) -> FakePool:
    """Return a pool of a class."""
    return kind(32, True, 16)


def test_the_tested_shape_has_no_surprises() -> None:
    """Same signatures, same order of blocks."""
    engine = pool()
    assert surprises(engine, adopt) == []
    assert engine.get_num_free_blocks() == 31, "the real pool is only looked at"


class NoPrepend(FakeQueue):
    prepend_n = None  # type: ignore[assignment]  # a vLLM that has renamed it


class MoreArguments(FakeQueue):
    def popleft_n(self, n: int, group: int = 0) -> list[FakeBlock]:
        return super().popleft_n(n)


class OtherOrder(FakeQueue):
    def append_n(self, blocks: list[FakeBlock]) -> None:
        super().prepend_n(blocks)


class Raising(FakeQueue):
    def append_n(self, blocks: list[FakeBlock]) -> None:
        raise TypeError("blocks carry their pool")


def with_queue(queue_type: type) -> Callable[[], FakePool]:
    """Return a pool whose class has another queue."""
    return lambda: pool(type("OtherPool", (FakePool,), {"queue_type": queue_type}))


class NoTouch(FakePool):
    touch = None  # type: ignore[assignment]  # a vLLM that has renamed it


class OtherMap(FakePool):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.cached_block_hash_to_block._cache = ()  # type: ignore[assignment]


class OtherConstructor(FakePool):
    def __init__(self, *args: Any, group: int) -> None:
        super().__init__(*args)


@pytest.mark.parametrize(
    ("make", "found"),
    [
        (with_queue(NoPrepend), "NoPrepend has no prepend_n"),
        (with_queue(MoreArguments), "popleft_n takes ['n', 'group'], expected ['n']"),
        (with_queue(OtherOrder), "differs from stock"),
        (with_queue(Raising), "a scratch pool failed: TypeError: blocks carry their pool"),
        (lambda: pool(NoTouch), "NoTouch has no touch"),
        (lambda: pool(OtherMap), "the prefix-cache map is no dict"),
        (lambda: OtherConstructor(32, True, 16, group=1), "a scratch pool failed: TypeError"),
    ],
    ids=["method", "signature", "order", "raises", "pool-method", "map", "constructor"],
)
def test_surprises_are_said_in_words(make: Callable[[], FakePool], found: str) -> None:
    """What differs is named; the extension then stays off."""
    said = surprises(make(), adopt)
    assert any(found in each for each in said), said
