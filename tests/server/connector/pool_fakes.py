"""A block pool with vLLM's shape, for tests of the extension that run without vLLM.

Only what the extension relies on; that vLLM has this shape is the self-test's affair, and
is tested against vLLM itself in ``tests/scheduler``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

from turncache_server.connector.config import EngineFacts
from turncache_server.connector.source import GROUP_SUFFIX

BLOCK_SIZE = 4


class FakeBlock:
    """A KV cache block."""

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_cnt = 0
        self.block_hash: bytes | None = None
        self.is_null = False
        self.prev_free_block: Any = None
        self.next_free_block: Any = None

    def __repr__(self) -> str:
        return f"FakeBlock({self.block_id})"


class FakeQueue:
    """The stock queue: least recently used first."""

    def __init__(self, blocks: list[FakeBlock]) -> None:
        self._blocks = list(blocks)

    @property
    def num_free_blocks(self) -> int:
        return len(self._blocks)

    def popleft(self) -> FakeBlock:
        return self._blocks.pop(0)

    def popleft_n(self, n: int) -> list[FakeBlock]:
        taken, self._blocks = self._blocks[:n], self._blocks[n:]
        return taken

    def remove(self, block: FakeBlock) -> None:
        self._blocks.remove(block)

    def append(self, block: FakeBlock) -> None:
        self._blocks.append(block)

    def append_n(self, blocks: list[FakeBlock]) -> None:
        self._blocks += blocks

    def prepend_n(self, blocks: list[FakeBlock]) -> None:
        self._blocks = blocks + self._blocks

    def get_all_free_blocks(self) -> list[FakeBlock]:
        return list(self._blocks)

    def iter_blocks_after(self, cursor: FakeBlock | None) -> Iterator[FakeBlock]:
        start = 0 if cursor is None else self._blocks.index(cursor) + 1
        yield from self._blocks[start:]


class FakeMap:
    """Hash to block, or to several blocks by id."""

    def __init__(self) -> None:
        self._cache: dict[bytes, Any] = {}


class FakePool:
    """The block pool."""

    queue_type: type = FakeQueue

    def __init__(self, num_gpu_blocks: int, enable_caching: bool, hash_block_size: int) -> None:
        self.blocks = [FakeBlock(i) for i in range(num_gpu_blocks)]
        self.free_block_queue: Any = self.queue_type(self.blocks[1:])
        self.blocks[0].is_null = True
        self.cached_block_hash_to_block = FakeMap()

    def get_num_free_blocks(self) -> int:
        return int(self.free_block_queue.num_free_blocks)

    def get_new_blocks(self, num_blocks: int) -> list[FakeBlock]:
        blocks: list[FakeBlock] = self.free_block_queue.popleft_n(num_blocks)
        for block in blocks:
            self.drop_hash(block)
            block.ref_cnt += 1
        return blocks

    def touch(self, blocks: Sequence[FakeBlock]) -> None:
        for block in blocks:
            if block.ref_cnt == 0:
                self.free_block_queue.remove(block)
            block.ref_cnt += 1

    def free_blocks(self, ordered_blocks: Iterable[FakeBlock]) -> None:
        for block in ordered_blocks:
            block.ref_cnt -= 1
            if block.ref_cnt == 0 and block.block_hash is None:
                self.free_block_queue.prepend_n([block])
            elif block.ref_cnt == 0:
                self.free_block_queue.append_n([block])

    def evict_blocks(self, block_ids: set[int]) -> None:
        for block_id in block_ids:
            self.drop_hash(self.blocks[block_id])

    def reset_prefix_cache(self) -> bool:
        self.cached_block_hash_to_block = FakeMap()
        for block in self.blocks:
            block.block_hash = None
        return True

    # --- what the tests do with it ---------------------------------------------------------------

    def hash_block(self, block: FakeBlock, chain_hash: bytes) -> None:
        """List a block under a hash, beside any others."""
        block.block_hash = key = chain_hash + GROUP_SUFFIX
        cache = self.cached_block_hash_to_block._cache
        held = cache.get(key)
        if held is None:
            cache[key] = block
        elif isinstance(held, dict):
            held[block.block_id] = block
        else:
            cache[key] = {held.block_id: held, block.block_id: block}

    def first_with(self, chain_hash: bytes) -> FakeBlock | None:
        """Return the block that a hit takes, as ``get_one_block`` does."""
        held = self.cached_block_hash_to_block._cache.get(chain_hash + GROUP_SUFFIX)
        return next(iter(held.values())) if isinstance(held, dict) else held

    def drop_hash(self, block: FakeBlock) -> None:
        """Take a block's hash away."""
        key, block.block_hash = block.block_hash, None
        cache = self.cached_block_hash_to_block._cache
        held = cache.get(key) if key is not None else None
        if isinstance(held, dict):
            held.pop(block.block_id, None)
            if not held:
                del cache[key]
        elif held is block and key is not None:
            del cache[key]


def facts(num_blocks: int = 32, **changes: Any) -> EngineFacts:
    """Return what is known of an engine with a fake pool."""
    base: dict[str, Any] = {
        "engine_id": "single-0",
        "num_blocks": num_blocks,
        "block_size": BLOCK_SIZE,
        "tp_size": 1,
        "max_model_len": 1024,
        "hash_algo": "sha256",
        "vllm_version": "0.32.0",
    }
    return EngineFacts(**{**base, **changes})


def request(
    request_id: str = "r1",
    *,
    num_blocks: int = 3,
    session: str | None = "s",
    first: int = 0,
    **extra: Any,
) -> Any:
    """Return a request whose prompt has ``num_blocks`` full blocks and one token more.

    Args:
        request_id: its id.
        num_blocks: full blocks of the prompt.
        session: the session, None for an ordinary request.
        first: number of its first block hash: equal numbers are equal prefixes.
        extra: further ``tc_*`` members, without the prefix.
    """
    xargs: dict[str, Any] = {f"tc_{name}": value for name, value in extra.items()}
    if session is not None:
        xargs |= {"tc_v": 1, "tc_session": session}
    return SimpleNamespace(
        request_id=request_id,
        session_id=None,
        sampling_params=SimpleNamespace(extra_args=xargs or None),
        block_hashes=[hash_of(first + i) for i in range(num_blocks)],
        all_token_ids=[first + i // BLOCK_SIZE for i in range(num_blocks * BLOCK_SIZE + 2)],
        mm_features=[],
        prompt_embeds=None,
        num_prompt_tokens=num_blocks * BLOCK_SIZE + 1,
        num_computed_tokens=0,
        num_tokens=num_blocks * BLOCK_SIZE + 2,
        num_preemptions=0,
        resumable=False,
        status="running",
    )


def hash_of(number: int) -> bytes:
    """Return a chain hash."""
    return number.to_bytes(32, "big")


def step(
    new: dict[str, tuple[list[int], int, int]] | None = None,
    cached: dict[str, tuple[list[int], int, int]] | None = None,
    resumed: Iterable[str] = (),
    finished: Iterable[str] = (),
    *,
    sync_loads: bool = False,
) -> Any:
    """Return a scheduler output.

    Args:
        new: first scheduled requests: (block ids, tokens computed, tokens scheduled) by id.
        cached: running requests: (new block ids, tokens computed, tokens scheduled) by id.
        resumed: those of ``cached`` that come back from a preemption.
        finished: ids that have ended.
        sync_loads: a connector loads KV before the forward pass.
    """
    new, cached = new or {}, cached or {}
    return SimpleNamespace(
        scheduled_new_reqs=[
            SimpleNamespace(req_id=r, block_ids=(blocks,), num_computed_tokens=computed)
            for r, (blocks, computed, _) in new.items()
        ],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=list(cached),
            new_block_ids=[(blocks,) if blocks else None for blocks, _, _ in cached.values()],
            num_computed_tokens=[computed for _, computed, _ in cached.values()],
            resumed_req_ids=set(resumed),
        ),
        num_scheduled_tokens={
            **{r: count for r, (_, _, count) in new.items()},
            **{r: count for r, (_, _, count) in cached.items()},
        },
        total_num_scheduled_tokens=sum(count for _, _, count in (*new.values(), *cached.values())),
        finished_req_ids=set(finished),
        has_sync_kv_loads=sync_loads,
    )
