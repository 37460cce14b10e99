"""What this machine and its engine environment offer: facts, read once, no decisions."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from turncache.errors import EnvironmentFault, why_of

#: Run by the engine's interpreter. It looks without importing: importing vLLM takes seconds.
_PROBE: Final = """
import importlib.util, json, pathlib, re, runpy
def folder(name):
    spec = importlib.util.find_spec(name)
    return pathlib.Path(spec.origin).parent if spec and spec.origin else None
vllm, torch = folder("vllm"), folder("torch")
version, cuda = None, None
if vllm:
    text = (vllm / "_version.py").read_text() if (vllm / "_version.py").exists() else ""
    found = re.search(r"^__version__\\b.*?['\\"]([^'\\"]+)['\\"]", text, re.MULTILINE)
    version = found[1] if found else "dev"
if torch and (torch / "version.py").exists():
    names = runpy.run_path(str(torch / "version.py"))
    cuda = bool(names.get("cuda") or names.get("hip"))
print(json.dumps({
    "version": version, "cuda": cuda, "nixl": bool(folder("nixl")),
    "turncache": bool(folder("turncache_server")),
}))
"""
_PROBE_TIMEOUT_S: Final = 60
_LOWEST_FREE_PORT: Final = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineEnvironment:
    """The Python environment in which engines run.

    Attributes:
        python: its interpreter.
        vllm_version: such as ``0.32.0``; None when vLLM is not installed.
        cuda: the installed torch drives a GPU.
        nixl: NIXL is installed.
        turncache: our connector is installed.
    """

    python: str
    vllm_version: str | None
    cuda: bool
    nixl: bool
    turncache: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Hardware that engines may use.

    Attributes:
        cores: CPU numbers that this process may run on.
        memory_available_bytes: what can be allocated without swapping.
        gpus: device numbers, as ``CUDA_VISIBLE_DEVICES`` names them.
    """

    cores: tuple[int, ...]
    memory_available_bytes: int
    gpus: tuple[str, ...] = ()


def inspect_machine() -> Machine:
    """Read the facts about this machine."""
    return Machine(
        cores=tuple(sorted(os.sched_getaffinity(0))),
        memory_available_bytes=_memory_available_bytes(),
        gpus=_gpus(),
    )


def inspect_environment(python: str | None = None) -> EngineEnvironment:
    """Look into the environment of ``python``, by default the running interpreter.

    Raises:
        EnvironmentFault: the interpreter does not run.
    """
    python = python or sys.executable
    try:
        done = subprocess.run(  # noqa: S603 - the interpreter that the caller named
            [python, "-c", _PROBE],
            check=True,
            capture_output=True,
            text=True,
            timeout=_PROBE_TIMEOUT_S,
        )
        found = json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise EnvironmentFault(
            f"the engine's interpreter {python!r} does not run: {why_of(error)}; name one with "
            "--python"
        ) from error
    return EngineEnvironment(
        python=python,
        vllm_version=found["version"],
        cuda=bool(found["cuda"]),
        nixl=found["nixl"],
        turncache=found["turncache"],
    )


def free_ports(count: int) -> tuple[int, ...]:
    """Return ports that are free now, below the range for outgoing connections.

    An engine binds its ports many seconds after they were chosen; in that time the system
    hands ports of its own range to any outgoing connection.

    Raises:
        EnvironmentFault: not enough free ports.
    """
    candidates = list(range(_LOWEST_FREE_PORT, _first_ephemeral_port()))
    random.shuffle(candidates)
    with ExitStack() as held:
        found: list[int] = []
        for port in candidates:
            if len(found) == count:
                break
            probe = held.enter_context(socket.socket())
            with suppress(OSError):
                probe.bind(("127.0.0.1", port))
                found.append(port)
    if len(found) < count:
        raise EnvironmentFault(f"{count} free ports are needed, {len(found)} were found")
    return tuple(found)


def port_is_free(host: str, port: int) -> bool:
    """Say whether a server could listen on ``port`` now.

    Raises:
        OSError: it could not for another reason than that somebody listens there.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            return False
    return True


def port_user(port: int) -> str | None:
    """Name the process that listens on TCP ``port``, when this user may see it."""
    inodes = _listening_inodes(port)
    if not inodes:
        return None
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and inodes & _open_files(entry):
            with suppress(OSError):
                return f"{(entry / 'comm').read_text().strip()}, process {entry.name}"
    return None


def _open_files(process: Path) -> set[str]:
    """Return where the descriptors of a process point, as far as this user may see them."""
    links: set[str] = set()
    with suppress(OSError):
        for link in (process / "fd").iterdir():
            with suppress(OSError):  # closed while we looked
                links.add(str(link.readlink()))
    return links


def _listening_inodes(port: int) -> set[str]:
    """Return the ``socket:[inode]`` names of listeners on ``port``."""
    inodes: set[str] = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with suppress(OSError):
            for line in Path(table).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == "0A" and int(fields[1].rpartition(":")[2], 16) == port:
                    inodes.add(f"socket:[{fields[9]}]")
    return inodes


def _first_ephemeral_port() -> int:
    try:
        text = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text()
        first = int(text.split()[0])
    except (OSError, ValueError, IndexError):
        first = 32_768
    # A machine that hands out nearly all ports leaves no room below: take the risk.
    return first if first > _LOWEST_FREE_PORT + 1000 else 60_000


def _memory_available_bytes() -> int:
    """Return what this machine has left, or this control group when that is less."""
    return min([_machine_memory_bytes(), *_group_memory_bytes(Path("/sys/fs/cgroup"))])


def _group_memory_bytes(root: Path) -> Iterator[int]:
    """Yield what each limited control group above this process has left (cgroup v2)."""
    with suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            if line.startswith("0::"):
                folder = root / line[3:].strip("/")
                for group in (folder, *folder.parents):
                    if root in (group, *group.parents):
                        with suppress(OSError, ValueError):  # no such file: no limit of its own
                            limit = int((group / "memory.max").read_text())
                            yield max(0, limit - _unreclaimable_bytes(group))


def _unreclaimable_bytes(group: Path) -> int:
    used = int((group / "memory.current").read_text())
    for line in (group / "memory.stat").read_text().splitlines():
        name, _, size = line.partition(" ")
        if name == "inactive_file":  # caches give way
            used -= int(size)
    return used


def _machine_memory_bytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise EnvironmentFault("/proc/meminfo has no MemAvailable: Linux 3.14 or newer is needed")


def _gpus() -> tuple[str, ...]:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return tuple(name.strip() for name in visible.split(",") if name.strip())
    program = shutil.which("nvidia-smi")
    if program is None:
        return ()
    query: Sequence[str] = (program, "--query-gpu=index", "--format=csv,noheader")
    try:
        done = subprocess.run(  # noqa: S603 - a fixed question
            query, check=True, capture_output=True, text=True, timeout=_PROBE_TIMEOUT_S
        )
    except (OSError, subprocess.SubprocessError):
        return ()
    return tuple(line.strip() for line in done.stdout.splitlines() if line.strip().isdigit())
