"""The list of engines in a file of its own, followed without a restart.

:class:`EnginesFile` owns what has been seen of the file. A state of it that cannot be used is
reported once, and the engines before it stay in use. A change counts at the second look that
finds it: a file that is being written may end, for a moment, after any of its tables, and
would then be a shorter list.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from turncache.errors import ConfigError
from turncache_server.router.background import running
from turncache_server.router.config import EngineConfig, RouterConfig, read_engines
from turncache_server.router.events import EnginesRefused, Events
from turncache_server.router.pool import Pool
from turncache_server.router.stamps import Stamp, stamp_of


class EnginesFile:
    """A file of engines.

    Args:
        path: the file.
        keyed: see :func:`turncache_server.router.config.read_engines`.
    """

    def __init__(self, path: Path, *, keyed: bool) -> None:
        self._path = path.expanduser()
        self._keyed = keyed
        self._seen: Stamp | None = None
        self._taken: Stamp | None = None

    def look(self) -> tuple[EngineConfig, ...] | None:
        """Return the engines when the file has changed and is at rest, else None.

        Raises:
            ConfigError: it is at rest and cannot be used. It is read again at every look.
        """
        stamp = stamp_of(self._path)
        at_rest = stamp == self._seen
        self._seen = stamp
        if not at_rest or (stamp is not None and stamp == self._taken):
            return None
        self._taken = None
        engines = read_engines(self._path, keyed=self._keyed)
        if stamp_of(self._path) != stamp:
            return None
        self._taken = stamp
        return engines


@asynccontextmanager
async def engines_followed(config: RouterConfig, pool: Pool, events: Events) -> AsyncIterator[None]:
    """Follow ``engines_file``, if one is set, for the length of the block."""
    if not config.engines_file:
        yield
        return
    # The first looks read it again: it may have changed since the settings were read.
    file = EnginesFile(Path(config.engines_file), keyed=bool(config.fleet_secret_file))
    work = _follow(file, pool, events, config.health_interval_s)
    async with running(work, "follow engines_file"):
        yield


async def _follow(file: EnginesFile, pool: Pool, events: Events, interval_s: float) -> None:
    told: str | None = None
    while True:
        await asyncio.sleep(interval_s)
        try:
            # In a thread: a mount that hangs must not hold up the streams.
            engines = await asyncio.to_thread(file.look)
        except ConfigError as error:
            if str(error) != told:
                told = str(error)
                events.emit(EnginesRefused(why=told))
            continue
        if engines is not None:
            told = None
            events.emit(pool.adopt(engines))
