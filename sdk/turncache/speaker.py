"""Who can say something to a server between two calls: a client, weakly, and its event loop."""

from __future__ import annotations

import asyncio
import weakref
from typing import Any


class Speaker:
    """One client whose server has been told of a session; it keeps neither client nor loop alive.

    Attributes:
        client: weak reference to the openai client.
        is_async: whether it makes its calls on an event loop.
    """

    __slots__ = ("_loop", "client", "is_async")

    def __init__(self, client: Any) -> None:
        """Speak for ``client``."""
        self.client: weakref.ref[Any] = weakref.ref(client)
        self.is_async = False
        self._loop: weakref.ref[asyncio.AbstractEventLoop] | None = None

    @property
    def loop(self) -> asyncio.AbstractEventLoop | None:
        """The event loop of the latest async call, if it can still run something."""
        loop = None if self._loop is None else self._loop()
        return None if loop is None or loop.is_closed() else loop

    def use_running_loop(self) -> None:
        """Remember the running event loop; other async libraries have none, and say nothing."""
        self.is_async = True
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            self._loop = None
            return
        if self._loop is None or self._loop() is not loop:
            self._loop = weakref.ref(loop)
