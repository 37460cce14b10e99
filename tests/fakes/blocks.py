"""Blocks and a stock queue with vLLM's shape, for tests that run without vLLM.

That the shape is right is tested against vLLM itself in ``tests/scheduler``.
"""

from __future__ import annotations

from collections.abc import Iterable


class Block:
    """A KV cache block as the free queue sees it."""

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.block_hash: bytes | None = None
        self.prev_free_block: object | None = None
        self.next_free_block: object | None = None

    def __repr__(self) -> str:
        return f"Block({self.block_id})"


class StockQueue:
    """The part of vLLM's queue that an adoption and a release need."""

    def __init__(self, blocks: Iterable[Block]) -> None:
        self._blocks = list(blocks)

    @property
    def num_free_blocks(self) -> int:
        return len(self._blocks)

    def get_all_free_blocks(self) -> list[Block]:
        return list(self._blocks)

    def popleft(self) -> Block:
        return self._blocks.pop(0)

    def popleft_n(self, n: int) -> list[Block]:
        taken, self._blocks = self._blocks[:n], self._blocks[n:]
        return taken
