"""Which hand-overs wait for which tail hash. Owner of this index."""

from __future__ import annotations

from collections.abc import Sequence

from turncache_server.retention.values import ChainBlock


class Handovers:
    """Prompts that no peer has verified yet, by the hashes that may end them."""

    def __init__(self) -> None:
        self._tails: dict[int, tuple[bytes, ...]] = {}
        # Numbers that wait for a hash: as their last block's, and as the one before it.
        self._by_last: dict[bytes, set[int]] = {}
        self._by_last_but_one: dict[bytes, set[int]] = {}

    def __len__(self) -> int:
        return len(self._tails)

    def numbers(self) -> list[int]:
        """Return the numbers of all hand-overs."""
        return list(self._tails)

    def add(self, number: int, chain: Sequence[ChainBlock]) -> None:
        """Let hand-over ``number`` wait for the tail of a chain that is not empty."""
        tails = tuple(block.hash for block in chain[-2:])
        self._tails[number] = tails
        self._by_last.setdefault(tails[-1], set()).add(number)
        if len(tails) == 2:
            self._by_last_but_one.setdefault(tails[0], set()).add(number)

    def remove(self, number: int) -> None:
        """Forget a hand-over."""
        tails = self._tails.pop(number)
        _discard(self._by_last, tails[-1], number)
        _discard(self._by_last_but_one, tails[0], number)

    def awaits(self, tail_hash: bytes) -> bool:
        """Whether any hand-over ends in a hash, or one block later; for any thread."""
        return tail_hash in self._by_last or tail_hash in self._by_last_but_one

    def ending_in(self, tail_hash: bytes) -> list[int]:
        """List the hand-overs that end in a hash; if none does, those that end one block later."""
        found = self._by_last.get(tail_hash) or self._by_last_but_one.get(tail_hash, set())
        return sorted(found)


def _discard(index: dict[bytes, set[int]], tail_hash: bytes, number: int) -> None:
    numbers = index.get(tail_hash)
    if numbers is not None:
        numbers.discard(number)
        if not numbers:
            del index[tail_hash]
