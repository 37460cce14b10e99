"""The files of a trace: the present part, and full ones beside it, the oldest removed."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Final, TextIO

#: Full parts that are kept beside the present one.
KEPT_PARTS: Final = 64


class TraceFiles:
    """Writes lines to ``path``; a full part becomes ``path.<number>``.

    Numbers rise over all starts of an engine, so the order of names is that of time. What
    an earlier start has left in ``path`` is kept in the same way.

    Args:
        path: of the present part; its folder must exist. One engine per path.
        begin: begins a part and returns its first line.
        part_bytes: size at which a part is full.
    """

    def __init__(self, path: Path, begin: Callable[[], str], *, part_bytes: int) -> None:
        self._path = path
        self._begin = begin
        self._part_bytes = part_bytes
        self._size = 0
        self._file = self._open()

    def write(self, line: str) -> None:
        """Write one line of ASCII."""
        self._file.write(line)
        self._size += len(line)

    def room(self) -> None:
        """Begin the next part if the present one is full."""
        if self._size >= self._part_bytes:
            self._file.close()
            self._file = self._open()

    def flush(self) -> None:
        """Let readers see what was written."""
        self._file.flush()

    def close(self) -> None:
        """Close the present part."""
        self._file.close()

    def _open(self) -> TextIO:
        parts = self._parts()
        if self._path.exists() and self._path.stat().st_size:
            number = parts[-1][0] + 1 if parts else 1
            target = self._path.with_name(f"{self._path.name}.{number:06d}")
            self._path.replace(target)
            parts.append((number, target))
        for _, path in parts[:-KEPT_PARTS]:
            path.unlink()
        # Who may read it may read how much is asked, and when: the owner only.
        descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        file = os.fdopen(descriptor, "w", encoding="ascii")
        self._size = 0
        line = self._begin()
        file.write(line)
        self._size += len(line)
        return file

    def _parts(self) -> list[tuple[int, Path]]:
        found = []
        for path in self._path.parent.glob(f"{self._path.name}.*"):
            suffix = path.name.removeprefix(f"{self._path.name}.")
            if suffix.isdigit():
                found.append((int(suffix), path))
        return sorted(found)
