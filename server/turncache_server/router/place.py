"""Placing: which engine of a side a session belongs to. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable


def rank(key: str, names: Iterable[str]) -> tuple[str, ...]:
    """Order engines for a session by rendezvous hashing, the best first.

    Every router that knows the same names gives the same order without sharing state. An
    engine that is added or removed moves only the sessions that it wins or had won. Equal
    names cannot occur: the configuration refuses them.

    Args:
        key: namespaced id of the *root* session, so that children lie beside their parent.
        names: names of the configured engines of one side, in any order.
    """
    listed = list(names)
    if len(listed) == 1:
        return (listed[0],)
    return tuple(sorted(listed, key=lambda name: (_score(key, name), name), reverse=True))


def _score(key: str, name: str) -> int:
    # The key is length-prefixed: ("ab", "c") and ("a", "bc") must not score alike.
    text = f"{len(key)}:{key}{name}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big")
