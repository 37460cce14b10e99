"""Being read from: answers peek and verify from the live pool.

Runs on the control thread and only reads. What makes its answers right is the order of
reads: epoch, then mark equals epoch, then hash. A marked block is never written again in
the same epoch, so an equal epoch after the read means that nothing was written during it.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, TypeVar

from turncache_server.control.messages import Peek, PeekReply, RestBlock, Verify, VerifyReply
from turncache_server.retention.ledger import Ledger
from turncache_server.retention.mailbox import HandedOver, Mailbox, Promote
from turncache_server.retention.rests import Rests

#: vLLM packs the KV cache group into the key; one group means group 0.
GROUP_SUFFIX: Final = (0).to_bytes(4, "big")
#: Hashes to look at in one go: less than a millisecond.
SLICE: Final = 1024
BREATH_S: Final = 1e-4

T = TypeVar("T")


def holders(block_map: Any, key: bytes) -> Iterator[Any]:
    """Yield every block that the prefix cache lists under ``key``.

    The engine thread may change the entry meanwhile; an answer from a moment before is
    fine, because each block is checked by epoch, mark and hash.
    """
    entry = block_map._cache.get(key)  # noqa: SLF001 - get_one_block shows one holder only
    if entry is None:
        return
    if isinstance(entry, dict):
        try:
            yield from list(entry.values())
        except RuntimeError:  # changed while listing: not held, a needless no
            return
    else:
        yield entry


def _unhurried(items: Sequence[T]) -> Iterator[T]:
    """Yield items, with a breath after so many: the engine thread wants the interpreter too.

    It would wait for up to five milliseconds (Python's switch interval), and long prompts are
    asked about for that long. A breath of no length would not let it in.
    """
    for start in range(0, len(items), SLICE):
        if start:
            time.sleep(BREATH_S)
        yield from items[start : start + SLICE]


class Source:
    """The pool as peers see it.

    Args:
        pool: vLLM's block pool.
        ledger: epochs and written marks.
        mailbox: the way to the engine thread.
        serving: whether this engine may be read from at present.
        known_blocks: (session, hashes) to the number of leading hashes that this engine
            once computed for the session.
        awaits: tail hash to whether a prompt that ends in it waits to be handed over.
        rests: what calls have left in blocks that are not full.
    """

    def __init__(
        self,
        pool: Any,
        ledger: Ledger,
        mailbox: Mailbox,
        *,
        serving: Callable[[], bool],
        known_blocks: Callable[[str, list[bytes]], int],
        awaits: Callable[[bytes], bool],
        rests: Rests,
    ) -> None:
        self._pool = pool
        self._ledger = ledger
        self._mailbox = mailbox
        self._serving = serving
        self._known_blocks = known_blocks
        self._awaits = awaits
        self._rests = rests
        # Strong reference: a replaced map must not be mistaken for a new one at its address.
        self._map = pool.cached_block_hash_to_block
        self._generation = 1
        self.start_id = uuid.uuid4().hex

    @property
    def generation_seen(self) -> int:
        """The generation at the last question; safe to read from any thread."""
        return self._generation

    def generation(self) -> int:
        """Return the cache generation; it rises when a prefix-cache reset has replaced the map."""
        if self._pool.cached_block_hash_to_block is not self._map:
            self._map = self._pool.cached_block_hash_to_block
            self._generation += 1
        return self._generation

    def peek(self, question: Peek) -> PeekReply:
        """Name the longest written prefix of a hash chain, and keep it a little longer."""
        generation = self.generation()
        block_ids, epochs = self._named(question.hashes) if self._serving() else ([], [])
        rests: list[RestBlock] = []
        if block_ids:
            rests = self._rests_after(question.hashes[len(block_ids) - 1])
            self._mailbox.post(
                Promote(
                    (*block_ids, *(rest.block_id for rest in rests)),
                    (*epochs, *(rest.epoch for rest in rests)),
                    generation,
                )
            )
        return PeekReply(
            start_id=self.start_id,
            generation=generation,
            block_ids=block_ids,
            epochs=epochs,
            known=self._known_blocks(question.session, question.hashes),
            rests=rests,
        )

    def _rests_after(self, parent: bytes) -> list[RestBlock]:
        """Return the rests behind a chain hash whose blocks have not been handed out since."""
        epoch = self._ledger.epoch
        rests = [
            RestBlock(
                block_id=rest.block_id,
                epoch=rest.epoch,
                num_tokens=rest.num_tokens,
                key=rest.key,
            )
            for rest in self._rests.after(parent)
            if epoch[rest.block_id] == rest.epoch
        ]
        return rests if self._ledger.in_order else []

    def _named(self, hashes: list[bytes]) -> tuple[list[int], list[int]]:
        """Return the blocks of the longest written prefix, and their epochs.

        The usual case (one block holds the hash) is :meth:`_written` without its calls, in the
        same order of reads.
        """
        block_ids: list[int] = []
        epochs: list[int] = []
        listed = self._map._cache  # noqa: SLF001 - as in holders
        epoch, written = self._ledger.epoch, self._ledger.written
        for chain_hash in _unhurried(hashes):
            key = chain_hash + GROUP_SUFFIX
            block = listed.get(key)
            if block is None:
                break
            if isinstance(block, dict):
                found = self._written(chain_hash)
                if found is None:
                    break
                block_id, at = found
            else:
                block_id = block.block_id
                at = epoch[block_id]
                if written[block_id] != at or block.block_hash != key:
                    break
            block_ids.append(block_id)
            epochs.append(at)
        return (block_ids, epochs) if self._ledger.in_order else ([], [])

    def _written(self, chain_hash: bytes) -> tuple[int, int] | None:
        key = chain_hash + GROUP_SUFFIX
        for block in holders(self._map, key):
            epoch = self._ledger.readable_epoch(block.block_id)
            if epoch is not None and block.block_hash == key:
                return block.block_id, epoch
        return None

    def verify(self, question: Verify) -> VerifyReply:
        """Count the leading blocks whose epoch and hash are what they were at the peek.

        A rest has no hash: its block's epoch is what says that nobody has got it since.
        """
        generation = self.generation()
        valid, rest = 0, False
        if (
            question.start_id == self.start_id
            and question.generation == generation
            and self._serving()
        ):
            epoch, blocks = self._ledger.epoch, self._pool.blocks
            claims = zip(question.block_ids, question.epochs, question.hashes, strict=True)
            for block_id, was, chain_hash in _unhurried(list(claims)):
                if not 0 <= block_id < len(epoch) or epoch[block_id] != was:
                    break
                if blocks[block_id].block_hash != chain_hash + GROUP_SUFFIX:
                    break
                valid += 1
            if question.rest is not None:
                block_id, was = question.rest
                rest = 0 <= block_id < len(epoch) and epoch[block_id] == was
            if self._pool.cached_block_hash_to_block is not self._map:
                valid, rest = 0, False  # reset while we looked
        # An idle engine works nothing off: what says nothing must take no room.
        if valid and self._awaits(tail := question.hashes[valid - 1]):
            self._mailbox.post(HandedOver(tail))
        return VerifyReply(start_id=self.start_id, generation=generation, valid=valid, rest=rest)
