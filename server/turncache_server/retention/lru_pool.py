"""Simulated pools that know no sessions: vLLM's own order, a host tier, and all that was seen.

Hashes stand for blocks. Nothing here knows tokens or times.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class Holding:
    """What one call has in an :class:`LruPool`.

    Attributes:
        hashes: full blocks, by place.
        num_blank: blocks without a hash.
        num_hits: leading blocks that were found.
    """

    hashes: list[bytes] = field(default_factory=list)
    num_blank: int = 0
    num_hits: int = 0


class LruPool:
    """A pool of blocks that are handed out least recently used first, as in vLLM.

    Two calls that compute the same block at the same time share it here, where vLLM holds
    it twice until both have ended.

    Args:
        num_blocks: blocks that calls may hold and the cache may keep, together.

    Attributes:
        short_blocks: blocks that calls should have had and there was no room for.
    """

    def __init__(self, num_blocks: int) -> None:
        self.short_blocks = 0
        self._num_blocks = num_blocks
        self._held: dict[bytes, int] = {}
        self._free: OrderedDict[bytes, None] = OrderedDict()
        self._num_blank = 0

    def __contains__(self, chain_hash: bytes) -> bool:
        return chain_hash in self._held or chain_hash in self._free

    @property
    def num_used(self) -> int:
        """Blocks that hold something."""
        return len(self._held) + len(self._free) + self._num_blank

    def start(self, hashes: Sequence[bytes], num_blocks: int, reusable: int) -> Holding:
        """Give a call its blocks.

        Args:
            hashes: of its full blocks.
            num_blocks: what it needs; at least as many.
            reusable: leading blocks that may come from the cache.
        """
        num_hits = 0
        for chain_hash in hashes[:reusable]:
            if chain_hash not in self:
                break
            num_hits += 1
        call = Holding(num_hits=num_hits)
        for chain_hash in hashes[:num_hits]:
            self._hold(call, chain_hash)
        self._take(call, hashes[num_hits:], num_blocks - num_hits)
        return call

    def end(
        self, call: Holding, more_hashes: Sequence[bytes], num_blocks: int, complete: int
    ) -> None:
        """Free a call's blocks, its tail first.

        Args:
            call: what it has.
            more_hashes: of full blocks behind those that it started with.
            num_blocks: what it held at its end.
            complete: leading blocks whose content was complete.
        """
        grown = num_blocks - len(call.hashes) - call.num_blank
        # The first full block of the answer is the one that held the prompt's last tokens.
        filled = min(len(more_hashes), call.num_blank)
        call.num_blank -= filled
        self._num_blank -= filled
        self._take(call, more_hashes, max(0, grown) + filled)
        for place in range(len(call.hashes) - 1, -1, -1):
            self._let_go(call.hashes[place], keep=place < max(complete, call.num_hits))
        self._num_blank -= call.num_blank

    def clear(self) -> None:
        """Forget the content of every block that no call holds."""
        self._free.clear()

    def _take(self, call: Holding, hashes: Sequence[bytes], count: int) -> None:
        missing = count - (self._num_blocks - self.num_used)
        for _ in range(min(missing, len(self._free))):
            self._free.popitem(last=False)
        room = self._num_blocks - self.num_used
        self.short_blocks += max(0, count - room)
        for chain_hash in hashes[: min(count, room)]:
            self._hold(call, chain_hash)
        blank = max(0, min(count, room) - len(hashes))
        call.num_blank += blank
        self._num_blank += blank

    def _hold(self, call: Holding, chain_hash: bytes) -> None:
        self._free.pop(chain_hash, None)
        self._held[chain_hash] = self._held.get(chain_hash, 0) + 1
        call.hashes.append(chain_hash)

    def _let_go(self, chain_hash: bytes, *, keep: bool) -> None:
        users = self._held.pop(chain_hash) - 1
        if users:
            self._held[chain_hash] = users
        elif keep:
            self._free[chain_hash] = None


class Lru:
    """A bounded set of hashes, each with a flag; the least recently stored one goes first.

    A host tier, or the memory of all that was seen.

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
