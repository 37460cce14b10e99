"""What the last blocks of finished calls hold that were not filled. Owner of that list.

vLLM gives such a block no hash and nobody finds it again. A peer that has pulled all before it
would compute its tokens: on a decode engine that is what holds up every stream when a prompt is
handed over. So it is kept like its call's other blocks, and named to peers by the chain hash
before it and by a digest of its tokens.

Slots that a finished call has computed are written no more in the block's epoch: a step that is
still in flight for it writes behind them.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from hashlib import blake2b
from typing import Final, NamedTuple

#: Chain hashes to remember rests of; the oldest ones go.
MOST_PARENTS: Final = 4096
#: Rests to remember of one chain hash, whose calls went on differently.
MOST_OF_ONE: Final = 16


class Rest(NamedTuple):
    """The leading slots of a block that is not full.

    Attributes:
        block_id: the physical block.
        epoch: its epoch while it holds this content.
        num_tokens: slots that are written.
        key: :func:`rest_key` of their tokens.
    """

    block_id: int
    epoch: int
    num_tokens: int
    key: bytes


def rest_key(parent: bytes, tokens: Sequence[int]) -> bytes:
    """Return what names the tokens behind a chain of blocks: 16 bytes.

    Args:
        parent: chain hash of the last full block before them. It covers whatever else the KV
            depends on, so that only calls without inputs of other kinds may be named so.
        tokens: their ids.
    """
    packed = struct.pack(f"<{len(tokens)}q", *tokens)
    return blake2b(packed, digest_size=16, key=parent[:64]).digest()


class Rests:
    """The rests of one engine, by the chain hash before them.

    Args:
        epoch: present epoch of each block; a rest holds for one epoch of its block.
    """

    def __init__(self, epoch: Sequence[int]) -> None:
        self._epoch = epoch
        self._by_parent: dict[bytes, tuple[Rest, ...]] = {}

    def __len__(self) -> int:
        return len(self._by_parent)

    def note(self, parent: bytes, rest: Rest) -> None:
        """Remember a rest, beside equal ones: any may be kept longest. Engine thread only."""
        others = [
            each
            for each in self._by_parent.pop(parent, ())
            if each.epoch == self._epoch[each.block_id] and each.block_id != rest.block_id
        ]
        if len(self._by_parent) >= MOST_PARENTS:
            del self._by_parent[next(iter(self._by_parent))]
        self._by_parent[parent] = (rest, *others[: MOST_OF_ONE - 1])

    def after(self, parent: bytes) -> tuple[Rest, ...]:
        """Return the rests behind a chain hash, newest first; for any thread.

        Their blocks may hold something else by now: their epochs tell.
        """
        return self._by_parent.get(parent, ())

    def clear(self) -> None:
        """Forget all of them. Engine thread only."""
        self._by_parent.clear()
