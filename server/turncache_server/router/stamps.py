"""How a change of a file is noticed."""

from __future__ import annotations

from pathlib import Path

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
