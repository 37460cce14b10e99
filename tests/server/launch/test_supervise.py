"""The reaper: its log, and that nobody outlives it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fakes.vllm_program import processes_with
from turncache.errors import EnvironmentFault
from turncache_server.launch.processes import Supervised
from turncache_server.launch.supervise import NUM_LOG_FILES, RotatingLog, descendants


def wait_until(condition: Callable[[], bool], *, timeout_s: float = 10) -> None:
    """Wait for something that another process does."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)


@contextmanager
def running(tmp_path: Path, *command: str, grace_s: float = 0.1) -> Iterator[Supervised]:
    """Run a command under the reaper."""
    program = Supervised(
        "program",
        command,
        environment=os.environ,
        log_path=tmp_path / "logs" / "program.log",
        grace_s=grace_s,
    )
    try:
        yield program
    finally:
        program.stop()


def wait_for_end(program: Supervised) -> int:
    """Wait until a program has ended by itself."""
    wait_until(lambda: program.poll() is not None)
    code = program.poll()
    assert code is not None
    return code


@settings(deadline=None)
@given(
    chunks=st.lists(st.binary(max_size=60), max_size=40),
    max_bytes=st.integers(1, 50),
)
def test_a_log_keeps_the_end_within_its_size(chunks: list[bytes], max_bytes: int) -> None:
    """Files together hold the end of what was written; none is larger than its size."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "x.log")
        log = RotatingLog(path, max_bytes)
        for chunk in chunks:
            log.write(chunk)
        log.close()
        files = [path.with_name(f"x.log.{n}") for n in range(NUM_LOG_FILES - 1, 0, -1)]
        kept = [file.read_bytes() for file in (*files, path) if file.exists()]
        assert all(len(data) <= max_bytes for data in kept)
        written = b"".join(chunks)
        assert written.endswith(b"".join(kept))
        if len(written) <= max_bytes:
            assert b"".join(kept) == written
        assert len(list(Path(folder).iterdir())) <= NUM_LOG_FILES


def test_a_log_is_cut_at_lines(tmp_path: Path) -> None:
    """A line that fits into a file is never split over two."""
    log = RotatingLog(tmp_path / "x.log", 10)
    log.write(b"one\ntwo\nthree\nfour\n")
    log.close()
    assert (tmp_path / "x.log.2").read_bytes() == b"one\ntwo\n"
    assert (tmp_path / "x.log.1").read_bytes() == b"three\n"
    assert (tmp_path / "x.log").read_bytes() == b"four\n"


def test_a_log_of_an_earlier_run_is_kept_aside(tmp_path: Path) -> None:
    """A new run starts a new file."""
    for text in (b"first", b"second"):
        log = RotatingLog(tmp_path / "x.log", 100)
        log.write(text)
        log.close()
    assert (tmp_path / "x.log.1").read_bytes() == b"first"
    assert (tmp_path / "x.log").read_bytes() == b"second"


def test_a_log_that_cannot_be_written_costs_lines_only(tmp_path: Path) -> None:
    """A folder that vanishes, like a full disk, does not end the program."""
    log = RotatingLog(tmp_path / "logs" / "x.log", 10)
    (tmp_path / "logs" / "x.log").unlink()
    (tmp_path / "logs").rmdir()
    for _ in range(5):
        log.write(b"123456789\n")
    log.close()


def test_a_log_needs_a_size(tmp_path: Path) -> None:
    """A log without room could never be written."""
    with pytest.raises(ValueError, match="expected at least 1"):
        RotatingLog(tmp_path / "x.log", 0)


@pytest.mark.parametrize(
    ("script", "code"),
    [("exit 0", 0), ("exit 7", 7), ("kill -TERM $$", 143), ("kill -SEGV $$", 139)],
)
def test_the_exit_code_is_the_programs(tmp_path: Path, script: str, code: int) -> None:
    """After a signal it is 128 and the signal's number, as in a shell."""
    with running(tmp_path, "bash", "-c", script) as program:
        assert wait_for_end(program) == code


def test_output_goes_to_the_log_in_order_to_the_last_byte(tmp_path: Path) -> None:
    """Standard output and error share one log, complete even when the program ends at once."""
    script = "for i in $(seq 500); do echo line $i; echo error $i >&2; done"
    with running(tmp_path, "bash", "-c", script) as program:
        wait_for_end(program)
        lines = program.log_path.read_text().splitlines()
    assert lines == [f"{word} {i}" for i in range(1, 501) for word in ("line", "error")]
    assert program.tail(2) == ["line 500", "error 500"]


def test_a_program_that_does_not_exist_is_said_in_the_log(tmp_path: Path) -> None:
    """The exit code is a shell's, and the log names the program."""
    with running(tmp_path, "/no/such/program") as program:
        assert wait_for_end(program) == 127
        assert "cannot start /no/such/program" in program.tail()[0]


def test_a_program_starts_with_clean_signals_and_no_input(tmp_path: Path) -> None:
    """Nothing of Python's or the reaper's signal handling is inherited."""
    script = "grep SigIgn /proc/self/status; readlink /proc/self/fd/0"
    with running(tmp_path, "sh", "-c", script) as program:
        wait_for_end(program)
        ignored, standard_input = program.tail()
    # Python itself ignores these two, and a program that does not expect it never ends.
    for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGTERM, signal.SIGCHLD):
        assert not int(ignored.split()[1], 16) >> (number - 1) & 1
    assert standard_input == "/dev/null"


STUBBORN = "trap '' TERM; setsid --fork sleep 300; sleep 300 & exec sleep 300"


def test_stopping_ends_what_ignores_term_and_what_left_the_session(
    tmp_path: Path, mark: str
) -> None:
    """TERM first, KILL after the grace, for the whole tree."""
    with running(tmp_path, "bash", "-c", STUBBORN) as program:
        wait_until(lambda: len(descendants(program.reaper_pid)) >= 3)
        assert program.pid in descendants(program.reaper_pid)
        program.stop()
        assert processes_with(mark) == []
        assert program.poll() == 137


def test_a_program_may_end_in_order_within_the_grace(tmp_path: Path) -> None:
    """TERM comes first, and a program that heeds it says goodbye."""
    script = "trap 'echo goodbye; exit 5' TERM; echo ready; while :; do read -t 0.01 <> <(:); done"
    with running(tmp_path, "bash", "-c", script, grace_s=5) as program:
        wait_until(lambda: program.tail() == ["ready"])
        program.stop()
        assert program.tail() == ["ready", "goodbye"]
        assert program.poll() == 5


def test_asking_again_and_again_does_not_change_the_exit_code(tmp_path: Path) -> None:
    """TERM at any moment of its end does not make the reaper forget what the program said."""
    script = "trap 'exit 5' TERM; echo ready; while :; do read -t 0.01 <> <(:); done"
    with running(tmp_path, "bash", "-c", script, grace_s=5) as program:
        wait_until(lambda: program.tail() == ["ready"])
        while program.poll() is None:
            program.ask_stop()
        assert program.poll() == 5


def test_when_a_program_ends_its_children_end_too(tmp_path: Path, mark: str) -> None:
    """Nobody is left to serve half of an engine."""
    with running(tmp_path, "bash", "-c", f"({STUBBORN}) & sleep 0.05; exit 3") as program:
        assert wait_for_end(program) == 3
        assert processes_with(mark) == []


def test_term_to_the_reaper_ends_everything(tmp_path: Path, mark: str) -> None:
    """What a service manager sends is heeded."""
    with running(tmp_path, "bash", "-c", STUBBORN) as program:
        os.kill(program.reaper_pid, signal.SIGTERM)
        wait_for_end(program)
        assert processes_with(mark) == []


def test_the_end_of_the_lifeline_ends_everything(tmp_path: Path, mark: str) -> None:
    """A launcher whose death the kernel does not report is noticed all the same."""
    with running(tmp_path, "bash", "-c", STUBBORN) as program:
        assert program._reaper.stdin is not None
        program._reaper.stdin.close()
        wait_for_end(program)
        assert processes_with(mark) == []


def test_the_end_of_a_thread_is_not_the_end_of_the_launcher(tmp_path: Path) -> None:
    """The kernel reports the death of the starting thread; the reaper looks closer."""
    started: list[Supervised] = []
    environment = dict(os.environ)

    def start() -> None:
        started.append(
            Supervised(
                "program",
                ("sleep", "300"),
                environment=environment,
                log_path=tmp_path / "x.log",
                grace_s=0.1,
            )
        )

    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    (program,) = started
    try:
        for _ in range(10):
            time.sleep(0.02)
            assert program.poll() is None
    finally:
        program.stop()


LAUNCHER = """
import os, sys, time
from pathlib import Path
from turncache_server.launch.processes import Supervised
program = Supervised(
    "program", sys.argv[2:], environment=os.environ, log_path=Path(sys.argv[1]), grace_s=0.1
)
child = os.fork()  # holds the reaper's standard input open, as multiprocessing does
if child == 0:
    time.sleep(300)
print("UP", flush=True)
time.sleep(300)
"""


def test_the_reaper_notices_a_killed_launcher_though_its_input_stays_open(
    tmp_path: Path, mark: str
) -> None:
    """A forked child of the launcher keeps the lifeline; the kernel's signal tells."""
    command = [sys.executable, "-c", LAUNCHER, str(tmp_path / "x.log"), "bash", "-c", STUBBORN]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout is not None
        assert launcher.stdout.readline() == "UP\n"
        forked = descendants(launcher.pid)
        launcher.kill()
        launcher.wait()
    # The forked child is not of the stack, and stays.
    wait_until(lambda: len(processes_with(mark)) == 1, timeout_s=5)
    assert set(processes_with(mark)) <= forked


def test_a_reaper_that_cannot_start_says_why(tmp_path: Path) -> None:
    """A log that cannot be opened is an error of the start, with the reason."""
    (tmp_path / "file").touch()
    with pytest.raises(EnvironmentFault, match=r"did not start: cannot write the log .*/x.log"):
        Supervised(
            "program",
            ("true",),
            environment=os.environ,
            log_path=tmp_path / "file" / "x.log",
            grace_s=0.1,
        )
