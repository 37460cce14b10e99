"""Facts about this machine, and cores."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from turncache.errors import EnvironmentFault
from turncache_server.launch.affinity import pin_tree
from turncache_server.launch.machine import (
    free_ports,
    inspect_environment,
    inspect_machine,
    port_is_free,
    port_user,
)


def write_package(folder: Path, name: str, **files: str) -> None:
    """Write a package that is found but must not be imported."""
    package = folder / name
    package.mkdir()
    (package / "__init__.py").write_text("raise AssertionError('imported')\n")
    for file, text in files.items():
        (package / f"{file}.py").write_text(text)


def test_an_engine_environment_is_inspected_without_importing_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Versions are read from files: importing vLLM takes seconds, and may fail."""
    version = "__version__: str\n__version__ = version = '0.32.0'\n"
    write_package(tmp_path, "vllm", _version=version)
    write_package(tmp_path, "torch", version="cuda: str | None = '12.9'\nhip = None\n")
    write_package(tmp_path, "nixl")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found = inspect_environment()
    assert (found.vllm_version, found.cuda, found.nixl) == ("0.32.0", True, True)
    assert found.turncache
    assert found.python == sys.executable


def test_an_environment_without_vllm_says_so() -> None:
    """The development environment has none."""
    code = "import importlib.util as i, sys; sys.exit(i.find_spec('vllm') is not None)"
    if subprocess.run([sys.executable, "-c", code], check=False).returncode:
        expected: str | None = "0.32.0"
    else:
        expected = None
    assert inspect_environment().vllm_version == expected


@pytest.mark.parametrize("python", ["/no/such/python", "/bin/false"])
def test_an_interpreter_that_does_not_run_is_an_environment_fault(python: str) -> None:
    """The message names it and the option."""
    with pytest.raises(EnvironmentFault, match=f"'{python}' does not run: .*--python"):
        inspect_environment(python)


def test_the_machine_has_cores_and_memory() -> None:
    """Only cores that this process may use count."""
    machine = inspect_machine()
    assert set(machine.cores) == os.sched_getaffinity(0)
    assert machine.memory_available_bytes > 0


@pytest.mark.parametrize(("visible", "gpus"), [("2,3", ("2", "3")), ("", ())])
def test_visible_devices_are_respected(
    monkeypatch: pytest.MonkeyPatch, visible: str, gpus: tuple[str, ...]
) -> None:
    """GPUs that were taken from this program are not its to give."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert inspect_machine().gpus == gpus


def test_gpus_are_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without that variable the driver's own program is asked."""
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\nprintf '0\\n1\\n'\n")
    program.chmod(0o755)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert inspect_machine().gpus == ("0", "1")


def test_free_ports_are_different_and_can_be_listened_on() -> None:
    """Each can be bound, and none lies in the range for outgoing connections."""
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    ports = free_ports(8)
    assert len(set(ports)) == 8
    for port in ports:
        assert port_is_free("127.0.0.1", port)
        assert port < max(first, 60_000)


def test_a_port_in_use_is_seen_with_its_user() -> None:
    """The process that listens is named."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]
        assert not port_is_free("127.0.0.1", port)
        assert f"process {os.getpid()}" in str(port_user(port))
    assert port_user(port) is None


@pytest.fixture
def threads() -> Callable[[int], list[set[int]]]:
    """Return a function that reads the cores of every thread of a process."""

    def read(pid: int) -> list[set[int]]:
        tasks = Path("/proc", str(pid), "task").iterdir()
        return [set(os.sched_getaffinity(int(task.name))) for task in tasks]

    return read


def test_every_thread_of_a_tree_is_pinned(threads: Callable[[int], list[set[int]]]) -> None:
    """Threads that run already are moved too, in children as well."""
    code = (
        "import os, threading, time\n"
        "child = os.fork()\n"
        "for _ in range(3): threading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n"
        "print(child, flush=True) if child else None\n"
        "time.sleep(60)\n"
    )
    core = max(os.sched_getaffinity(0))
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True
    ) as program:
        assert program.stdout is not None
        child = int(program.stdout.readline())
        try:
            while len(threads(child)) < 4:
                pass
            assert pin_tree(program.pid, ()) == 0
            assert pin_tree(program.pid, {core}) == 8
            assert threads(program.pid) == threads(child) == [{core}] * 4
        finally:
            os.kill(child, 9)
            program.kill()


def test_pinning_a_process_that_is_gone_does_nothing() -> None:
    """An engine may die while it is looked at."""
    with subprocess.Popen(["true"]) as program:
        program.wait()
    assert pin_tree(program.pid, os.sched_getaffinity(0)) == 0
