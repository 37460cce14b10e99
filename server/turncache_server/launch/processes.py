"""One program under the reaper, as the launcher sees it.

Owns the reaper's process and its lifeline: while this object lives and is not stopped the
program may run; when the launcher dies, by whatever means, the program ends with it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from turncache.errors import EnvironmentFault
from turncache_server.launch import supervise

NUM_TAIL_LINES: Final = 60
_POLL_S: Final = 0.02


class Supervised:
    """A running program: its process id, its log, its end.

    Args:
        name: for messages, such as ``prefill-0``.
        command: the program and its arguments.
        environment: the whole environment of the program.
        log_path: newest log file; see :class:`supervise.RotatingLog`.
        grace_s: seconds between TERM and KILL when it is stopped.

    Attributes:
        pid: process id of the program itself.
        reaper_pid: process id of the reaper above it.

    Raises:
        EnvironmentFault: the reaper could not be started.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        environment: Mapping[str, str],
        log_path: Path,
        grace_s: float,
    ) -> None:
        self.name = name
        self.log_path = log_path
        self._grace_s = grace_s
        self._earlier_log = _identity(log_path)
        self._reaper = subprocess.Popen(  # noqa: S603 - our own program, no shell
            [
                *(sys.executable, "-I", supervise.__file__),
                *("--parent", str(os.getpid()), "--log", str(log_path)),
                *("--grace", str(grace_s), "--", *command),
            ],
            env=dict(environment),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self.reaper_pid = self._reaper.pid
        self.pid = self._read_pid()

    def _read_pid(self) -> int:
        assert self._reaper.stdout is not None
        line = self._reaper.stdout.readline()
        if line.strip().isdigit():
            return int(line)
        rest = (line + self._reaper.stdout.read()).decode(errors="replace").strip()
        self.stop()
        raise EnvironmentFault(f"{self.name}: the reaper did not start: {rest}")

    def poll(self) -> int | None:
        """Return the program's exit code once it and all it started have ended."""
        return self._reaper.poll()

    def ask_stop(self) -> None:
        """Tell the reaper to end the program, without waiting."""
        if self._reaper.stdin is not None:
            with suppress(BrokenPipeError):
                self._reaper.stdin.close()
        if self._reaper.poll() is None:
            self._reaper.send_signal(signal.SIGTERM)

    def stop(self) -> None:
        """End the program and everything it started, and wait until that is done."""
        self.ask_stop()
        patience_s = self._grace_s + supervise.KILL_WAIT_S + 1
        try:
            self._reaper.wait(timeout=patience_s)
        except subprocess.TimeoutExpired:
            self._reaper.kill()
            self._reaper.wait()
        if self._reaper.stdout is not None:
            self._reaper.stdout.close()
        if self._reaper.returncode < 0:  # somebody killed the reaper: its work is ours
            _kill_session(self.reaper_pid)

    def tail(self, num_lines: int = NUM_TAIL_LINES) -> list[str]:
        """Return the last lines that this run has logged."""
        lines: deque[str] = deque(maxlen=num_lines)
        for path in (self.log_path.with_name(f"{self.log_path.name}.1"), self.log_path):
            # What an earlier run has written last was moved aside when this one started.
            if _identity(path) != self._earlier_log:
                with suppress(OSError), path.open(errors="replace") as log:
                    lines.extend(line.rstrip("\n") for line in log)
        return list(lines)


def _identity(path: Path) -> tuple[int, int] | None:
    """Tell a file's content apart from any other's, under whatever name; None without it."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns


def stop_all(parts: Sequence[Supervised]) -> None:
    """End several programs at the same time and wait for all of them."""
    for part in parts:
        part.ask_stop()
    for part in parts:
        part.stop()


def _kill_session(session: int) -> None:
    """Kill what a reaper that was itself killed has left behind in its session."""
    deadline = time.monotonic() + 1
    while time.monotonic() < deadline:
        members = _session_members(session)
        if not members:
            return
        for pid in members:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_POLL_S)


def _session_members(session: int) -> list[int]:
    members: list[int] = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            fields = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()
        except OSError:
            continue
        if fields[0] not in "ZX" and int(fields[3]) == session:
            members.append(int(entry.name))
    return members
