"""What is remembered of a chain of block hashes, compactly.

Chain hashes are chained: block k's hash covers everything before it, so equality at k means
that the whole prefix is equal, and the common prefix of two chains is found by bisection.

Only counting and superseding rest on this, never a token: 64 bits of Python's keyed hash
per block are enough, and a chain of 100,000 tokens takes 50 KB.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

#: One signed 64-bit number per block; replaced as a whole, never changed in place, because
#: the control thread reads it.
KnownChain = array


def remember(hashes: Iterable[bytes]) -> KnownChain[int]:
    """Return the compact form of a chain of hashes."""
    return array("q", map(hash, hashes))


def common_prefix(known: KnownChain[int], hashes: Sequence[bytes]) -> int:
    """Return how many leading blocks of ``hashes`` are those of ``known``."""
    low, high = 0, min(len(known), len(hashes))
    while low < high:
        # The first ``low`` blocks are equal, and at most ``high`` are.
        middle = (low + high + 1) // 2
        if known[middle - 1] == hash(hashes[middle - 1]):
            low = middle
        else:
            high = middle - 1
    return low
