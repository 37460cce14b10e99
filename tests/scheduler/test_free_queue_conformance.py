"""Our free queue against vLLM's own, inside vLLM's own block pool.

As long as nothing is retained, an engine cannot tell them apart: same blocks in the same
order, same counts, same links, same walks. With retained blocks, vLLM's pool and its
offloader still work, and a queue given back is vLLM's again.
"""

from __future__ import annotations

import inspect
import os
from types import SimpleNamespace
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from turncache_server.retention.free_queue import FreeQueue
from turncache_server.retention.ledger import Ledger
from turncache_server.retention.lineages import ChainBlock, Limits, LineageTable
from turncache_server.retention.policy import Deadline

# The first test imports vLLM, which takes a minute on a busy machine.
pytestmark = [pytest.mark.scheduler, pytest.mark.timeout(300)]

NUM_BLOCKS = 16
BLOCK_TOKENS = 16


def stock_pool(num_blocks: int = NUM_BLOCKS) -> Any:
    """Make vLLM's block pool with its own queue."""
    from vllm.v1.core.block_pool import BlockPool

    return BlockPool(num_blocks, enable_caching=True, hash_block_size=BLOCK_TOKENS)


def adopted_pool(num_blocks: int = NUM_BLOCKS) -> tuple[Any, Ledger, LineageTable]:
    """Make vLLM's block pool with our queue."""
    pool = stock_pool(num_blocks)
    ledger, table = attach(pool, num_blocks)
    return pool, ledger, table


def attach(pool: Any, num_blocks: int) -> tuple[Ledger, LineageTable]:
    """Replace a pool's queue by ours."""
    ledger = Ledger(num_blocks)
    limits = Limits(num_blocks=num_blocks, retain_budget=1.0, tenant_budget=1.0)
    table = LineageTable(limits, Deadline())
    pool.free_block_queue = FreeQueue.adopt(
        pool.free_block_queue, num_blocks=num_blocks, ledger=ledger, table=table
    )
    return ledger, table


def cache(pool: Any, block: Any, name: str) -> None:
    """Give a block a hash, as ``cache_full_blocks`` does."""
    from vllm.v1.core.kv_cache_utils import BlockHash, make_block_hash_with_group_id

    key = make_block_hash_with_group_id(BlockHash(name.encode()), 0)
    pool._insert_block_hash(key, block, num_tokens=BLOCK_TOKENS)


def cached(pool: Any, name: str) -> Any:
    """Look a block up in the prefix cache."""
    from vllm.v1.core.kv_cache_utils import BlockHash

    found = pool.get_cached_block(BlockHash(name.encode()), [0])
    return found[0] if found else None


def retain(pool: Any, ledger: Ledger, table: LineageTable, blocks: list[Any], name: str) -> None:
    """Let a call over used blocks end, and free them."""
    chain = [
        ChainBlock(block.block_id, ledger.epoch[block.block_id], f"{name}{place}".encode())
        for place, block in enumerate(blocks)
    ]
    for block, each in zip(blocks, chain, strict=True):
        cache(pool, block, each.hash.decode())
    admission = table.admit(session=name, tenant=None, hashes=[], now_s=0)
    effect = table.finish(
        admission,
        chain,
        retain_s=100,
        expect_s=None,
        priority=50,
        final=False,
        compaction=False,
        handover=False,
        now_s=0,
    )
    pool.free_block_queue.reclassify(effect.changed)
    pool.free_blocks(reversed(blocks))


def ids(blocks: Any) -> list[int]:
    """Block ids, in order."""
    return [block.block_id for block in blocks]


def test_every_public_name_of_vllms_queue_is_there() -> None:
    """With the same parameters, and the count as a plain attribute."""
    from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue

    for name, method in inspect.getmembers(FreeKVCacheBlockQueue, inspect.isfunction):
        if not name.startswith("_"):
            ours = inspect.signature(getattr(FreeQueue, name))
            assert list(ours.parameters) == list(inspect.signature(method).parameters), name
    pool, _, _ = adopted_pool()
    assert vars(pool.free_block_queue)["num_free_blocks"] == NUM_BLOCKS - 1


class PoolPair(RuleBasedStateMachine):
    """The same events on a stock pool and on an adopted one, from a random moment on."""

    def __init__(self) -> None:
        super().__init__()
        self.pools = [stock_pool(), stock_pool()]
        self.adopted = False
        self.held: list[list[int]] = []
        self.hashes = 0

    def both(self, action: Any) -> list[Any]:
        """Do something with both pools."""
        return [action(pool) for pool in self.pools]

    @precondition(lambda self: not self.adopted)
    @rule()
    def adopt(self) -> None:
        attach(self.pools[1], NUM_BLOCKS)
        self.adopted = True

    @precondition(lambda self: self.adopted)
    @rule()
    def give_back(self) -> None:
        from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue

        pool = self.pools[1]
        pool.free_block_queue = pool.free_block_queue.release_to(FreeKVCacheBlockQueue)
        assert type(pool.free_block_queue) is FreeKVCacheBlockQueue
        self.adopted = False

    @rule(count=st.integers(0, 6))
    def allocate(self, count: int) -> None:
        if count <= self.pools[0].get_num_free_blocks():
            left, right = self.both(lambda pool: ids(pool.get_new_blocks(count)))
            assert left == right
            self.held.append(left)

    @rule()
    def allocate_too_many(self) -> None:
        for pool in self.pools:
            with pytest.raises(ValueError, match="Cannot get"):
                pool.get_new_blocks(NUM_BLOCKS)
            with pytest.raises(AssertionError):
                pool.free_block_queue.popleft_n(NUM_BLOCKS)

    @precondition(lambda self: any(self.held))
    @rule(data=st.data(), hashed=st.integers(0, 6))
    def free(self, data: st.DataObject, hashed: int) -> None:
        held = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        for block_id in held[:hashed]:
            if self.pools[0].blocks[block_id].block_hash is None:
                self.hashes += 1
                name = f"h{self.hashes}"
                self.both(lambda pool, i=block_id, n=name: cache(pool, pool.blocks[i], n))
        self.both(lambda pool: pool.free_blocks([pool.blocks[i] for i in reversed(held)]))

    @rule(data=st.data())
    def hit(self, data: st.DataObject) -> None:
        name = f"h{data.draw(st.integers(1, max(1, self.hashes)))}"
        found = self.both(lambda pool: cached(pool, name))
        assert (found[0] and found[0].block_id) == (found[1] and found[1].block_id)
        if found[0] is not None:
            self.both(lambda pool: pool.touch([pool.blocks[found[0].block_id]]))
            self.held.append([found[0].block_id])

    @rule(block_id=st.integers(1, NUM_BLOCKS - 1))
    def forget(self, block_id: int) -> None:
        self.both(lambda pool: pool.evict_blocks({block_id}))

    @rule(count=st.integers(1, 3))
    def unpin(self, count: int) -> None:
        """HiSparse's way to free: last of all, hash or not."""
        if count <= self.pools[0].get_num_free_blocks():
            taken = self.both(lambda pool: pool.get_new_blocks(count))
            for pool, blocks in zip(self.pools, taken, strict=True):
                pool.unpin_blocks(blocks, lambda _: None)

    @rule()
    def single(self) -> None:
        """Pop and append one block, which vLLM's pool itself does at its start only."""
        if self.pools[0].get_num_free_blocks():
            popped = self.both(lambda pool: pool.free_block_queue.popleft())
            assert popped[0].block_id == popped[1].block_id
            for pool, block in zip(self.pools, popped, strict=True):
                pool.free_block_queue.append(block)
        else:
            for pool in self.pools:
                with pytest.raises(ValueError, match="No free blocks available"):
                    pool.free_block_queue.popleft()

    @rule(block_id=st.integers(0, NUM_BLOCKS - 1))
    def remove_what_is_not_free(self, block_id: int) -> None:
        if block_id not in ids(self.pools[0].free_block_queue.get_all_free_blocks()):
            for pool in self.pools:
                with pytest.raises(RuntimeError):
                    pool.free_block_queue.remove(pool.blocks[block_id])

    @precondition(lambda self: not any(self.held))
    @rule()
    def reset(self) -> None:
        assert self.both(lambda pool: pool.reset_prefix_cache()) == [True, True]

    @invariant()
    def same_blocks_in_the_same_order(self) -> None:
        left, right = self.both(lambda pool: ids(pool.free_block_queue.get_all_free_blocks()))
        assert left == right
        left, right = self.both(lambda pool: pool.get_num_free_blocks())
        assert left == right
        left, right = self.both(lambda pool: pool.get_usage())
        assert left == right

    @invariant()
    def same_walks_from_every_cursor(self) -> None:
        for block_id in range(NUM_BLOCKS):
            left, right = self.both(
                lambda pool, i=block_id: ids(
                    pool.free_block_queue.iter_blocks_after(pool.blocks[i])
                )
            )
            assert left == right

    @invariant()
    def same_links_between_blocks(self) -> None:
        def links(pool: Any) -> list[Any]:
            return [
                tuple(
                    None if end is None else end.block_id
                    for end in (block.prev_free_block, block.next_free_block)
                )
                for block in pool.blocks
            ]

        left, right = self.both(links)
        assert left == right
        self.both(lambda pool: repr(pool.blocks))


class TestPoolPair(PoolPair.TestCase):  # type: ignore[name-defined,misc]
    """vLLM's pool behaves the same with either queue."""

    settings = settings(
        max_examples=int(os.environ.get("TURNCACHE_TEST_EXAMPLES", "100")),
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )


def test_a_pool_with_retained_blocks_gives_all_of_them_out() -> None:
    """What ``get_num_free_blocks`` counts can always be allocated, in one call."""
    pool, ledger, table = adopted_pool()
    retain(pool, ledger, table, pool.get_new_blocks(6), "s")
    assert pool.free_block_queue.num_retained == 6
    assert pool.get_num_free_blocks() == NUM_BLOCKS - 1
    taken = pool.get_new_blocks(NUM_BLOCKS - 1)
    assert sorted(ids(taken)) == list(range(1, NUM_BLOCKS))
    assert ids(taken)[-6:] == [6, 5, 4, 3, 2, 1]
    assert cached(pool, "s0") is None
    assert table.stats().evicted_wanted_blocks_total == 6


def test_a_million_blocks_and_sessions_that_never_come_back() -> None:
    """What is remembered of them is bounded, and all that they kept can be had in one call."""
    num_blocks, num_sessions, length = 1_000_000, 10_200, 4
    pool, ledger, table = adopted_pool(num_blocks)
    most = Limits(num_blocks=num_blocks).max_sessions
    for number in range(num_sessions):
        retain(pool, ledger, table, pool.get_new_blocks(length), f"s{number}-")
    stats, queue = table.stats(), pool.free_block_queue
    assert (stats.sessions, stats.known_blocks) == (most, most * length)
    queue.reclassify(table.expire(0).changed)
    assert queue.num_retained == stats.wanted_blocks == most * length
    assert pool.get_num_free_blocks() == num_blocks - 1
    assert len(pool.get_new_blocks(num_blocks - 1)) == num_blocks - 1
    assert (queue.num_retained, table.stats().wanted_blocks, table.board.wanting) == (0, 0, {})
    queue.rank(table.victims(0))
    assert queue._shelves._shelves == {}


def test_a_hit_on_retained_blocks_survives_a_flood() -> None:
    """The reason for all of this: stock would have lost them."""
    pool, ledger, table = adopted_pool()
    retain(pool, ledger, table, pool.get_new_blocks(4), "s")
    for _ in range(5):
        flood = pool.get_new_blocks(NUM_BLOCKS - 1 - 4)
        for block in flood:
            pool.evict_blocks({block.block_id})
        pool.free_blocks(flood)
    hits = [cached(pool, f"s{place}") for place in range(4)]
    assert ids(hits) == [1, 2, 3, 4]
    pool.touch(hits)
    assert pool.free_block_queue.num_retained == 0
    pool.free_blocks(reversed(hits))
    assert pool.free_block_queue.num_retained == 4


def test_a_reset_is_not_refused_because_of_retained_blocks() -> None:
    """They count as free."""
    pool, ledger, table = adopted_pool()
    retain(pool, ledger, table, pool.get_new_blocks(4), "s")
    assert pool.reset_prefix_cache()
    ledger.reset()
    pool.free_block_queue.reclassify(table.clear().changed)
    assert pool.free_block_queue.num_retained == 0
    assert pool.get_num_free_blocks() == NUM_BLOCKS - 1


class Offloader:
    """vLLM's lazy CPU offloading over a pool, without its engine."""

    def __init__(self, pool: Any, target_free: int) -> None:
        self.state = SimpleNamespace(
            _gpu_block_pool=pool,
            _target_free=target_free,
            cpu_block_pool=stock_pool(64),
            _cursor=None,
        )

    def step(self) -> list[int]:
        """Run one step of it and finish its copies; returns the blocks that it offloads."""
        from vllm.v1.simple_kv_offload import manager

        scheduler = manager.SimpleCPUOffloadScheduler
        gpu_ids, cpu_ids, _, _ = scheduler._prepare_lazy_store_specs(self.state)
        gpu, cpu = self.state._gpu_block_pool, self.state.cpu_block_pool
        for gpu_id, cpu_id in zip(gpu_ids, cpu_ids, strict=True):
            cpu._insert_block_hash(
                gpu.blocks[gpu_id].block_hash, cpu.blocks[cpu_id], num_tokens=BLOCK_TOKENS
            )
        cpu.free_blocks(cpu.blocks[i] for i in cpu_ids)
        gpu.free_blocks(gpu.blocks[i] for i in gpu_ids)
        return list(gpu_ids)


def test_vllms_offloader_walks_both_classes() -> None:
    """It offloads retained blocks too, once it has covered the ordinary ones."""
    pool, ledger, table = adopted_pool()
    retain(pool, ledger, table, pool.get_new_blocks(4), "s")
    other = pool.get_new_blocks(4)
    for place, block in enumerate(other):
        cache(pool, block, f"other{place}")
    pool.free_blocks(reversed(other))
    offloader = Offloader(pool, target_free=NUM_BLOCKS)
    assert offloader.step() == [8, 7, 6, 5, 4, 3, 2, 1]


def test_vllms_offloader_goes_on_when_its_cursor_has_changed_class() -> None:
    """Without a fresh start it would stop offloading silently."""
    pool, ledger, table = adopted_pool()
    retain(pool, ledger, table, pool.get_new_blocks(4), "s")
    offloader = Offloader(pool, target_free=NUM_BLOCKS)
    assert offloader.step() == [4, 3, 2, 1]
    # One block more than it covers: the cursor stays in the middle of the retained class.
    walk = pool.free_block_queue.iter_blocks_after(None)
    offloader.state._cursor = next(block for block in walk if block.block_id == 3)
    fresh = pool.get_new_blocks(3)
    for place, block in enumerate(fresh):
        cache(pool, block, f"fresh{place}")
    pool.free_blocks(reversed(fresh))
    pool.free_block_queue.reclassify(table.expire(1e6).changed)
    assert not pool.free_block_queue.is_retained(3)
    assert set(offloader.step()) == set(ids(fresh))
