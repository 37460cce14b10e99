"""Work that outlives the request it belongs to: owned, bounded, never lost silently."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

logger = logging.getLogger(__name__)


def tell_failure(task: asyncio.Task[None]) -> None:
    """Log why a task has failed, when nobody waits for it."""
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("%s failed", task.get_name(), exc_info=error)


@asynccontextmanager
async def running(work: Coroutine[Any, Any, None], name: str) -> AsyncIterator[None]:
    """Let a task run for the length of the block; why it has failed is logged."""
    task = asyncio.create_task(work, name=name)
    task.add_done_callback(tell_failure)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


class Background:
    """A set of tasks that ends with the application."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Start a task, which is kept until it has ended, and return it."""
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        tell_failure(task)

    async def close(self, timeout_s: float) -> None:
        """Wait for the tasks, then cancel what is left."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=timeout_s)
        left = list(self._tasks)
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
