"""What is left behind: found in a made-up /proc, and once in the real one."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from turncache_tools.demo.leftovers import MARKER, Leftovers, Traces

SOCKETS = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when uid timeout inode\n"


class FakeProc:
    """A ``/proc`` in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "net").mkdir(parents=True)
        self.listen({})

    def listen(self, ports: dict[int, int]) -> None:
        """Show listeners: port by inode; one more connection is established."""
        rows = [
            f"   0: 0100007F:{port:04X} 00000000:0000 0A 0:0 0:0 0 0 0 {inode} 1\n"
            for inode, port in ports.items()
        ]
        rows.append("   9: 0100007F:2710 0100007F:0001 01 0:0 0:0 0 0 0 99 1\n")
        (self.folder / "net" / "tcp").write_text(SOCKETS + "".join(rows))

    def process(
        self, pid: int, marker: str | None, *files: str, maps: str = "", state: str = "S"
    ) -> None:
        """Show a process with open files."""
        folder = self.folder / str(pid)
        (folder / "fd").mkdir(parents=True)
        environ = b"PATH=/bin\0" + (f"{MARKER}={marker}\0".encode() if marker else b"")
        (folder / "environ").write_bytes(environ)
        (folder / "stat").write_text(f"{pid} (a (b) c) {state} 1 1")
        (folder / "comm").write_text("VLLM::Worker\n")
        (folder / "maps").write_text(maps)
        for number, target in enumerate(files):
            (folder / "fd" / str(number)).symlink_to(target)

    def end(self, pid: int) -> None:
        """Let a process end."""
        (self.folder / str(pid)).rename(self.folder / f"ended-{pid}")


@pytest.fixture
def proc(tmp_path: Path) -> FakeProc:
    """An empty /proc."""
    return FakeProc(tmp_path / "proc")


@pytest.fixture
def traces(tmp_path: Path, proc: FakeProc) -> Traces:
    """Traces of a demo whose folder is gone."""
    return Traces(marker="m1", folder=tmp_path / "gone", proc=proc.folder)


def test_a_clean_end_leaves_nothing(traces: Traces, proc: FakeProc) -> None:
    """Processes, listeners and mapped files that are gone do not count."""
    proc.listen({71: 8100})
    proc.process(5, "m1", "socket:[71]", "/dev/shm/psm_gone")
    traces.note()
    proc.end(5)
    proc.listen({})
    assert traces.left() == Leftovers()
    assert not traces.left()


def test_a_marked_process_is_left(traces: Traces, proc: FakeProc) -> None:
    """Whatever it is called, wherever it hangs in the tree."""
    proc.process(5, "m1")
    assert traces.left().processes == ("5 VLLM::Worker",)


@pytest.mark.parametrize("marker", [None, "m2", "m11"])
def test_other_programs_are_not_ours(traces: Traces, proc: FakeProc, marker: str | None) -> None:
    """Another demo, or anything else of this machine, never counts."""
    proc.listen({71: 8100})
    proc.process(5, marker, "socket:[71]")
    assert not traces.left()


def test_a_zombie_is_not_left(traces: Traces, proc: FakeProc) -> None:
    """It has ended; its parent has not looked yet."""
    proc.process(5, "m1", state="Z")
    assert not traces.left()


def test_a_listener_that_outlives_its_process_is_left(traces: Traces, proc: FakeProc) -> None:
    """A child without the marker may have inherited the socket."""
    proc.listen({71: 8100, 72: 9000})
    proc.process(5, "m1", "socket:[71]")
    traces.note()
    proc.end(5)
    assert traces.left().ports == (8100,)


def test_another_listener_on_the_same_port_is_not_ours(traces: Traces, proc: FakeProc) -> None:
    """A port is given to the next program at once; the socket tells."""
    proc.listen({71: 8100})
    proc.process(5, "m1", "socket:[71]")
    traces.note()
    proc.end(5)
    proc.listen({88: 8100})
    assert not traces.left()


def test_files_in_shared_memory_are_left(
    traces: Traces, proc: FakeProc, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Open or mapped; only those outside the demo's own folder, which goes as a whole."""
    shared = tmp_path / "shm"
    shared.mkdir()
    monkeypatch.setattr("turncache_tools.demo.leftovers._TEMPORARY", (f"{shared}/",))
    mapped, opened, freed = shared / "mapped", shared / "opened", shared / "freed"
    for path in (mapped, opened, freed):
        path.touch()
    proc.process(
        5, "m1", str(opened), str(freed), maps=f"7f0-7f1 rw-s 00000000 00:17 33   {mapped}\n"
    )
    traces.note()
    proc.end(5)
    freed.unlink()
    assert traces.left().files == (str(mapped), str(opened))


def test_what_was_there_before_is_not_left(
    traces: Traces, proc: FakeProc, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An environment below a temporary folder is mapped by every process, and stays."""
    library = tmp_path / "shm" / "library.so"
    library.parent.mkdir()
    library.write_bytes(b"x")
    monkeypatch.setattr("turncache_tools.demo.leftovers._TEMPORARY", (f"{library.parent}/",))
    proc.process(7, "m1", str(library))
    traces.since_ns = library.stat().st_ctime_ns + 1
    traces.note()
    assert traces.left().files == ()


def test_the_demos_own_folder_is_left(proc: FakeProc, tmp_path: Path) -> None:
    """It holds what its processes wrote to TMPDIR."""
    folder = tmp_path / "own"
    folder.mkdir()
    traces = Traces(marker="m1", folder=folder, proc=proc.folder)
    assert traces.left().files == (str(folder),)


def test_marked_processes_are_ended(tmp_path: Path) -> None:
    """After an interrupt nobody else does; one that ignores TERM is killed."""
    program = (
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN if sys.argv[1] == 'deaf' else "
        "signal.SIG_DFL)\n"
        "print('ready', flush=True)\n"
        "time.sleep(60)\n"
    )
    traces = Traces(marker=f"end-{os.getpid()}", folder=tmp_path / "gone", term_wait_s=0.2)
    children = [
        subprocess.Popen(
            [sys.executable, "-c", program, kind],
            stdout=subprocess.PIPE,
            env={**os.environ, MARKER: traces.marker},
        )
        for kind in ("deaf", "meek")
    ]
    for child in children:
        assert child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
    traces.end()
    codes = []
    for child in children:
        with child:
            codes.append(child.wait(timeout=5))
    assert codes == [-9, -15]


def test_a_real_process_and_its_port_are_found(tmp_path: Path) -> None:
    """The format of this machine's /proc is the one that is read."""
    program = (
        "import socket, sys\n"
        "s = socket.create_server(('127.0.0.1', 0))\n"
        "print(s.getsockname()[1], flush=True)\n"
        "sys.stdin.read()\n"
    )
    traces = Traces(marker=f"test-{os.getpid()}", folder=tmp_path / "gone")
    with subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, MARKER: traces.marker},
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        port = int(child.stdout.readline())
        left = traces.left()
        assert left.ports == (port,)
        assert [entry.split()[0] for entry in left.processes] == [str(child.pid)]
        traces.note()
        child.stdin.close()
    assert not traces.left()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", port))
