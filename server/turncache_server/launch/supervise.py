"""The reaper: stands between the launcher and one program, and leaves nothing behind.

Run as a program, isolated and with the standard library only (``python -I supervise.py``),
so that nothing the engine needs in its environment reaches it::

    supervise.py --parent PID --log FILE --log-bytes N --grace SECONDS -- COMMAND ...

It is started as a session of its own (Ctrl-C reaches the launcher only, which stops in
order) and is the subreaper of everything below it, so no descendant can leave its sight.
The program and all its descendants end (TERM, after ``--grace`` KILL) when

* the program itself ends,
* the reaper gets TERM or INT,
* the launcher dies or closes the reaper's standard input. Two ways to notice, because each
  has a gap: the kernel's parent-death signal also comes when only the *thread* that started
  us ends, and a forked child of the launcher can hold our standard input open.

The program's output goes through a pipe into a log file of bounded size, so a chatty
engine never fills the disk. The first line on standard output is the program's process id,
what follows is the reaper's own failure; the exit code is the program's (128 + n after
signal n).
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import os
import selectors
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from io import FileIO
from pathlib import Path
from types import FrameType
from typing import Final

NUM_LOG_FILES: Final = 3
DEFAULT_LOG_BYTES: Final = 16 * 1024 * 1024
DEFAULT_GRACE_S: Final = 2.0
#: After KILL only a process in an uninterruptible wait stays; waiting longer helps nobody.
KILL_WAIT_S: Final = 5.0

_PR_SET_PDEATHSIG: Final = 1
_PR_SET_CHILD_SUBREAPER: Final = 36
_POLL_S: Final = 0.05
_STOP: Final = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP})
_OURS: Final = _STOP | {signal.SIGUSR1, signal.SIGCHLD}
_IGNORED_BY_PYTHON: Final = frozenset({signal.SIGPIPE, signal.SIGXFSZ})


def descendants(root: int) -> set[int]:
    """Return the process ids below ``root``, zombies excluded."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            # The name in parentheses may hold anything, also spaces and parentheses.
            stat = (entry / "stat").read_text(errors="replace")
        except OSError:
            continue  # it ended while we looked
        state, parent = stat.rpartition(")")[2].split()[:2]
        if state not in "ZX":
            children.setdefault(int(parent), []).append(int(entry.name))
    found: set[int] = set()
    pending = [root]
    while pending:
        below = children.get(pending.pop(), [])
        found.update(below)
        pending.extend(below)
    return found


class RotatingLog:
    """A log file of at most ``max_bytes``, with the two files before it.

    Args:
        path: the newest file; older ones are ``path.1`` and ``path.2``. A file that an
            earlier run left there is rotated away.
        max_bytes: size at which a new file begins, at a line's end where there is one.

    A full disk costs log lines, never the program: what cannot be written is dropped.
    """

    def __init__(self, path: Path, max_bytes: int) -> None:
        if max_bytes < 1:
            raise ValueError(f"max_bytes: {max_bytes}: expected at least 1")
        self._path = path
        self._max_bytes = max_bytes
        self._size = 0
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and path.stat().st_size:
            self._shift()
        self._file: FileIO | None = path.open("wb", buffering=0)

    def write(self, data: bytes) -> None:
        """Append ``data``."""
        while self._size + len(data) > self._max_bytes:
            room = max(0, self._max_bytes - self._size)
            cut = data.rfind(b"\n", 0, room) + 1
            if not cut and not self._size:
                cut = room  # one line longer than a whole file
            self._append(data[:cut])
            data = data[cut:]
            self._rotate()
        self._append(data)

    def close(self) -> None:
        """Close the newest file."""
        if self._file is not None:
            self._file.close()

    def _append(self, data: bytes) -> None:
        if self._file is not None:
            with suppress(OSError):
                self._file.write(data)
        self._size += len(data)

    def _rotate(self) -> None:
        self.close()
        self._file = None
        with suppress(OSError):
            self._shift()
            self._file = self._path.open("wb", buffering=0)
        self._size = 0

    def _shift(self) -> None:
        names = [self._path.name, *(f"{self._path.name}.{n}" for n in range(1, NUM_LOG_FILES))]
        for newer, older in reversed(list(itertools.pairwise(names))):
            source = self._path.with_name(newer)
            if source.exists():
                source.replace(self._path.with_name(older))


class Reaper:
    """Runs one program and ends it with everything it started.

    Args:
        command: the program and its arguments.
        parent: process id of the launcher.
        log: takes the program's output.
        grace_s: seconds between TERM and KILL.
    """

    def __init__(
        self, command: Sequence[str], *, parent: int, log: RotatingLog, grace_s: float
    ) -> None:
        self._command = list(command)
        self._parent = parent
        self._log = log
        self._grace_s = grace_s
        self._stop_asked = False
        self._exit_code: int | None = None
        self._pid = 0
        self._selector = selectors.DefaultSelector()

    def run(self) -> int:
        """Run to the end and return the program's exit code."""
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
        # A signal of its own: TERM must stay distinguishable from the death of a thread.
        _prctl(_PR_SET_PDEATHSIG, signal.SIGUSR1)
        wake, wake_write = os.pipe()
        for end in (wake, wake_write):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        for number in _OURS:
            signal.signal(number, self._ask_stop if number in _STOP else _only_wake)
        if os.getppid() != self._parent:  # it died before the line above
            return 128 + signal.SIGTERM
        output = self._spawn()
        sys.stdout.write(f"{self._pid}\n")
        sys.stdout.flush()
        self._selector.register(output, selectors.EVENT_READ, self._copy_output)
        self._selector.register(wake, selectors.EVENT_READ, _drain)
        self._selector.register(0, selectors.EVENT_READ, self._read_lifeline)
        while not self._stop_asked and self._exit_code is None:
            self._turn(None)
            if os.getppid() != self._parent:
                self._stop_asked = True
        self._end_descendants()
        self._drain_output(output)
        for number in _STOP:
            # Python gives our handlers back before it ends: a late TERM would be our exit code.
            signal.signal(number, signal.SIG_IGN)
        return self._exit_code if self._exit_code is not None else 128 + signal.SIGKILL

    def _spawn(self) -> int:
        """Start the program; return the reading end of its output."""
        output, output_write = os.pipe()
        os.set_blocking(output, False)
        pid = os.fork()
        if pid == 0:
            self._become_program(output_write)
        os.close(output_write)
        self._pid = pid
        return output

    def _become_program(self, output_write: int) -> None:
        """In the child: replace this process with the program, or say why not."""
        try:
            signal.set_wakeup_fd(-1)
            for number in _OURS | _IGNORED_BY_PYTHON:
                signal.signal(number, signal.SIG_DFL)
            _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
            null = os.open(os.devnull, os.O_RDONLY)
            os.dup2(null, 0)
            os.dup2(output_write, 1)
            os.dup2(output_write, 2)
            os.execvp(self._command[0], self._command)  # noqa: S606 - no shell on purpose
        except OSError as error:
            os.write(2, f"cannot start {self._command[0]}: {error}\n".encode())
        finally:
            os._exit(127)

    def _turn(self, timeout_s: float | None) -> None:
        """Handle what is ready, and collect whoever has ended."""
        for key, _ in self._selector.select(timeout_s):
            key.data(key.fd)
        self._reap()

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == self._pid:
                code = os.waitstatus_to_exitcode(status)
                self._exit_code = code if code >= 0 else 128 - code

    def _end_descendants(self) -> None:
        """TERM, then KILL after the grace, until nobody is left."""
        told: set[int] = set()
        kill_at = time.monotonic() + self._grace_s
        give_up_at = kill_at + KILL_WAIT_S
        while (left := descendants(os.getpid())) and time.monotonic() < give_up_at:
            if time.monotonic() >= kill_at:
                _signal_all(left, signal.SIGKILL)
            else:
                _signal_all(left - told, signal.SIGTERM)
                told |= left
            self._turn(_POLL_S)
        self._reap()

    def _drain_output(self, output: int) -> None:
        if output in self._selector.get_map():
            self._copy_output(output)

    def _copy_output(self, output: int) -> None:
        while True:
            try:
                data = os.read(output, 1 << 16)
            except BlockingIOError:
                return
            if not data:
                self._selector.unregister(output)
                return
            self._log.write(data)

    def _read_lifeline(self, lifeline: int) -> None:
        if not os.read(lifeline, 4096):
            self._selector.unregister(lifeline)
            self._stop_asked = True

    def _ask_stop(self, _number: int, _frame: FrameType | None) -> None:
        self._stop_asked = True


def _only_wake(_number: int, _frame: FrameType | None) -> None:
    """Leave the work to the loop, which the wake-up pipe ends the wait of."""


def _drain(fd: int) -> None:
    with suppress(BlockingIOError):
        while os.read(fd, 4096):
            pass


def _signal_all(pids: set[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0):
        code = ctypes.get_errno()
        raise OSError(code, f"prctl({option}, {value}): {os.strerror(code)}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the reaper."""
    parser = argparse.ArgumentParser(prog="supervise", description="run and reap one program")
    parser.add_argument("--parent", type=int, required=True, help="process id of the launcher")
    parser.add_argument("--log", type=Path, required=True, help="file for the output")
    parser.add_argument("--log-bytes", type=int, default=DEFAULT_LOG_BYTES)
    parser.add_argument("--grace", type=float, default=DEFAULT_GRACE_S, help="TERM to KILL, s")
    parser.add_argument("command", nargs="+")
    options = parser.parse_args(argv)
    try:
        log = RotatingLog(options.log, options.log_bytes)
    except OSError as error:
        sys.stdout.write(f"cannot write the log {options.log}: {error}\n")
        return 1
    reaper = Reaper(options.command, parent=options.parent, log=log, grace_s=options.grace)
    try:
        return reaper.run()
    finally:
        log.close()


if __name__ == "__main__":
    sys.exit(main())
