"""How a change of a file is noticed, and taken over while serving."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, Generic, TypeVar

from turncache.errors import ConfigError

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

_LOOK_EVERY_S: Final = 1.0

#: Time of its last change, size and number.
Stamp = tuple[int, int, int]


def stamp_of(path: Path) -> Stamp | None:
    """Return what tells one state of a file from another, None without a file.

    A link is followed, as Kubernetes replaces what it mounts.
    """
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino


class Followed(Generic[_T]):
    """What files hold, read anew when they have changed; they are looked at while it is asked for.

    A state that cannot be used is reported once, and what was read before stays in use.

    Args:
        files: all that count.
        read: reads them.
        clock: monotonic seconds.
        what: its name in the log, with its verb: "the keys in use stay".

    Raises:
        ConfigError: as ``read``.
    """

    def __init__(
        self,
        files: Sequence[Path],
        read: Callable[[], _T],
        clock: Callable[[], float],
        what: str,
    ) -> None:
        self._files = files
        self._read = read
        self._clock = clock
        self._what = what
        self._seen = self._stamps()
        self._latest = read()
        self._looked_s = clock()

    def latest(self) -> _T:
        """Return what the files hold, at most a second late."""
        now_s = self._clock()
        if now_s - self._looked_s < _LOOK_EVERY_S:
            return self._latest
        self._looked_s = now_s
        stamps = self._stamps()
        if stamps == self._seen:
            return self._latest
        self._seen = stamps
        try:
            self._latest = self._read()
        except ConfigError as error:
            logger.error("%s: %s", self._what, error)  # noqa: TRY400 - says it all
        else:
            logger.info("read anew: %s", self._files[0])
        return self._latest

    def _stamps(self) -> list[Stamp | None]:
        return [stamp_of(path) for path in self._files]
