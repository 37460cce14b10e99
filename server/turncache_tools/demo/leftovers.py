"""What the demo leaves behind: processes, ports and temporary files, read from ``/proc``.

Every process that the demo starts inherits a marker in its environment and a folder of the
demo's own as ``TMPDIR``. While engines run, their listening sockets and the files that they
hold open or mapped outside that folder are noted; at the end whatever of these is still there
is left over. Only what carries the marker is looked at, so that other programs of this
machine never count.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

MARKER: Final = "TURNCACHE_DEMO_RUN"
_TEMPORARY: Final = ("/tmp/", "/var/tmp/", "/dev/shm/")  # noqa: S108 - looked at, not used
_LISTENING: Final = "0A"
_KILL_WAIT_S: Final = 5.0
_POLL_S: Final = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Leftovers:
    """What is still there.

    Attributes:
        processes: id and name.
        ports: TCP ports that are still listened on.
        files: paths.
    """

    processes: tuple[str, ...] = ()
    ports: tuple[int, ...] = ()
    files: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.processes or self.ports or self.files)


@dataclass(slots=True)
class Traces:
    """What the demo's processes were seen to use; the owner of this state.

    Attributes:
        marker: value of :data:`MARKER` in their environment.
        folder: temporary folder of the demo's own.
        proc: where the kernel shows processes.
        term_wait_s: seconds between TERM and KILL; longer than the launcher's own patience.
        since_ns: what was last changed before, in the file system's time, was there already:
            an environment may be installed below a temporary folder.
    """

    marker: str
    folder: Path
    proc: Path = Path("/proc")
    term_wait_s: float = 8.0
    since_ns: int = 0
    _sockets: dict[str, int] = field(default_factory=dict)
    _files: set[str] = field(default_factory=set)

    def note(self) -> None:
        """Note what the processes use now; called while engines run."""
        listening = dict(self._listening())
        for pid in self._marked():
            for target in self._open_files(pid):
                if target in listening:
                    self._sockets[target] = listening[target]
                elif self._is_temporary(target):
                    self._files.add(target)

    def _is_temporary(self, path: str) -> bool:
        if not path.startswith(_TEMPORARY) or path.startswith(f"{self.folder}/"):
            return False
        with suppress(OSError):
            return Path(path).stat().st_ctime_ns >= self.since_ns
        return False

    def left(self) -> Leftovers:
        """Return what is there now that everything should be gone."""
        listening = dict(self._listening())
        mine = set(self._sockets)
        processes = []
        for pid in self._marked():
            processes.append(f"{pid} {self._name(pid)}")
            mine |= set(self._open_files(pid))
        files = sorted(path for path in self._files if Path(path).exists())
        if self.folder.exists():
            files.append(str(self.folder))
        return Leftovers(
            processes=tuple(processes),
            ports=tuple(sorted({listening[s] for s in mine if s in listening})),
            files=tuple(files),
        )

    def end(self) -> None:
        """End every marked process: TERM, and KILL for what is still there after a while."""
        for number, patience_s in (
            (signal.SIGTERM, self.term_wait_s),
            (signal.SIGKILL, _KILL_WAIT_S),
        ):
            for pid in list(self._marked()):
                # It may have ended in between, with the process above it.
                with suppress(ProcessLookupError):
                    os.kill(pid, number)
            waited_s = 0.0
            while waited_s < patience_s and any(self._marked()):
                time.sleep(_POLL_S)
                waited_s += _POLL_S

    def _marked(self) -> Iterator[int]:
        """Yield the processes that carry the marker, this one excluded."""
        wanted = f"{MARKER}={self.marker}".encode()
        for entry in self.proc.iterdir():
            if not entry.name.isdigit() or int(entry.name) == os.getpid():
                continue
            # A process may end at any moment, and other users' are not ours to read.
            with suppress(OSError):
                if wanted in (entry / "environ").read_bytes().split(b"\0") and not self._ended(
                    entry
                ):
                    yield int(entry.name)

    def _ended(self, entry: Path) -> bool:
        """Say whether a process is a zombie: it waits to be reaped and holds nothing."""
        return (entry / "stat").read_text().rpartition(")")[2].split()[0] == "Z"

    def _name(self, pid: int) -> str:
        with suppress(OSError):
            return (self.proc / str(pid) / "comm").read_text().strip()
        return "?"

    def _open_files(self, pid: int) -> Iterator[str]:
        """Yield what a process holds open or mapped: paths, and ``socket:[inode]``."""
        with suppress(OSError):
            for link in (self.proc / str(pid) / "fd").iterdir():
                with suppress(OSError):
                    yield str(link.readlink())
        with suppress(OSError):
            for line in (self.proc / str(pid) / "maps").read_text().splitlines():
                path = line.partition("/")[2]
                if path:
                    yield f"/{path}"

    def _listening(self) -> Iterator[tuple[str, int]]:
        """Yield (``socket:[inode]``, port) of every TCP listener of this machine."""
        for table in ("tcp", "tcp6"):
            with suppress(OSError):
                for line in (self.proc / "net" / table).read_text().splitlines()[1:]:
                    fields = line.split()
                    if fields[3] == _LISTENING:
                        port = int(fields[1].rpartition(":")[2], 16)
                        yield f"socket:[{fields[9]}]", port
