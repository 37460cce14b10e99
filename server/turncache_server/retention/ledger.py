"""Epochs and written marks of all blocks. Owner of both tables.

An *epoch* is raised when a block is handed out, and when a scheduled step will write a
block whose content is complete or about to be. A block is *marked* while ``written`` equals
``epoch``: its content is complete and is never written again in that epoch, neither by a
new owner nor by its own.

Epochs come from one counter that only rises, so an epoch names a block's content for the
life of the ledger, a reset included.

Only the engine thread calls the methods that change something. Other threads may read the
lists element by element, in the order of :meth:`Ledger.readable_epoch`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable
from typing import Final

#: vLLM keeps at most a few steps in flight. More notes than this mean that steps are
#: scheduled and never processed: the order is lost.
MAX_STEPS_IN_FLIGHT: Final = 256

#: (request id, block id, epoch at schedule time); no request for a pulled block.
_Note = list[tuple[str | None, int, int]]


class Ledger:
    """Epoch and written mark per block.

    Args:
        num_blocks: blocks in the pool.

    Attributes:
        epoch: present epoch of each block.
        written: epoch at which the block's content is complete, -1 for never.
        last_epoch: the highest epoch given so far. Whoever hands blocks out raises it by
            one and gives the new value to all of them.
        in_order: False for ever after a note mismatch; nothing is marked from then on.
    """

    def __init__(self, num_blocks: int) -> None:
        self.epoch: list[int] = [0] * num_blocks
        self.written: list[int] = [-1] * num_blocks
        self.last_epoch = 0
        self.in_order = True
        # Epoch for which a step (or a pull) that completes the block is noted. A second
        # step may write the block again before the first has been processed: the mark
        # must not come up under that write, so this counts like a mark.
        self._completing: list[int] = [-1] * num_blocks
        self._loaded: _Note = []
        self._notes: deque[_Note] = deque()

    def schedule(self, writes: Iterable[tuple[str, int, bool]]) -> None:
        """Note one scheduled step; called once per step, empty steps too.

        Args:
            writes: (request id, block id, the step writes the block's last slot) for every
                block that the step writes.
        """
        epoch, completing = self.epoch, self._completing
        note, self._loaded = self._loaded, []
        for request_id, block_id, fills in writes:
            if completing[block_id] == epoch[block_id]:
                self._raise(block_id)
            if fills:
                completing[block_id] = epoch[block_id]
                note.append((request_id, block_id, epoch[block_id]))
        if not self.in_order:
            return
        if len(self._notes) == MAX_STEPS_IN_FLIGHT:
            self._lose_order()
            return
        self._notes.append(note)

    def loaded(self, block_ids: Iterable[int]) -> None:
        """Announce pulled and verified blocks.

        They are marked when the next step to be scheduled has been processed, because the
        worker may still be rearranging what it received.
        """
        for block_id in block_ids:
            if self._completing[block_id] == self.epoch[block_id]:
                # A pull into complete content has changed it already.
                self._raise(block_id)
            self._completing[block_id] = self.epoch[block_id]
            self._loaded.append((None, block_id, self.epoch[block_id]))

    def processed(self, *, failed: Collection[str] = ()) -> None:
        """Mark what the oldest noted step has completed; called once per processed step.

        A block whose epoch has been raised since its note stays unmarked, and so do the
        blocks of requests in ``failed``, whose step computed on invalid input.
        """
        if not self.in_order:
            return
        if not self._notes:
            self._lose_order()
            return
        epoch, written = self.epoch, self.written
        for request_id, block_id, noted in self._notes.popleft():
            if epoch[block_id] == noted and (request_id is None or request_id not in failed):
                written[block_id] = noted

    def readable_epoch(self, block_id: int) -> int | None:
        """Return the epoch of a marked block, None for any other; for any thread.

        The epoch is read before the mark: read the other way round, a block that is handed
        out and scheduled in between would show its old mark beside its new epoch.
        """
        epoch = self.epoch[block_id]
        return epoch if self.written[block_id] == epoch and self.in_order else None

    def reset(self) -> None:
        """Unmark every block, in flight or not, by raising all epochs (prefix-cache reset)."""
        self.last_epoch += 1
        # In place: other threads hold the list.
        self.epoch[:] = [self.last_epoch] * len(self.epoch)

    def _raise(self, block_id: int) -> None:
        self.last_epoch += 1
        self.epoch[block_id] = self.last_epoch

    def _lose_order(self) -> None:
        self.in_order = False
        self._notes.clear()
