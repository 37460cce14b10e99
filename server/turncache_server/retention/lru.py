"""A bounded set of block hashes: a host tier, or the memory of all that was seen."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence


class Lru:
    """Hashes, each with a flag; the least recently stored one goes first.

    Args:
        capacity: hashes to hold.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._flags: OrderedDict[bytes, bool] = OrderedDict()

    def __contains__(self, chain_hash: bytes) -> bool:
        return chain_hash in self._flags

    def __len__(self) -> int:
        return len(self._flags)

    def store(self, hashes: Sequence[bytes], *, flag: bool = False) -> None:
        """Store a chain's blocks, its tail first; one that is there keeps its flag."""
        flags = self._flags
        for chain_hash in reversed(hashes):
            flags[chain_hash] = flags.pop(chain_hash, flag)
        while len(flags) > self._capacity:
            flags.popitem(last=False)

    def take_flag(self, chain_hash: bytes) -> bool:
        """Return a hash's flag and lower it."""
        flag = self._flags.get(chain_hash, False)
        if flag:
            self._flags[chain_hash] = False
        return flag

    def clear(self) -> None:
        """Forget everything."""
        self._flags.clear()
