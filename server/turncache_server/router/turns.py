"""Whose turn it is to begin, when many calls come at once.

A call costs most before its first leg is sent. If all of a burst began in one turn of the event
loop, every stream would stand still meanwhile, and the first of them would be answered hardly
sooner than the last. So a few begin in each turn, first come, first served, and the loop reads and
passes on in between what engines have sent.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Final

#: Beside the first, so many of those that wait begin in a turn: one in this number. A long queue
#: moves faster, because the turns of a busy loop are long.
_SHARE: Final = 16


class Turns:
    """Lets calls begin, a few in each turn of the event loop."""

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._taken = False

    async def come(self) -> None:
        """Wait for a turn; at once while nobody else begins."""
        loop = asyncio.get_running_loop()
        if not self._taken:
            self._taken = True
            loop.call_soon(self._next)
            return
        turn = loop.create_future()
        self._waiting.append(turn)
        await turn

    def _next(self) -> None:
        self._taken = bool(self._waiting)
        if not self._taken:
            return
        for _ in range(1 + len(self._waiting) // _SHARE):
            turn = self._waiting.popleft()
            if not turn.done():  # its client has left
                turn.set_result(None)
        asyncio.get_running_loop().call_soon(self._next)
