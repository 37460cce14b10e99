"""The start-up self-test: does this vLLM behave as the extension assumes?

Runs before anything is replaced, on a scratch pool. On any surprise the extension stays
off, with one line that says what was unexpected; it is never half on.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Final

QUEUE_METHODS: Final = {
    "popleft": [],
    "popleft_n": ["n"],
    "remove": ["block"],
    "append": ["block"],
    "append_n": ["blocks"],
    "prepend_n": ["blocks"],
    "get_all_free_blocks": [],
    "iter_blocks_after": ["cursor"],
}
POOL_ATTRIBUTES: Final = ("blocks", "free_block_queue", "cached_block_hash_to_block")
POOL_METHODS: Final = {
    "get_new_blocks": ["num_blocks"],
    "free_blocks": ["ordered_blocks"],
    "touch": ["blocks"],
    "evict_blocks": ["block_ids"],
    "reset_prefix_cache": [],
}


def surprises(pool: Any, adopt: Callable[[Any], Any]) -> list[str]:
    """Compare a real pool's shape, and drive a scratch pool of its class.

    Args:
        pool: the engine's block pool; only looked at.
        adopt: makes our queue from the stock queue of a scratch pool of 16 blocks.

    Returns:
        What was unexpected, in words; empty when all is as assumed.
    """
    found = _signatures(type(pool.free_block_queue), QUEUE_METHODS)
    found += _signatures(type(pool), POOL_METHODS)
    found += [f"the pool has no {name}" for name in POOL_ATTRIBUTES if not hasattr(pool, name)]
    if not isinstance(getattr(pool.cached_block_hash_to_block, "_cache", None), dict):
        found.append("the prefix-cache map is no dict")
    if found:
        return found
    try:
        found += _drive(type(pool), adopt)
    except Exception as error:  # noqa: BLE001 - a scratch pool: any failure is the finding
        found.append(f"a scratch pool failed: {type(error).__name__}: {error}")
    return found


def _signatures(owner: type, methods: dict[str, list[str]]) -> list[str]:
    out = []
    for name, expected in methods.items():
        method = getattr(owner, name, None)
        if method is None:
            out.append(f"{owner.__name__} has no {name}")
            continue
        given = [p for p in inspect.signature(method).parameters if p != "self"]
        if given != expected:
            out.append(f"{owner.__name__}.{name} takes {given}, expected {expected}")
    return out


def _drive(pool_class: type, adopt: Callable[[Any], Any]) -> list[str]:
    """Allocate, free and reuse on two scratch pools, stock and ours, and compare."""
    stock, ours = pool_class(16, True, 16), pool_class(16, True, 16)
    ours.free_block_queue = adopt(ours.free_block_queue)
    traces = []
    for pool in (stock, ours):
        trace: list[Any] = [pool.get_num_free_blocks()]
        first = pool.get_new_blocks(5)
        trace.append([b.block_id for b in first])
        pool.free_blocks(reversed(first[:3]))
        pool.touch(first[3:])
        trace.append(pool.get_num_free_blocks())
        pool.free_blocks(first[3:])
        pool.free_blocks(first[3:])
        # Blocks with a hash go back by append, which the pool above has no reason to call.
        queue = pool.free_block_queue
        taken = [queue.popleft(), *queue.popleft_n(3)]
        queue.append_n(taken[1:])
        queue.append(taken[0])
        queue.remove(taken[2])
        queue.prepend_n([taken[2]])
        trace.append([b.block_id for b in queue.get_all_free_blocks()])
        trace.append([b.block_id for b in queue.iter_blocks_after(taken[2])])
        trace.append([b.block_id for b in pool.get_new_blocks(pool.get_num_free_blocks())])
        traces.append(trace)
    return [] if traces[0] == traces[1] else [f"order {traces[1]} differs from stock {traces[0]}"]
