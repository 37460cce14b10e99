"""The one way from other threads to the engine thread: a bounded mailbox without a lock.

Other threads post; the engine thread drains, before the free queue's choice and in the
per-step hooks and nowhere else.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Final

from turncache_server.retention.lineages import Signal

#: Room for a signal to every session that is remembered: one that is idle and being drained
#: obeys none of them, but they say which of its sessions have left.
CAPACITY: Final = 16_384
#: Promotions to hold: each names the blocks of a whole prompt.
MOST_PROMOTIONS: Final = 128


@dataclass(frozen=True, slots=True)
class Promote:
    """A peer is about to read these blocks: let them be the last of their shelves.

    Attributes:
        block_ids: blocks named to the peer.
        epochs: their epochs when they were named; a block that has moved on is ignored.
        generation: cache generation at that time; commands of another one are dropped.
    """

    block_ids: tuple[int, ...]
    epochs: tuple[int, ...]
    generation: int


@dataclass(frozen=True, slots=True)
class HandedOver:
    """A peer has verified the prompt that ends in this chain hash."""

    tail_hash: bytes


@dataclass(frozen=True, slots=True)
class Signalled:
    """The world outside a request says something about a session."""

    session: str
    kind: Signal
    expect_s: float | None


@dataclass(frozen=True, slots=True)
class SwitchMode:
    """Switch the extension to ``off``, ``observe`` or ``on``."""

    mode: str


Command = Promote | HandedOver | Signalled | SwitchMode


class Mailbox:
    """Bounded queue of commands; any thread posts, the engine thread drains.

    Built on a deque, whose append and popleft are atomic.

    Args:
        capacity: most commands to hold. A few more can slip in when several threads post
            at the same moment.

    Attributes:
        commands: what is waiting; to be looked at only.
        refused: commands that found the mailbox full.
    """

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._capacity = capacity
        self.commands: deque[Command] = deque()
        self.refused = 0

    def __len__(self) -> int:
        return len(self.commands)

    def post(self, command: Command) -> bool:
        """Leave a command; False when the mailbox is full.

        Promotions, which are hints and come in numbers, find less room than others, and a change
        of mode finds some when there is none for anything else: an idle engine that is only
        peeked at must still be able to hear it.
        """
        limit = self._capacity
        if isinstance(command, Promote):
            limit = min(limit // 2, MOST_PROMOTIONS)
        elif not isinstance(command, SwitchMode):
            limit -= limit // 8
        if len(self.commands) >= limit:
            self.refused += 1
            return False
        self.commands.append(command)
        return True

    def drain(self, most: int | None = None) -> list[Command]:
        """Take what is there at the time of the call, oldest first; engine thread only.

        Args:
            most: leave what is more than that, None to leave nothing.
        """
        commands = self.commands
        # Bounded by the length now: a thread that keeps posting must not keep the engine.
        count = len(commands) if most is None else min(most, len(commands))
        return [commands.popleft() for _ in range(count)]
