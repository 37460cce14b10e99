"""vLLM's queue of free blocks with two classes: ordinary and retained."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from turncache_server.retention.ledger import Ledger
from turncache_server.retention.lineages import LineageTable


class FreeQueue:
    num_free_blocks: int
    num_retained: int
    retaining: bool

    @classmethod
    def adopt(
        cls,
        stock: Any,
        *,
        num_blocks: int,
        ledger: Ledger,
        table: LineageTable,
        before_choice: Callable[[], None] = lambda: None,
    ) -> FreeQueue:
        raise NotImplementedError

    def release_to(self, stock_type: type) -> Any:
        raise NotImplementedError

    def popleft(self) -> Any:
        raise NotImplementedError

    def popleft_n(self, n: int) -> list[Any]:
        raise NotImplementedError

    def remove(self, block: Any) -> None:
        raise NotImplementedError

    def append(self, block: Any) -> None:
        raise NotImplementedError

    def append_n(self, blocks: list[Any]) -> None:
        raise NotImplementedError

    def prepend_n(self, blocks: list[Any]) -> None:
        raise NotImplementedError

    def get_all_free_blocks(self) -> list[Any]:
        raise NotImplementedError

    def iter_blocks_after(self, cursor: Any | None) -> Iterator[Any]:
        raise NotImplementedError

    def is_free(self, block_id: int) -> bool:
        raise NotImplementedError

    def is_retained(self, block_id: int) -> bool:
        raise NotImplementedError

    def reclassify(self, block_ids: Iterable[int]) -> None:
        raise NotImplementedError

    def promote(self, block_id: int, epoch: int) -> None:
        raise NotImplementedError

    def rank(self, victims: Sequence[int]) -> None:
        raise NotImplementedError
